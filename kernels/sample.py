"""Choice of tokens from logits, in plain torch. N rows, V ids."""

from __future__ import annotations

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the id of the greatest logit of [N, V], of equals the lowest; NaN is greatest."""
    values = torch.where(logits.isnan(), float("inf"), logits.float())
    top = values.amax(dim=1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(values == top, ids, logits.shape[1]).amin(dim=1)


def draw(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """int64 [N]: inverse CDF in the order of ids over the filtered softmax; by sorting each row.

    logits [N, V]; u fp64 [N] in [0, 1); filters in order: temperature, min_p (share of the top's
    weight; 0: none), top_k (0: none), top_p (of what is left; 1: none).
    """
    scores = logits.float()
    weights = ((scores - scores.amax(1, keepdim=True)) / temperature[:, None]).exp()  # [N, V]
    order = weights.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    kept = order.values >= min_p[:, None].clamp(max=1.0)
    kept &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    sums = (order.values.double() * kept).cumsum(1)
    before = sums - order.values
    kept &= (before < top_p[:, None] * sums[:, -1:]) | (top_p[:, None] >= 1) | (rank == 0)
    keep = torch.zeros_like(kept).scatter_(1, order.indices, kept)
    cumulative = (weights.double() * keep).cumsum(1)
    target = torch.minimum(u * cumulative[:, -1], cumulative[:, -1].nextafter(u * 0))
    return (cumulative > target[:, None]).int().argmax(1)
