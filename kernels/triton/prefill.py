"""Ragged multi-head attention with LSE, for keys wider than values (192/128, 256/256).

B sequences, Tq queries, Tk keys, H heads, D key width, Dv value width. LSE: natural log, fp32.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

_LOG2_E = 1.4426950408889634
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def mha_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    max_q: int,
    scale: float,
    causal: bool,
    blocks: tuple[int, int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New (out [Tq, H, Dv] in q's dtype, lse fp32 [Tq, H]); a query without keys: 0 and -inf.

    q [Tq, H, D], k [H, Tk, D], v [H, Tk, Dv], unit stride in the last dim; sequence i has queries
    cu_q[i:i+2] and keys cu_k[i:i+2], int32 [B + 1] on the device; max_q: host bound of their
    queries. Causal is aligned to the end: the last query sees all keys. Rows of q past cu_q[-1]
    get no answer; keys and values that no sequence owns are not read. `blocks` (block_m, block_n,
    num_warps, num_stages) replaces the table's.
    """
    num_q, heads, width = q.shape
    value = v.shape[2]
    assert k.shape == (heads, v.shape[1], width), f"k is {tuple(k.shape)}"
    assert v.shape[0] == heads, f"v is {tuple(v.shape)}"
    assert q.dtype == k.dtype == v.dtype, "one dtype"
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "rows have unit stride"
    assert cu_q.dtype == cu_k.dtype == torch.int32, "cu_* are int32"
    assert cu_q.shape == cu_k.shape, "one more than the sequences each"
    out = torch.empty(num_q, heads, value, dtype=q.dtype, device=q.device)
    lse = torch.empty(num_q, heads, dtype=torch.float32, device=q.device)
    if num_q == 0 or max_q == 0:
        return out, lse
    block_m, block_n, num_warps, num_stages = blocks or _choose_blocks(
        width, value, q.dtype, max_q, heads * (cu_q.shape[0] - 1)
    )
    # EARLY: with two stages, Triton copies the next block only once all work on this one has been
    # issued; but what is in a branch it puts behind the copy, which is then on its way during all
    # of that work. More stages copy further ahead, and lose by it: in a branch no product goes on
    # into the next step.
    low = 1 << (width.bit_length() - 1)  # width = low + high, both powers of two where possible
    high = width - low
    _prefill[(triton.cdiv(max_q, block_m), heads, cu_q.shape[0] - 1)](
        q, k, v, out, lse, cu_q, cu_k,
        scale * _LOG2_E,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), lse.stride(0),
        LOW=max(low, 16),
        HIGH=high,
        HIGH_BLOCK=max(16, triton.next_power_of_2(high)) if high else 0,
        WIDTH=width,
        VALUE=value,
        VALUE_BLOCK=max(16, triton.next_power_of_2(value)),
        CAUSAL=causal,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=num_stages,
        EARLY=num_stages == 2,
        INTERPRET=_INTERPRET,
        num_warps=num_warps,
    )  # fmt: skip
    return out, lse


def _choose_blocks(
    width: int, value: int, dtype: torch.dtype, max_q: int, rows: int
) -> tuple[int, int, int, int]:
    """(block_m, block_n, num_warps, num_stages), measured on an H200 (bench_prefill.py).

    `rows`: heads × sequences, each with max_q queries at most.
    """
    if dtype == torch.float32:
        return 32, 32, 4, 1
    few = rows * triton.cdiv(max_q, 128) < 128  # blocks of 128 would leave multiprocessors idle
    if max_q <= 64 or few:
        return (64, 64, 4, 3) if width <= 192 else (64, 64, 4, 2)
    if width <= 192 and value <= 128:
        return 128, 128, 8, 2
    return (128, 64, 8, 3) if width <= 192 else (128, 64, 8, 2)


@triton.jit
def _prefill(
    q, k, v, out, lse, cu_q, cu_k,
    scale_log2,
    q_t, q_h, k_h, k_t, v_h, v_t, out_t, out_h, lse_t,
    LOW: tl.constexpr, HIGH: tl.constexpr, HIGH_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head of one sequence; the last blocks, the longest, first."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    first_q = tl.load(cu_q + tl.program_id(2))
    num_q = tl.load(cu_q + tl.program_id(2) + 1) - first_q
    first_k = tl.load(cu_k + tl.program_id(2))
    num_k = tl.load(cu_k + tl.program_id(2) + 1) - first_k
    if block * BLOCK_M < num_q:
        row = block * BLOCK_M + tl.arange(0, BLOCK_M)
        there = row < num_q
        token = (first_q + row).to(tl.int64)
        low = tl.arange(0, LOW)
        q_row = q + token[:, None] * q_t + head * q_h
        q_low = tl.load(q_row + low[None, :], mask=there[:, None] & (low < WIDTH)[None, :], other=0)
        if HIGH > 0:
            high = tl.arange(0, HIGH_BLOCK)
            q_high = tl.load(
                q_row + LOW + high[None, :], mask=there[:, None] & (high < HIGH)[None, :], other=0
            )
        else:
            q_high = q_low
        # Query `row` sees the keys below limit; all of the block see those below `full`.
        if CAUSAL:
            limit = num_k - num_q + row + 1
            end = tl.minimum(num_k, tl.maximum(num_k - num_q + (block + 1) * BLOCK_M, 0))
            full = tl.maximum(num_k - num_q + block * BLOCK_M + 1, 0) // BLOCK_N * BLOCK_N
            full = tl.minimum(full, num_k // BLOCK_N * BLOCK_N)
        else:
            limit = tl.full([BLOCK_M], 0, tl.int32) + num_k
            end = num_k
            full = num_k // BLOCK_N * BLOCK_N
        limit = tl.minimum(limit, num_k)
        keys = k + head * k_h + first_k.to(tl.int64) * k_t
        values = v + head * v_h + first_k.to(tl.int64) * v_t
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
        acc, top, total = _over_keys(
            acc, top, total, q_low, q_high, keys, values, limit, 0, full, num_k, scale_log2,
            k_t, v_t, LOW, HIGH, HIGH_BLOCK, WIDTH, VALUE, VALUE_BLOCK, BLOCK_N, STAGES,
            EARLY, False, INTERPRET,
        )  # fmt: skip
        acc, top, total = _over_keys(
            acc, top, total, q_low, q_high, keys, values, limit, full, end, num_k, scale_log2,
            k_t, v_t, LOW, HIGH, HIGH_BLOCK, WIDTH, VALUE, VALUE_BLOCK, BLOCK_N, STAGES,
            EARLY, True, INTERPRET,
        )  # fmt: skip
        total = tl.maximum(total, 1.0)  # it is, but without keys: then the answer is 0, lse -inf
        acc = acc / total[:, None]
        log_sum = (top + tl.log2(total)) / 1.4426950408889634
        col = tl.arange(0, VALUE_BLOCK)
        tl.store(
            out + token[:, None] * out_t + head * out_h + col[None, :],
            acc.to(out.dtype.element_ty),
            mask=there[:, None] & (col < VALUE)[None, :],
        )
        tl.store(lse + token * lse_t + head, log_sum, mask=there)


@triton.jit
def _over_keys(
    acc, top, total, q_low, q_high, keys, values, limit, begin, end, num_k, scale_log2,
    k_t, v_t,
    LOW: tl.constexpr, HIGH: tl.constexpr, HIGH_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, VALUE_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, MASK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end). MASK: some are out of sight or out of bounds."""
    col = tl.arange(0, BLOCK_N)
    low = tl.arange(0, LOW)[:, None]
    value = tl.arange(0, VALUE_BLOCK)[None, :]
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        row = start + col
        at_k = keys + (row.to(tl.int64) * k_t)[None, :]
        at_v = values + (row.to(tl.int64) * v_t)[:, None] + value
        k_low = _load(at_k + low, (row < num_k)[None, :], low < WIDTH, MASK, LOW > WIDTH)
        k_high = k_low
        if HIGH > 0:
            high = tl.arange(0, HIGH_BLOCK)[:, None]
            k_high = _load(
                at_k + LOW + high, (row < num_k)[None, :], high < HIGH, MASK, HIGH_BLOCK > HIGH
            )
        v_block = _load(at_v, (row < num_k)[:, None], value < VALUE, MASK, VALUE_BLOCK > VALUE)
        if EARLY:
            if start < end:  # always: see `mha_prefill`
                acc, top, total = _attend(
                    acc, top, total, q_low, q_high, k_low, k_high, v_block, row, limit, scale_log2,
                    HIGH, MASK, INTERPRET,
                )  # fmt: skip
        else:
            acc, top, total = _attend(
                acc, top, total, q_low, q_high, k_low, k_high, v_block, row, limit, scale_log2,
                HIGH, MASK, INTERPRET,
            )  # fmt: skip
    return acc, top, total


@triton.jit
def _attend(
    acc, top, total, q_low, q_high, k_low, k_high, v, row, limit, scale_log2,
    HIGH: tl.constexpr, MASK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """One block of keys `row`, transposed in k_low and k_high: (acc, top, total)."""
    scores = _dot(q_low, k_low, None, INTERPRET)
    if HIGH > 0:
        scores = _dot(q_high, k_high, scores, INTERPRET)
    if MASK:
        scores = tl.where(row[None, :] < limit[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    safe = tl.where(new_top == float("-inf"), 0.0, new_top) if MASK else new_top
    weights = tl.exp2(scores * scale_log2 - safe[:, None])
    keep = tl.exp2(top - safe)
    total = total * keep + tl.sum(weights, 1)
    acc = _dot(weights.to(v.dtype), v, acc * keep[:, None], INTERPRET)
    return acc, new_top, total


@triton.jit
def _load(there, rows, columns, MASK_ROWS: tl.constexpr, MASK_COLUMNS: tl.constexpr):
    if MASK_ROWS:
        return tl.load(there, mask=rows & columns, other=0.0)
    if MASK_COLUMNS:
        return tl.load(there, mask=columns, other=0.0)
    return tl.load(there)


@triton.jit
def _dot(a, b, acc, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter's bf16 dot is wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
