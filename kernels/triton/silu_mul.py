"""The gated activation of an MLP. T rows, I inner width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul_kernel(gate_up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < INNER
    gate = tl.load(gate_up + row * stride + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + INNER + cols, mask=inside, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * INNER + cols, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, as `kernels.silu_mul.silu_mul`; computed in fp32, rounded once.

    gate_up [..., 2·I] holds gate, then up; last dim contiguous, rows at one stride. Returns a new
    contiguous [..., I] of its dtype.
    """
    inner = gate_up.shape[-1] // 2
    assert gate_up.shape[-1] == 2 * inner, gate_up.shape
    assert gate_up.stride(-1) == 1, gate_up.stride()
    out = torch.empty(*gate_up.shape[:-1], inner, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    rows = gate_up.view(-1, 2 * inner)
    block = min(1024, triton.next_power_of_2(inner))
    _silu_mul_kernel[(len(rows), triton.cdiv(inner, block))](
        rows, out, rows.stride(0), INNER=inner, BLOCK=block, num_warps=4
    )
    return out
