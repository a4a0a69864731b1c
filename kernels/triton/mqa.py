"""Absorbed attention over pages: every head attends to the same rows, whose latent part is v.

T tokens, H heads, S slots, L latent, R rope. A fixed grid of programs works through a list that
`mqa_plan` made on the host: nothing but capacities shapes a launch, so it goes into a CUDA graph.
A block of KV rows is loaded once and is both k and v. LSE: natural log, fp32.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.kv_gather import fp8_row_bytes, fp8_views
from kernels.triton.mqa_combine import combine_parts
from kernels.triton.mqa_plan import ITEM, MQACapacity

_LOG2_E = 1.4426950408889634
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class MQAConfig:
    """Block shapes; block_m and block_n are also the plan's.

    `parted`: hide from Triton, in branches that are always taken, what feeds what. It would give
    q·k and the p·v after it one layout, in which all warps share the columns: with 64 rows and 8
    warps each half then computes all of q·k. And it would copy the next block only once the work on
    this one has been issued; with all of that in a branch, the copy comes first.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    parted: bool = False


def choose_config(num_heads: int, rows: torch.dtype, *, shared: bool = False) -> MQAConfig:
    """Measured on an H200 (tests/bench/gpu/bench_mqa.py); 227 KB of shared memory hold a tile of
    queries and num_stages blocks of rows.

    rows: the pool's dtype (uint8: FP8). shared: for steps with shared passes, where a program has
    rows of many tokens to fill a tile with; a few heads of one token are best alone in a small one.
    """
    if rows == torch.float32:
        return MQAConfig(16, 16, 4, 1)
    if num_heads <= 16 and not shared and rows != torch.uint8:
        return MQAConfig(16, 64, 8, 3)
    return MQAConfig(64, 64, 8, 2, parted=True)


class MQAPartials:
    """Where pieces leave partial answers; one serves all layers and graphs of a capacity."""

    def __init__(
        self,
        capacity: MQACapacity,
        latent: int,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        rows = capacity.max_parts * capacity.num_heads
        self.out = torch.empty(rows, latent, dtype=dtype, device=device)
        self.lse = torch.empty(rows, dtype=torch.float32, device=device)  # base 2

    @property
    def num_bytes(self) -> int:
        return self.out.nbytes + self.lse.nbytes


def mqa(
    q: torch.Tensor,
    pool: torch.Tensor,
    page_table: torch.Tensor,
    plan: torch.Tensor,
    out: torch.Tensor,
    *,
    capacity: MQACapacity,
    config: MQAConfig,
    partials: MQAPartials,
    page_size: int,
    scale: float,
    lse: torch.Tensor | None = None,
    combine: bool = True,
) -> None:
    """Fills out (and lse) for the planned tokens; others stay as they are. Never syncs.

    q [T, H, L + R] and out [T, H, L], any strides but unit in the last dim; pool [S, L + R] in q's
    dtype, or FP8 rows uint8 [S, 656] (kv_gather.py); page_table int32 [B, pages], any row stride;
    plan int32 [capacity.at.end], `plan_mqa`'s buffer on the device; lse fp32 [T, H]. L and R are
    powers of two ≥ 16, page_size a power of two.
    `combine` False: the caller knows that the plan has no units (never inside a graph).
    """
    heads, width = q.shape[1:]
    latent = out.shape[2]
    rope = width - latent
    assert heads == capacity.num_heads, f"{heads} heads, planned for {capacity.num_heads}"
    fp8 = pool.dtype == torch.uint8
    views = fp8_views(pool, latent, rope) if fp8 else (pool, pool, pool)
    if not fp8:
        assert pool.shape[1] == width, f"rows are {pool.shape[1]} wide, queries {width}"
        assert pool.dtype == q.dtype, f"rows are {pool.dtype}, queries {q.dtype}"
    assert out.shape[:2] == q.shape[:2], f"out is {tuple(out.shape)}"
    assert plan.shape == (capacity.at.end,), "a plan of another capacity"
    assert plan.dtype == page_table.dtype == torch.int32, "plan and page table are int32"
    assert q.stride(2) == pool.stride(1) == out.stride(2) == page_table.stride(1) == 1, "strides"
    assert (config.block_m, config.block_n) == (capacity.block_m, capacity.block_n), "other blocks"
    assert latent & (latent - 1) == rope & (rope - 1) == page_size & (page_size - 1) == 0
    assert min(latent, rope) >= 16, f"L {latent}, R {rope}"
    assert lse is None or (lse.shape == q.shape[:2] and lse.dtype == torch.float32)
    assert pool.shape[0] < 1 << 31, "slots are 32 bits"
    dependent = not _INTERPRET and _launches_early(q.device)
    at, last = capacity.at, out if lse is None else lse  # without lse, out only fills the place
    _attend[(capacity.num_cuts * capacity.lanes,)](
        q, *views, page_table, plan, out, last, partials.out, partials.lse,
        scale * _LOG2_E,
        q.stride(0), q.stride(1), views[0].stride(0), page_table.stride(0),
        out.stride(0), out.stride(1), last.stride(0), last.stride(1),
        at.cuts, at.items, at.tokens,
        HEADS=heads,
        HEAD_BLOCK=capacity.head_block,
        LANES=capacity.lanes,
        LATENT=latent,
        ROPE=rope,
        PAGE=page_size,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        STAGES=config.num_stages,
        PARTED=config.parted,
        FP8=fp8,
        ROW_BYTES=fp8_row_bytes(latent, rope),
        WITH_LSE=lse is not None,
        ITEM=ITEM,
        DEPENDENT=dependent,
        INTERPRET=_INTERPRET,
        num_warps=config.num_warps,
    )  # fmt: skip
    if not combine:
        return
    combine_parts(plan, out, lse, partials.out, partials.lse, capacity, early=dependent)


@functools.cache
def _launches_early(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one that it depends on has ended."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _attend(
    q, pool, scales, ropes, table, plan, out, lse, part_out, part_lse,
    scale_log2,
    q_t, q_h, pool_stride, table_stride,
    out_t, out_h, lse_t, lse_h,
    at_cuts, at_items, at_tokens,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, LANES: tl.constexpr,
    LATENT: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PARTED: tl.constexpr,
    FP8: tl.constexpr, ROW_BYTES: tl.constexpr,
    WITH_LSE: tl.constexpr, ITEM: tl.constexpr, DEPENDENT: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Works through the pieces of one stretch, for the heads of one lane."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()  # `_combine` may start wherever this has ended
    lane = tl.program_id(0) % LANES
    cut = tl.program_id(0) // LANES
    row = tl.arange(0, BLOCK_M)  # (token of the tile, head of the lane)
    local = row // HEAD_BLOCK
    head = lane * HEAD_BLOCK + row % HEAD_BLOCK
    latent = tl.arange(0, LATENT)
    rope = tl.arange(0, ROPE)
    col = tl.arange(0, BLOCK_N)
    first_piece = tl.load(plan + at_cuts + cut)
    last_piece = tl.load(plan + at_cuts + cut + 1)
    for piece in range(first_piece, last_piece):
        item = plan + at_items + piece * ITEM
        list_at, num_tokens = tl.load(item), tl.load(item + 1)
        pages = table + tl.load(item + 2).to(tl.int64) * table_stride
        begin, end = tl.load(item + 3), tl.load(item + 4)
        limit, step, part = tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)

        ours = (local < num_tokens) & (head < HEADS)
        token = tl.load(plan + at_tokens + list_at + local, mask=ours, other=0).to(tl.int64)
        q_row = q + token * q_t + head * q_h
        q_latent = tl.load(q_row[:, None] + latent[None, :], mask=ours[:, None], other=0.0)
        q_rope = tl.load(q_row[:, None] + LATENT + rope[None, :], mask=ours[:, None], other=0.0)
        limits = limit + local * step  # [BLOCK_M]

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)  # added up at the end
        acc = tl.zeros([BLOCK_M, LATENT], tl.float32)
        slots = _slots(pages, begin, end, col, PAGE, INTERPRET)
        ahead = _slots(pages, begin + BLOCK_N, end, col, PAGE, INTERPRET)
        for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
            slot = slots.to(tl.int64)[:, None]
            if FP8:
                kv = _dequantised(pool, scales, slot, LATENT, ROW_BYTES, ropes.dtype.element_ty)
                k_rope = tl.load(ropes + tl.trans(slot) * (ROW_BYTES // 2) + rope[:, None])
            else:
                rows = pool + slot * pool_stride
                kv = tl.load(rows + latent[None, :])  # [BLOCK_N, LATENT]: k and v
                k_rope = tl.load(tl.trans(rows) + LATENT + rope[:, None])  # transposed
            # Slots are on their way two blocks ahead, rows one.
            slots = _moved(ahead, INTERPRET)
            ahead = _slots(pages, start + 2 * BLOCK_N, end, col, PAGE, INTERPRET)
            seen = (start + col)[None, :] < tl.minimum(limits, end)[:, None]
            if PARTED:
                if start < end:  # always, and the next one too: see MQAConfig
                    of_latent = _dot(q_latent, tl.trans(kv), None, INTERPRET)
                    of_rope = _dot(q_rope, k_rope, None, INTERPRET)
                    scores = of_latent * scale_log2 + of_rope * scale_log2
                    scores = tl.where(seen, scores, float("-inf"))
                    weights, keep = scores.to(kv.dtype), top
                    if start >= begin:
                        weights, keep, top, total = _softmax(scores, top, total, kv.dtype)
                    acc = _dot(weights, kv, acc * keep[:, None], INTERPRET)
            else:
                scores = _dot(q_rope, k_rope, None, INTERPRET)
                scores = _dot(q_latent, tl.trans(kv), scores, INTERPRET) * scale_log2
                scores = tl.where(seen, scores, float("-inf"))
                weights, keep, top, total = _softmax(scores, top, total, kv.dtype)
                acc = _dot(weights, kv, acc * keep[:, None], INTERPRET)
        total = tl.sum(total, 1)
        total = tl.maximum(total, 1.0)  # it is, but without keys: then the answer is 0, lse -inf
        acc = acc / total[:, None]
        log_sum = top + tl.log2(total)
        if part < 0:
            there = out + token * out_t + head * out_h
            tl.store(
                there[:, None] + latent[None, :], acc.to(out.dtype.element_ty), mask=ours[:, None]
            )
            if WITH_LSE:
                tl.store(lse + token * lse_t + head * lse_h, log_sum / 1.4426950408889634, ours)
        else:
            into = (part + local).to(tl.int64) * HEADS + head
            tl.store(
                part_out + into[:, None] * LATENT + latent[None, :],
                acc.to(part_out.dtype.element_ty),
                mask=ours[:, None],
            )
            tl.store(part_lse + into, log_sum, mask=ours)


@triton.jit
def _softmax(scores, top, total, dtype: tl.constexpr):
    """One online step in base 2: (weights, factor of what was summed so far, top, total).

    total [BLOCK_M, BLOCK_N] is not added up here: a row's sum takes all warps and barriers.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN
    weights = tl.exp2(scores - safe[:, None])
    keep = tl.exp2(top - safe)
    return weights.to(dtype), keep, new_top, total * keep[:, None] + weights


@triton.jit
def _slots(pages, start, end, col, PAGE: tl.constexpr, INTERPRET: tl.constexpr):
    """int32 [BLOCK_N]: slots of rows start + col. Past the end the last row stands in: it is there
    and finite, and its weight will be 0.
    """
    row = tl.maximum(tl.minimum(start + col, end - 1), 0)
    if INTERPRET:
        page = tl.load(pages + row // PAGE)
    else:
        # Not `tl.load`: Triton would copy the ids to shared memory, in line with the rows that they
        # lead to, and wait for all of those to have the ids.
        page = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pages + row // PAGE], tl.int32, True, 1
        )
    return page * PAGE + row % PAGE


@triton.jit
def _dequantised(
    pool, scales, slot, LATENT: tl.constexpr, ROW_BYTES: tl.constexpr, dtype: tl.constexpr
):
    """The latent part [BLOCK_N, LATENT] of FP8 rows; slot int64 [BLOCK_N, 1]."""
    groups: tl.constexpr = LATENT // 128
    values = tl.load(pool + slot * ROW_BYTES + tl.arange(0, LATENT)[None, :])
    scale = tl.load(scales + slot * (ROW_BYTES // 4) + tl.arange(0, groups)[None, :])
    wide = tl.reshape(values.to(tl.float32), (slot.shape[0], groups, 128)) * scale[:, :, None]
    return tl.reshape(wide, (slot.shape[0], LATENT)).to(dtype)


@triton.jit
def _moved(values, INTERPRET: tl.constexpr):
    """The same values; Triton pipelines no loop that hands one of its variables on as it is."""
    if INTERPRET:
        return values
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [values], tl.int32, True, 1)


@triton.jit
def _dot(a, b, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter's bf16 dot is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
