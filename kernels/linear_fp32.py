"""A product with bf16 weights whose result stays fp32: logits and gate scores."""

from __future__ import annotations

import torch


def linear_fp32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K] · weightᵀ as fp32 [T, N]; weight [N, K] of x's dtype.

    On a GPU the sums of a bf16 product are fp32 anyway; they are not rounded here.
    """
    if x.is_cuda and x.dtype != torch.float32:
        from kernels.triton import gemv  # Triton is imported where there is a GPU only

        if gemv.beats_cublas(len(x), len(weight)):
            return gemv.gemv(x, weight, out_dtype=torch.float32)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
