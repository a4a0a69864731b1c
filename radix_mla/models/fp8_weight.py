"""Weights that stay FP8 in memory: e4m3 with a scale for each 128×128 block."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.fp8 import BLOCK, dequantize_blocks, fp8_linear

FP8 = torch.float8_e4m3fn


def num_blocks(size: int) -> int:
    """Blocks along a dim; the last one may be ragged."""
    return -(-size // BLOCK)


class Fp8Weight:
    """A weight e4m3 [N, K] with scales fp32 [ceil(N/128), K/128] (+ bias [N]), K a multiple of 128.

    The interface of `DenseWeight`. The products round their input to e4m3 too, as DeepSeek-V3 was
    trained.
    """

    __slots__ = ("_bias", "_codes", "_scale")

    def __init__(
        self, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        self._codes = codes.detach()
        self._scale = scale.detach()
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] → [M, N], x's dtype."""
        out = fp8_linear(x, self._codes, self._scale)
        return out if self._bias is None else out.add_(self._bias)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, alpha: float = 1.0) -> None:
        """out [M, N] += alpha · self(x), x [M, K]."""
        out.add_(self(x), alpha=alpha)

    def dequantized(self) -> torch.Tensor:
        """The matrix, fp32 [N, K]."""
        return dequantize_blocks(self._codes, self._scale, block=BLOCK)


def fuse_fp8(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(codes, scales) of matrices of one input below one another; None where blocks do not allow.

    Every part but the last must be whole blocks high: `kv_a_proj_with_mqa` (576 rows, 4.5 blocks)
    comes last.
    """
    if any(len(codes) % BLOCK for codes, _ in parts[:-1]):
        return None
    return torch.cat([codes for codes, _ in parts]), torch.cat([scale for _, scale in parts])
