"""The experts of a layer on the device. T tokens, D hidden, I inner, E experts, k a token."""

from __future__ import annotations

import torch

from kernels.triton.fp8_gemm import quantize_groups
from kernels.triton.gemv import direct_down_, direct_gate_up
from kernels.triton.grouped_gemm import FP8, GROUP, down, gate_up, weighted_sum_
from kernels.triton.moe_align import align
from kernels.triton.moe_shapes import Direct, Sorted, choose


def run_experts_(
    out: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    scale_gate_up: torch.Tensor | None = None,
    scale_down: torch.Tensor | None = None,
    plan: Direct | Sorted | None = None,
) -> None:
    """out [T, D] += the chosen experts of x [T, D], weighted; as `kernels.moe.run_experts_`.

    w_gate_up [E, 2·I, D] holds gate, then up; w_down [E, D, I], both contiguous; ids int32 [T, k],
    each in [0, E); weights fp32 [T, k]. bf16 or fp32 as x; or e4m3 weights with fp32 scales
    [E, 2·I/128, D/128] and [E, D/128, I/128] and x in bf16: then rows are quantised in groups of
    128 too, but for the few tokens of a `Direct` plan. No sync, no atomics; buffers and grids
    depend on shapes only. out must not be x.

    `torch._grouped_mm` lost at every T (V2-Lite shape on an H200, torch 2.11, gathers included,
    microseconds, this : torch): T = 1 39 : 92, 16 224 : 386, 64 278 : 450, 512 330 : 513, 2048
    671 : 831, 8192 1974 : 2871; so it has no place here (tests/bench/gpu/bench_moe.py).
    """
    num_tokens, top_k = ids.shape
    num_experts, hidden, inner = w_down.shape
    fp8 = scale_gate_up is not None
    assert out.shape == x.shape == (num_tokens, hidden), (out.shape, x.shape, ids.shape)
    assert w_gate_up.shape == (num_experts, 2 * inner, hidden), (w_gate_up.shape, w_down.shape)
    assert weights.shape == ids.shape
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert weights.is_contiguous()
    assert w_gate_up.is_contiguous()
    assert w_down.is_contiguous()
    assert (w_gate_up.dtype == FP8) == fp8 == (scale_down is not None)
    assert x.stride(1) == 1
    assert out.stride(1) == 1
    if num_tokens == 0:
        return
    plan = plan or choose(num_tokens, top_k, num_experts, inner, hidden, w_down.dtype)
    if isinstance(plan, Direct):
        h = direct_gate_up(x, w_gate_up, ids, plan.gate_up, scale=scale_gate_up)
        direct_down_(out, h, w_down, ids, weights, plan.down, scale=scale_down)
        return
    tiles = align(ids, num_experts, plan.block_m)
    if fp8:
        x, x_scale = quantize_groups(x)
        quantize = plan.gate_up.block_f == GROUP
        h, h_scale = gate_up(
            x, w_gate_up, tiles, top_k, plan.gate_up,
            x_scale=x_scale, w_scale=scale_gate_up, quantize=quantize,
        )  # fmt: skip
        if not quantize:
            h, h_scale = quantize_groups(h)
        rows = down(h, w_down, tiles, plan.down, h_scale=h_scale, w_scale=scale_down)
    else:
        h, _ = gate_up(x, w_gate_up, tiles, top_k, plan.gate_up)
        rows = down(h, w_down, tiles, plan.down)
    weighted_sum_(out, rows, weights)
