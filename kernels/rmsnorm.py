"""RMSNorm over the last dim."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight.

    x [..., D], any stride (on a GPU: rows [T, D] with unit stride in D); weight [D] of x's dtype.
    Returns a new tensor of x's shape and dtype; statistics are fp32.
    """
    if x.is_cuda:
        from kernels.triton import rmsnorm  # Triton is imported where there is a GPU only

        return rmsnorm.rms_norm(x, weight, eps)
    if x.dtype != torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return rms_norm_scaled(x, *scaled_weight(weight, eps))


def add_rms_norm_(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, then `rms_norm` of it: one pass over both on a GPU.

    residual, x [T, D] of one dtype. Returns the normed rows, a new tensor.
    """
    if x.is_cuda:
        from kernels.triton import rmsnorm

        return rmsnorm.add_rms_norm_(residual, x, weight, eps)
    residual.add_(x)
    return rms_norm(residual, weight, eps)


def scaled_weight(weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(sqrt(D) · weight, sqrt(D · eps) as a tensor without dims): what `rms_norm_scaled` takes."""
    size = weight.shape[-1]
    return weight * math.sqrt(size), weight.new_tensor(math.sqrt(size * eps))


def rms_norm_scaled(x: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """x / hypot(|x|, floor) · weight: RMSNorm in four calls; torch's own is a dozen on the CPU.

    fp32 x [..., D], any stride; weight and floor from `scaled_weight`. Returns a new tensor.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor)
    return torch.div(x, norm).mul_(weight)


def rms_norm_scaled_(x: torch.Tensor, weight: torch.Tensor, floor: torch.Tensor) -> None:
    """As `rms_norm_scaled`, in place."""
    x.div_(torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor)).mul_(weight)
