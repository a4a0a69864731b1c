"""The gated activation of an MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up; gate_up [..., 2·I] holds gate, then up. Returns [..., I], its dtype."""
    if gate_up.is_cuda:
        from kernels.triton import silu_mul as gpu  # Triton is imported where there is a GPU only

        return gpu.silu_mul(gate_up)
    half = gate_up.shape[-1] // 2  # slices: `chunk` is three calls more
    return F.silu(gate_up[..., :half]).mul_(gate_up[..., half:])
