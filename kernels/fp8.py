"""Block-scaled FP8 (e4m3) weights, as DeepSeek-V3 checkpoints hold them."""

from __future__ import annotations

import torch


def dequantize_blocks(weight: torch.Tensor, scale: torch.Tensor, *, block: int) -> torch.Tensor:
    """weight e4m3 [N, K] · the scale of its block; scale [ceil(N/block), ceil(K/block)].

    Returns fp32 [N, K]; the last blocks of rows and columns may be ragged.
    """
    rows, cols = weight.shape
    wide = scale.float().repeat_interleave(block, dim=1)[:, :cols]  # [ceil(N/block), K]
    return weight.float().mul_(wide.repeat_interleave(block, dim=0)[:rows])
