"""Block-scaled FP8 (e4m3): weights as DeepSeek-V3 checkpoints hold them, and products with them.

T tokens, N outputs, K inputs. Weights have one scale for each 128×128 block, activations one for
each token and 128 values (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

import torch

BLOCK = 128
_E4M3_MAX = 448.0


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, *, block: int) -> torch.Tensor:
    """weight e4m3 [N, K] · the scale of its block; scale [ceil(N/block), ceil(K/block)].

    Returns fp32 [N, K]; the last blocks of rows and columns may be ragged.
    """
    rows, cols = weight.shape
    wide = scale.float().repeat_interleave(block, dim=1)[:, :cols]  # [ceil(N/block), K]
    return weight.float().mul_(wide.repeat_interleave(block, dim=0)[:rows])


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], K a multiple of 128, as (e4m3 [T, K], fp32 scales [T, K/128]).

    The largest value of each group becomes 448; a group of zeros has scale 1e-12 / 448.
    """
    if x.is_cuda:
        from kernels.triton import fp8_gemm as gpu  # Triton is imported where there is a GPU only

        return gpu.quantize_groups(x)
    groups = x.float().reshape(len(x), x.shape[1] // BLOCK, BLOCK)  # [T, K/128, 128]
    scale = groups.abs().amax(dim=-1).clamp_min(1e-12) / _E4M3_MAX
    return (groups / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, K] · weightᵀ in x's dtype [T, N], both sides e4m3, sums fp32.

    weight e4m3 [N, K], scale fp32 [ceil(N/128), K/128]; x is quantised here, by `quantize_groups`.
    """
    if x.is_cuda:
        from kernels.triton import fp8_gemm as gpu

        return gpu.fp8_linear(x, weight, scale)
    codes, groups = quantize_groups(x)
    rounded = codes.float().mul_(groups.repeat_interleave(BLOCK, dim=1))  # [T, K]
    product = rounded @ dequantize_blocks(weight, scale, block=BLOCK).t()
    return product.to(x.dtype)
