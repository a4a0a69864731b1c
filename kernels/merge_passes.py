"""Shared-prefix passes merged into what tokens found in their own rows.

Shapes: N tokens, H heads, V value width; parts: R runs of W queries, part r·W + w; D parts at most
a token. LSE: natural log, fp32; +inf and -inf both say that a query had no keys.

    token t     own rows (out[t], lse[t])  +  parts index[t, 0], index[t, 1], ...   (-1: none)
"""

from __future__ import annotations

import torch


def merge_passes_(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """Merges into out, in place; lse stays as it is.

    out [N, H, V] and part_out [R·W, H, V] of one float dtype, contiguous; lse fp32 [N, H] and
    part_lse fp32 [R, H, W] of any strides; index int32 [N, D], contiguous.
    """
    runs, heads, width = part_lse.shape
    assert out.shape[1:] == part_out.shape[1:], f"{tuple(out.shape)}, {tuple(part_out.shape)}"
    assert part_out.shape[0] == runs * width, "a part for each query of each run"
    assert lse.shape == out.shape[:2], "an lse does not fit its output"
    assert heads == out.shape[1], "an lse does not fit its output"
    assert index.shape[0] == out.shape[0], "parts of each token"
    assert index.dtype == torch.int32, "index is int32"
    if out.is_cuda:
        from kernels.triton import merge_passes as gpu  # imported where there is a GPU only

        gpu.merge_passes_(out, lse, part_out, part_lse, index)
        return
    by_part = part_lse.transpose(1, 2).reshape(-1, heads)  # [R·W, H]
    there = (index >= 0).T  # [D, N]
    chosen = index.clamp_min(0).long().T
    sides = torch.cat((lse[None], by_part[chosen]))  # [1 + D, N, H]
    sides = sides.masked_fill(sides == float("inf"), float("-inf"))
    sides[1:].masked_fill_(~there[:, :, None], float("-inf"))
    top = sides.amax(0)
    weights = (sides - top.masked_fill(top == float("-inf"), 0.0)).exp()
    values = torch.cat((out[None], part_out[chosen])).float()
    values = values.masked_fill((weights == 0)[..., None], 0.0)  # whatever it is
    merged = (values * weights[..., None]).sum(0) / weights.sum(0).clamp_min(1.0)[..., None]
    out.copy_(merged)
