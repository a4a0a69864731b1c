"""Random tokens with parts of shared passes, and their answer."""

from __future__ import annotations

import torch

from kernels import reference_attention as reference

INF = float("inf")


def passes(
    tokens: int, heads: int, width: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, ...]:
    """Three tokens of each four with parts; the first has two, the second none, ..."""
    out = torch.randn(tokens, heads, width).to(device, dtype)
    lse = (5 * torch.randn(tokens, heads, 1)).to(device)[..., 0]
    runs, queries = -(-tokens // 3), 4
    part_out = torch.randn(runs * queries, heads, width).to(device, dtype)
    part_lse = (5 * torch.randn(runs, heads, queries)).to(device)
    index = torch.full((tokens, 2), -1, dtype=torch.int32)
    order = torch.randperm(runs * queries)[:tokens].int()
    for token in range(tokens):
        if token % 4 != 1:
            index[token, 0] = order[token]
        if token % 4 == 0:
            index[token, 1] = order[(token + 1) % tokens]
    lse[2 % tokens] = INF  # no rows of its own
    out[2 % tokens] = float("nan")
    return out, lse, part_out, part_lse, index.to(device)


def expected(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[N, H, V], by `combine_lse` of each token's sides."""
    flat = part_lse.transpose(1, 2).flatten(0, 1)
    answers = []
    for token, parts in enumerate(index.tolist()):
        chosen = [part for part in parts if part >= 0]
        o = torch.stack([out[token], *(part_out[part] for part in chosen)])
        weight = torch.stack([lse[token], *(flat[part] for part in chosen)])
        weight[weight == INF] = -INF
        answers.append(reference.combine_lse(o.to(dtype)[:, None], weight.to(dtype)[:, None])[0])
    return torch.cat(answers)
