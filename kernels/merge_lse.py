"""Merging partial attentions by their log-sum-exp.

Shapes: K partials, N rows, H heads, V value width. LSE: natural log, fp32.
Two partials over disjoint keys (o_a, l_a), (o_b, l_b) of the same queries give

    m = max(l_a, l_b)    w = exp(l - m)
    o = (w_a o_a + w_b o_b) / (w_a + w_b)    l = m + log(w_a + w_b)

A side without keys has l = -inf; its o may be anything, NaN included, and is selected away (0 times
NaN is NaN). Both sides empty: o = 0, l = -inf. l = +inf is not accepted here: a backend whose empty
rows have it normalises them itself.
"""

from __future__ import annotations

import torch

_EMPTY = float("-inf")


def merge_lse_(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """Merges (o_b, lse_b) into (o_a, lse_a) in place.

    o_a, o_b [N, H, V] of any float dtype and any strides (each its own); lse_a, lse_b fp32 [N, H],
    likewise. Weights and sums are fp32; one rounding to o_a's dtype. The b side is only read.
    """
    assert o_a.shape == o_b.shape, f"outputs differ: {tuple(o_a.shape)}, {tuple(o_b.shape)}"
    assert lse_a.shape == lse_b.shape == o_a.shape[:-1], "an lse does not fit its output"
    assert lse_a.dtype == lse_b.dtype == torch.float32, "lse is fp32"
    if o_a.is_cuda:
        from kernels.triton import merge_lse as gpu  # Triton is imported where there is a GPU only

        gpu.merge_lse_(o_a, lse_a, o_b, lse_b)
        return
    top = torch.maximum(lse_a, lse_b)
    top = top.masked_fill(top == _EMPTY, 0.0)  # -inf - -inf would be NaN
    weight_a, weight_b = torch.exp(lse_a - top), torch.exp(lse_b - top)  # [N, H]
    total = weight_a + weight_b  # 0 where both are empty, else >= 1
    share = 1.0 / total.clamp_min(1.0)
    merged = _weighted(o_a, weight_a * share, lse_a)
    merged += _weighted(o_b, weight_b * share, lse_b)  # [N, H, V]
    o_a.copy_(merged)
    lse_a.copy_(top + torch.log(total))


def combine_lse(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges K partials at once: KV splits, or the ranks of a context-parallel group.

    o [K, N, H, V], lse fp32 [K, N, H]. Returns new (o [N, H, V] in o's dtype, lse fp32 [N, H]).
    """
    assert lse.shape == o.shape[:-1], "an lse does not fit its output"
    assert lse.dtype == torch.float32, "lse is fp32"
    if o.is_cuda:
        from kernels.triton import merge_lse as gpu

        return gpu.combine_lse(o, lse)
    top = lse.amax(dim=0)  # [N, H]
    top = top.masked_fill(top == _EMPTY, 0.0)
    weight = torch.exp(lse - top)  # [K, N, H]
    total = weight.sum(dim=0)
    share = weight / total.clamp_min(1.0)
    out = _weighted(o, share, lse).sum(dim=0)  # [N, H, V]
    return out.to(o.dtype), top + torch.log(total)


def _weighted(o: torch.Tensor, weight: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """fp32 o · weight, 0 where lse is -inf whatever o holds; a new tensor of o's shape."""
    out = o.float() * weight.unsqueeze(-1)
    empty = lse == _EMPTY
    if bool(empty.any()):
        out.masked_fill_(empty.unsqueeze(-1), 0.0)
    return out
