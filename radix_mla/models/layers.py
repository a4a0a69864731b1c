"""The plain layers: linear, RMSNorm, embedding, gated MLP. Weights only, never trained.

Shapes: T tokens, D hidden, I intermediate. Parameters start uninitialised: `load_model` fills every
one or fails.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernels.rmsnorm import rms_norm
from kernels.silu_mul import silu_mul
from radix_mla.models.packed import PackedWeight


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x · weightᵀ (+ bias); weight [out, in]."""

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None

    def pack(self) -> None:
        """Where that is exact and faster, stores the weight as `PackedWeight`.

        `weight` is empty afterwards (a tied embedding keeps its own reference).
        """
        self._packed = PackedWeight.pack(self.weight, self.bias)
        if self._packed is not None:
            self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        if self._packed is not None:
            return self._packed(x)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, over the last dim; statistics in fp32.

    DeepSeek's inner norms (`q_a_layernorm`, `kv_a_layernorm`) have eps 1e-6 whatever
    `rms_norm_eps` says; the default is theirs.
    """

    def __init__(
        self, size: int, *, eps: float = 1e-6, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] → the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)


class Embedding(nn.Module):
    """Look-up of rows; weight [vocab, D]."""

    def __init__(
        self, vocab: int, size: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(vocab, size, dtype=dtype, device=device)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens int64 [T] → [T, D]."""
        return F.embedding(tokens, self.weight)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x)); the checkpoint's gate_proj and up_proj are one matrix here."""

    def __init__(
        self, hidden: int, intermediate: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden, 2 * intermediate, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate, hidden, dtype=dtype, device=device)

    def finalize(self) -> None:
        """Called once, after loading."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] → [T, D]."""
        out: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out
