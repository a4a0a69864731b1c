"""Shared-prefix passes merged into what tokens found in their own rows: kernels/merge_passes.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048  # of a program's tile


def merge_passes_(
    out: torch.Tensor,
    lse: torch.Tensor,
    part_out: torch.Tensor,
    part_lse: torch.Tensor,
    index: torch.Tensor,
) -> None:
    """See kernels/merge_passes.py; V a power of two. A token without parts is left as it is."""
    tokens, heads, width = out.shape
    assert width & (width - 1) == 0, f"values of {width}"
    assert out.is_contiguous(), "out is contiguous"
    assert part_out.is_contiguous(), "part_out is contiguous"
    assert index.is_contiguous(), "index is contiguous"
    if tokens == 0:
        return
    rows = max(1, min(triton.next_power_of_2(heads), _ELEMENTS // width))
    _merge_passes[(tokens, triton.cdiv(heads, rows))](
        out, lse, part_out, part_lse, index,
        lse.stride(0), lse.stride(1), *part_lse.stride(),
        HEADS=heads,
        VALUE=width,
        ROWS=rows,
        QUERIES=part_lse.shape[2],
        DEPTH=index.shape[1],
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _merge_passes(
    out, lse, part_out, part_lse, index,
    lse_t, lse_h, part_r, part_h, part_w,
    HEADS: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Some heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    # A token's parts come in order: without the first there is none.
    if tl.load(index + token * DEPTH) >= 0:
        head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        inside = head < HEADS
        value = tl.arange(0, VALUE)
        at = (token * HEADS + head)[:, None] * VALUE + value[None, :]
        top = _load_lse(lse + token * lse_t + head * lse_h, inside)
        keys = top > float("-inf")
        acc = tl.load(out + at, mask=(inside & keys)[:, None], other=0.0).to(tl.float32)
        total = tl.where(keys, 1.0, 0.0)
        for depth in tl.static_range(DEPTH):
            part = tl.load(index + token * DEPTH + depth).to(tl.int64)
            there = head < tl.where(part >= 0, HEADS, 0)
            run, query = part // QUERIES, part % QUERIES
            weight = _load_lse(part_lse + run * part_r + head * part_h + query * part_w, there)
            there = there & (weight > float("-inf"))
            values = tl.load(
                part_out + (part * HEADS + head)[:, None] * VALUE + value[None, :],
                mask=there[:, None],
                other=0.0,
            ).to(tl.float32)
            new_top = tl.maximum(top, weight)
            safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
            keep, share = tl.exp(top - safe), tl.exp(weight - safe)
            acc = acc * keep[:, None] + values * share[:, None]
            total = total * keep + share
            top = new_top
        acc = acc / tl.maximum(total, 1.0)[:, None]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _load_lse(there, mask):
    value = tl.load(there, mask=mask, other=float("-inf"))
    return tl.where(value == float("inf"), float("-inf"), value)
