"""RMSNorm over the last dim, alone or with the residual add before it. T rows, D width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_MAX_WIDTH = 16384


@triton.jit
def _norm_kernel(
    x, residual, weight, out, stride_x, stride_residual, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One row a program. ADD: residual += x, rounded to its dtype, and that is normed."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < WIDTH
    value = tl.load(x + row * stride_x + cols, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * stride_residual + cols
        total = value + tl.load(place, mask=inside, other=0.0).to(tl.float32)
        stored = total.to(residual.dtype.element_ty)
        tl.store(place, stored, mask=inside)
        value = stored.to(tl.float32)
    factor = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps) * factor
    tl.store(out + row * WIDTH + cols, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight, as `kernels.rmsnorm.rms_norm`.

    x [..., D], last dim contiguous, rows at one stride; weight [D]. Returns a new contiguous tensor
    of x's shape and dtype; statistics and the product are fp32.
    """
    return _launch(None, x, weight, eps)


def add_rms_norm_(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x, in place; returns rms_norm(residual). Both [..., D]."""
    assert residual.shape == x.shape, (residual.shape, x.shape)
    return _launch(residual, x, weight, eps)


def _launch(
    residual: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    width = x.shape[-1]
    assert weight.shape == (width,), (weight.shape, x.shape)
    assert weight.stride(0) == 1, weight.stride()
    assert width <= _MAX_WIDTH, width
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out
    target = x if residual is None else residual
    block = triton.next_power_of_2(width)
    _norm_kernel[(x.numel() // width,)](
        x, target, weight, out, _row_stride(x), _row_stride(target), eps,
        WIDTH=width, BLOCK=block, ADD=residual is not None,
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return out


def _row_stride(x: torch.Tensor) -> int:
    """The one stride between the rows of x [..., D]; `view` fails where there is none."""
    assert x.stride(-1) == 1, x.stride()
    return x.view(-1, x.shape[-1]).stride(0)
