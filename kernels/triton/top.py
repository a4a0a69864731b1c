"""The greatest logit of each row: of its splits first, then of those. S splits of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SPLIT = 8192  # logits that one program looks at


@triton.jit
def _top_kernel(logits, tops, ids, stride, size, BLOCK: tl.constexpr):
    """The greatest of a split and its id; NaN counts as the greatest, the first of equals wins."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + col, mask=col < size, other=float("-inf"))
    value = value.to(tl.float32)
    key = tl.where(value == value, value, float("inf"))
    top = tl.max(key, 0)
    first = tl.min(tl.where((key == top) & (col < size), col, size), 0)
    # A NaN is reported as one: the caller's check of finite logits must see it.
    broken = tl.max((value != value).to(tl.int32), 0)
    if broken > 0:
        first = tl.min(tl.where(value != value, col, size), 0)
    place = row * tl.num_programs(1) + split
    tl.store(tops + place, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + place, first)


@triton.jit
def row_top(tops, ids, row, splits, size, SPLITS: tl.constexpr):
    """(the greatest logit of the row, its id, whether there is a NaN)."""
    split = tl.arange(0, SPLITS)
    inside = split < splits
    value = tl.load(tops + row * splits + split, mask=inside, other=float("-inf"))
    first = tl.load(ids + row * splits + split, mask=inside, other=size)
    broken = tl.max((value != value).to(tl.int32), 0)
    key = tl.where(value == value, value, float("inf"))
    top = tl.max(key, 0)
    wanted = (value != value) if broken > 0 else (key == top)
    return top, tl.min(tl.where(wanted & inside, first, size), 0), broken


def tops(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the greatest logit of each split fp32 [N, S], its id int32 [N, S]): what `row_top` takes.

    logits fp32 or bf16 [N, V], last dim contiguous.
    """
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert size > 0, "no ids"
    splits = triton.cdiv(size, _SPLIT)
    greatest = torch.empty(num_rows, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, splits, dtype=torch.int32, device=logits.device)
    if num_rows:
        _top_kernel[(num_rows, splits)](
            logits, greatest, ids, logits.stride(0), size, BLOCK=_SPLIT, num_warps=8
        )
    return greatest, ids
