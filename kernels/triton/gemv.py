"""Products of a few rows: a weight read without tensor cores. M rows <= 8, N features, K reduced.

A program holds a [N block, K block] of weights in registers and forms its products with each row.
FP8 weights meet unquantised rows: more exact than the block-scaled GEMM, and no launch for scales.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

MAX_ROWS = 8
GROUP = 128


class Lanes(NamedTuple):
    """Block shape of one product."""

    block_n: int
    block_k: int
    num_warps: int


@triton.jit
def _scales(w_scale, row, K: tl.constexpr, k, SCALED: tl.constexpr):
    """fp32 [BLOCK_K]: the scale of each column k of the weights in the 128-row block of `row`."""
    if SCALED:
        return tl.load(w_scale + (row // 128) * (K // 128) + k // 128, mask=k < K, other=0.0)
    else:
        return tl.full([k.shape[0]], 1.0, tl.float32)


@triton.jit
def _gemv_kernel(
    x, w, w_scale, y, stride_x, num_rows, N, K: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(feature, N - 1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    total = tl.zeros([ROWS, BLOCK_N], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = k < K
        b = tl.load(w + near[:, None] * K + k[None, :], mask=inside[None, :], other=0.0)
        a = tl.load(
            x + rows[:, None] * stride_x + k[None, :],
            mask=(rows < num_rows)[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        if SCALED:
            a *= _scales(w_scale, tl.program_id(0) * BLOCK_N, K, k, SCALED)[None, :]
        total += tl.sum(a[:, None, :] * b.to(tl.float32)[None, :, :], 2)
    place = y + rows[:, None].to(tl.int64) * N + feature[None, :]
    keep = (rows < num_rows)[:, None] & (feature < N)[None, :]
    tl.store(place, total.to(y.dtype.element_ty), mask=keep)


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    lanes: Lanes | None = None,
) -> torch.Tensor:
    """x · wᵀ → [M, N] in `out_dtype` (x's if None); products and sums are fp32.

    x [M, K], M <= 8, last dim contiguous; w [N, K] contiguous, of any float dtype; e4m3 with
    w_scale fp32 [ceil(N/128), K/128].
    """
    num_rows, width = x.shape
    features = w.shape[0]
    assert num_rows <= MAX_ROWS, num_rows
    assert w.shape == (features, width), (x.shape, w.shape)
    assert w.is_contiguous(), w.stride()
    assert x.stride(1) == 1, x.stride()
    if w_scale is not None:
        assert width % GROUP == 0, width
        assert w_scale.is_contiguous()
        assert w_scale.shape == (triton.cdiv(features, GROUP), width // GROUP), w_scale.shape
    y = torch.empty(num_rows, features, dtype=out_dtype or x.dtype, device=x.device)
    if num_rows == 0:
        return y
    lanes = lanes or gemv_lanes(num_rows, width)
    _gemv_kernel[(triton.cdiv(features, lanes.block_n),)](
        x, w, w_scale, y, x.stride(0), num_rows, features, K=width,
        ROWS=triton.next_power_of_2(num_rows), BLOCK_N=lanes.block_n, BLOCK_K=lanes.block_k,
        SCALED=w_scale is not None, num_warps=lanes.num_warps,
    )  # fmt: skip
    return y


def gemv_lanes(num_rows: int, width: int) -> Lanes:
    """The block shape; best of six on an H200 (tests/bench/gpu/bench_small.py)."""
    return Lanes(4 if num_rows <= 4 else 2, min(2048, triton.next_power_of_2(width)), 4)


def beats_cublas(num_rows: int, features: int) -> bool:
    """Whether `gemv` was faster than cuBLAS in bf16 on an H200, for K = 2048 and 7168.

    Microseconds, ours against cuBLAS, at (M, N, K): (1, 64, 2048) 2.0 : 4.9, (8, 64, 2048)
    2.7 : 4.8, (1, 2048, 2048) 4.6 : 6.3, (1, 3648, 2048) 6.3 : 6.9, (1, 21888, 2048) 25.1 : 26.5,
    (1, 256, 7168) 6.1 : 6.5; but (4, 2048, 2048) 6.5 : 6.3, (4, 3648, 2048) 9.6 : 6.9.
    """
    return num_rows == 1 or (num_rows <= 8 and features <= 128)


@triton.jit
def _direct_gate_up_kernel(
    x, w, w_scale, ids, h, stride_x, F: tl.constexpr, K: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One pair and BLOCK_F features a program."""
    pair = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_F
    expert = tl.load(ids + pair).to(tl.int64)
    feature = first + tl.arange(0, BLOCK_F)
    near = tl.minimum(feature, F - 1)
    w_ptr = w + (expert * 2 * F + near)[:, None] * K
    scale_row = expert * 2 * F + first
    gate = tl.zeros([BLOCK_F], tl.float32)
    up = tl.zeros([BLOCK_F], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < K)[None, :]
        b = tl.load(w_ptr + k[None, :], mask=inside, other=0.0)
        c = tl.load(w_ptr + F * K + k[None, :], mask=inside, other=0.0)
        a = tl.load(x + pair // TOP_K * stride_x + k, mask=k < K, other=0.0).to(tl.float32)
        b_scale = _scales(w_scale, scale_row, K, k, SCALED)
        c_scale = _scales(w_scale, scale_row + F, K, k, SCALED)
        gate += tl.sum(b.to(tl.float32) * (a * b_scale)[None, :], 1)
        up += tl.sum(c.to(tl.float32) * (a * c_scale)[None, :], 1)
    value = gate * tl.sigmoid(gate) * up
    tl.store(h + pair * F + feature, value.to(h.dtype.element_ty), mask=feature < F)


@triton.jit
def _direct_down_kernel(
    h, w, w_scale, ids, weights, out, stride_out, F: tl.constexpr, K: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """One token and BLOCK_F features a program: the sum over its experts needs no other launch."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_F
    feature = first + tl.arange(0, BLOCK_F)
    near = tl.minimum(feature, F - 1)
    total = tl.zeros([BLOCK_F], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        expert = tl.load(ids + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        w_ptr = w + (expert * F + near)[:, None] * K
        part = tl.zeros([BLOCK_F], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            b = tl.load(w_ptr + k[None, :], mask=(k < K)[None, :], other=0.0)
            a = tl.load(h + pair * K + k, mask=k < K, other=0.0).to(tl.float32)
            a *= _scales(w_scale, expert * F + first, K, k, SCALED)
            part += tl.sum(b.to(tl.float32) * a[None, :], 1)
        total += weight * part
    place = out + token * stride_out + feature
    total += tl.load(place, mask=feature < F, other=0.0).to(tl.float32)
    tl.store(place, total.to(out.dtype.element_ty), mask=feature < F)


def direct_gate_up(
    x: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    lanes: Lanes,
    *,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """silu(x · gateᵀ) · (x · upᵀ) of every pair → [T·k, I], for few tokens.

    x [T, D] not quantised; w [E, 2·I, D] and scale as in `grouped_gemm`; ids int32 [T, k].
    """
    num_tokens, top_k = ids.shape
    inner, hidden = w.shape[1] // 2, w.shape[2]
    h = torch.empty(num_tokens * top_k, inner, dtype=x.dtype, device=x.device)
    _direct_gate_up_kernel[(num_tokens * top_k, triton.cdiv(inner, lanes.block_n))](
        x, w, scale, ids, h, x.stride(0), F=inner, K=hidden, TOP_K=top_k,
        BLOCK_F=lanes.block_n, BLOCK_K=lanes.block_k, SCALED=scale is not None,
        num_warps=lanes.num_warps,
    )  # fmt: skip
    return h


def direct_down_(
    out: torch.Tensor,
    h: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lanes: Lanes,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """out [T, D] += sum over j of weights[t, j] · h[t·k + j] · w[ids[t, j]]ᵀ; w [E, D, I]."""
    num_tokens, top_k = ids.shape
    hidden, inner = w.shape[1:]
    _direct_down_kernel[(num_tokens, triton.cdiv(hidden, lanes.block_n))](
        h, w, scale, ids, weights, out, out.stride(0), F=hidden, K=inner, TOP_K=top_k,
        BLOCK_F=lanes.block_n, BLOCK_K=lanes.block_k, SCALED=scale is not None,
        num_warps=lanes.num_warps,
    )  # fmt: skip
