"""Running tokens through their experts. T tokens, D hidden, E experts, k experts a token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ExpertMLP = Callable[[int, torch.Tensor], torch.Tensor]


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    num_experts: int,
    mlp: ExpertMLP,
) -> torch.Tensor:
    """Sum over each token's experts of weight · mlp(expert, x).

    x [T, D]; ids int64 [T, k]; weights fp32 [T, k]. `mlp(e, rows [n, D]) -> [n, D]` is called once
    for every expert that is hit, in order of experts. Returns [T, D] in x's dtype.
    """
    weights = weights.to(x.dtype)
    if x.shape[0] == 1:
        return _run_one(x, ids, weights, mlp)
    num_tokens, top_k = ids.shape
    flat = ids.reshape(-1)  # [T·k]
    order = flat.argsort(stable=True)  # (token, expert) pairs by expert
    counts = flat.bincount(minlength=num_experts).tolist()
    rows = x.index_select(0, order // top_k)  # [T·k, D]
    out = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            out[start : start + count] = mlp(expert, rows[start : start + count])
            start += count
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    # One pass that gathers each token's k rows and adds them up, weighted.
    total: torch.Tensor = F.embedding_bag(
        place.view(num_tokens, top_k), out, mode="sum", per_sample_weights=weights
    )
    return total


def _run_one(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, mlp: ExpertMLP
) -> torch.Tensor:
    """The same for T = 1, without sorting: a decode step is dominated by the number of calls."""
    pairs = sorted(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    out: torch.Tensor = mlp(pairs[0][0], x) * pairs[0][1]
    for expert, weight in pairs[1:]:
        out.add_(mlp(expert, x), alpha=weight)
    return out
