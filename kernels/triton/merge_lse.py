"""Merging partial attentions by their log-sum-exp; formulas and contract in kernels/merge_lse.py.

K partials, N rows, H heads, V value width. LSE: natural log, fp32, -inf for a side without keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096  # of a program's tile: 32 fp32 registers a thread and side
_COMBINED = 512  # the same of `combine_lse`: many programs of one warp, several parts in flight


def merge_lse_(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    """Merges (o_b, lse_b) into (o_a, lse_a) in place.

    o_a, o_b [N, H, V] of any float dtype and strides, V with unit stride; lse_a, lse_b fp32 [N, H].
    """
    assert o_a.shape == o_b.shape, f"outputs differ: {tuple(o_a.shape)}, {tuple(o_b.shape)}"
    assert lse_a.shape == lse_b.shape == o_a.shape[:-1], "an lse does not fit its output"
    assert lse_a.dtype == lse_b.dtype == torch.float32, "lse is fp32"
    assert o_a.stride(2) == o_b.stride(2) == 1, "values have unit stride"
    num, heads, width = o_a.shape
    if num * heads == 0:
        return
    block = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // block)
    _merge[(triton.cdiv(num * heads, rows),)](
        o_a,
        lse_a,
        o_b,
        lse_b,
        num * heads,
        *o_a.stride()[:2],
        *lse_a.stride(),
        *o_b.stride()[:2],
        *lse_b.stride(),
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _merge(
    o_a,
    lse_a,
    o_b,
    lse_b,
    num_rows,
    o_a_n,
    o_a_h,
    lse_a_n,
    lse_a_h,
    o_b_n,
    o_b_h,
    lse_b_n,
    lse_b_h,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = index < num_rows
    n = (index // HEADS).to(tl.int64)
    h = (index % HEADS).to(tl.int64)
    at_a = lse_a + n * lse_a_n + h * lse_a_h
    l_a = tl.load(at_a, mask=there, other=float("-inf"))
    l_b = tl.load(lse_b + n * lse_b_n + h * lse_b_h, mask=there, other=float("-inf"))
    col = tl.arange(0, BLOCK)
    inside = there[:, None] & (col < WIDTH)[None, :]
    out = o_a + (n * o_a_n + h * o_a_h)[:, None] + col[None, :]
    # A side without keys is not even read: what it holds cannot come through.
    a = tl.load(out, mask=inside & (l_a > float("-inf"))[:, None], other=0.0).to(tl.float32)
    there_b = inside & (l_b > float("-inf"))[:, None]
    b = tl.load(o_b + (n * o_b_n + h * o_b_h)[:, None] + col[None, :], mask=there_b, other=0.0)
    top = tl.maximum(l_a, l_b)
    top = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
    w_a, w_b = tl.exp(l_a - top), tl.exp(l_b - top)
    total = w_a + w_b
    share = 1.0 / tl.maximum(total, 1.0)  # total is 0 or >= 1
    merged = a * (w_a * share)[:, None] + b.to(tl.float32) * (w_b * share)[:, None]
    tl.store(out, merged.to(o_a.dtype.element_ty), mask=inside)
    log_sum = top + tl.log(tl.maximum(total, 1.0))
    tl.store(at_a, tl.where(total > 0, log_sum, float("-inf")), mask=there)


def combine_lse(o: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges K partials at once: o [K, N, H, V], lse fp32 [K, N, H], V with unit stride.

    Returns new (o [N, H, V] in o's dtype, lse fp32 [N, H]).
    """
    assert lse.shape == o.shape[:-1], "an lse does not fit its output"
    assert lse.dtype == torch.float32, "lse is fp32"
    assert o.stride(3) == 1, "values have unit stride"
    parts, num, heads, width = o.shape
    out = torch.empty(num, heads, width, dtype=o.dtype, device=o.device)
    out_lse = torch.empty(num, heads, dtype=torch.float32, device=o.device)
    if num * heads == 0:
        return out, out_lse
    block = triton.next_power_of_2(width)
    rows = max(1, _COMBINED // block)
    _combine[(triton.cdiv(num * heads, rows),)](
        o,
        lse,
        out,
        out_lse,
        parts,
        num * heads,
        *o.stride()[:3],
        *lse.stride(),
        HEADS=heads,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        PARTS=min(4, triton.next_power_of_2(parts)),
        num_warps=1,
    )
    return out, out_lse


@triton.jit
def _combine(
    o,
    lse,
    out,
    out_lse,
    parts,
    num_rows,
    o_k,
    o_n,
    o_h,
    lse_k,
    lse_n,
    lse_h,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """PARTS partials at a time: their loads do not wait for one another."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = index < num_rows
    n = (index // HEADS).to(tl.int64)
    h = (index % HEADS).to(tl.int64)
    col = tl.arange(0, BLOCK)
    inside = there[:, None] & (col < WIDTH)[None, :]
    at_o = o + (n * o_n + h * o_h)[:, None] + col[None, :]
    at_lse = lse + n * lse_n + h * lse_h
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in range(0, parts, PARTS):
        new_top = top
        for i in tl.static_range(PARTS):
            more = index < tl.where(first + i < parts, num_rows, 0)
            part = tl.load(at_lse + (first + i) * lse_k, mask=more, other=float("-inf"))
            new_top = tl.maximum(new_top, part)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        keep = tl.exp(top - safe)
        acc, total, top = acc * keep[:, None], total * keep, new_top
        for i in tl.static_range(PARTS):
            more = index < tl.where(first + i < parts, num_rows, 0)
            part = tl.load(at_lse + (first + i) * lse_k, mask=more, other=float("-inf"))
            value = tl.load(at_o + (first + i) * o_k, mask=inside & more[:, None], other=0.0)
            value = tl.where((part > float("-inf"))[:, None], value, 0.0)  # whatever it is
            weight = tl.exp(part - safe)
            acc += value.to(tl.float32) * weight[:, None]
            total += weight
    acc = acc / tl.maximum(total, 1.0)[:, None]
    flat = index.to(tl.int64)
    target = out + flat[:, None] * WIDTH + col[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)
    tl.store(
        out_lse + flat,
        tl.where(total > 0, top + tl.log(tl.maximum(total, 1.0)), float("-inf")),
        mask=there,
    )
