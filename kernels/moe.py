"""Running tokens through their experts. T tokens, D hidden, E experts, k experts a token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
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
    num_tokens, top_k = ids.shape
    # Index arithmetic on the host: the counts are needed there, and few tokens are mostly calls.
    flat = ids.reshape(-1).cpu().numpy()  # [T·k]
    order = flat.argsort(kind="stable")  # (token, expert) pairs by expert
    counts = np.bincount(flat, minlength=num_experts).tolist()
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    rows = x.index_select(0, torch.from_numpy(order // top_k).to(x.device))  # [T·k, D]
    hit = [expert for expert, count in enumerate(counts) if count]
    parts = torch.split(rows, [counts[expert] for expert in hit])
    out = torch.cat([mlp(expert, part) for expert, part in zip(hit, parts, strict=True)])
    # One pass that gathers each token's k rows and adds them up, weighted.
    total: torch.Tensor = F.embedding_bag(
        torch.from_numpy(place.reshape(num_tokens, top_k)).to(x.device),
        out,
        mode="sum",
        per_sample_weights=weights.to(x.dtype),
    )
    return total
