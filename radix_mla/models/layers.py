"""The plain layers: linear, RMSNorm, embedding, gated MLP. Weights only, never trained.

Shapes: T tokens, D hidden, I intermediate. Parameters start uninitialised: `load_model` fills every
one or fails.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from kernels.fp8 import BLOCK
from kernels.rmsnorm import rms_norm, rms_norm_scaled, rms_norm_scaled_, scaled_weight
from kernels.silu_mul import silu_mul
from radix_mla.models.fp8_weight import FP8, Fp8Weight, fuse_fp8, num_blocks
from radix_mla.models.packed import DenseWeight, PackedWeight, PlainWeight, plain_weight


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x · weightᵀ (+ bias); weight [out, in].

    With `fp8` the weight is e4m3 with `weight_scale_inv` as in FP8 checkpoints, if its rows are
    whole blocks.
    """

    bias: nn.Parameter | None
    weight_scale_inv: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self._dtype = dtype
        fp8 = fp8 and in_features % BLOCK == 0
        self.weight = empty_parameter(
            out_features, in_features, dtype=FP8 if fp8 else dtype, device=device
        )
        blocks = (num_blocks(out_features), num_blocks(in_features))
        self.weight_scale_inv = (
            empty_parameter(*blocks, dtype=torch.float32, device=device) if fp8 else None
        )
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self._packed: PackedWeight | None = None

    def to_dense(self) -> None:
        """Gives up FP8: the weight in the compute dtype from here on."""
        if self.weight_scale_inv is not None:
            matrix = Fp8Weight(self.weight, self.weight_scale_inv).dequantized()
            self.weight = nn.Parameter(matrix.to(self._dtype), requires_grad=False)
            self.weight_scale_inv = None

    def pack(self) -> None:
        """Where that is exact and faster, stores the weight as `PackedWeight`.

        `weight` is empty afterwards (a tied embedding keeps its own reference).
        """
        self._packed = PackedWeight.pack(self.weight, self.bias)
        if self._packed is not None:
            self.drop_weight()

    def drop_weight(self) -> None:
        """Frees the parameter once something else holds its values."""
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)

    def plain(self) -> PlainWeight:
        """`pack`, and what multiplies by the weight from then on."""
        if self.weight_scale_inv is not None:
            return Fp8Weight(self.weight, self.weight_scale_inv, self.bias)
        self.pack()
        return self._packed or DenseWeight(self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]; [M, in] where the weight is FP8."""
        if self._packed is not None:
            return self._packed(x)
        if self.weight_scale_inv is not None:
            return Fp8Weight(self.weight, self.weight_scale_inv, self.bias)(x)
        return F.linear(x, self.weight, self.bias)


def fuse(parts: list[Linear]) -> PlainWeight:
    """One GEMM for layers of one input, outputs side by side.

    Their own weights become views of the fused one, or empty where that is packed. FP8 stays FP8
    where all parts have it and every cut is at a block's end.
    """
    sizes = [part.weight.shape[0] for part in parts]
    bias = None
    if any(part.bias is not None for part in parts):
        dtype = next(part.bias.dtype for part in parts if part.bias is not None)
        biases = [
            part.weight.new_zeros(size, dtype=dtype) if part.bias is None else part.bias
            for part, size in zip(parts, sizes, strict=True)
        ]
        bias = torch.cat(biases)
    scaled = [(p.weight, p.weight_scale_inv) for p in parts if p.weight_scale_inv is not None]
    fused = fuse_fp8(scaled) if len(scaled) == len(parts) else None
    if fused is not None:
        weight, scale = fused
        scales = torch.split(scale, [num_blocks(size) for size in sizes])
        for part, blocks in zip(parts, scales, strict=True):
            part.weight_scale_inv = nn.Parameter(blocks, requires_grad=False)
        plain: PlainWeight = Fp8Weight(weight, scale, bias)
    else:
        for part in parts:
            part.to_dense()
        weight = torch.cat([part.weight for part in parts])
        plain = plain_weight(weight, bias)
    for part, view in zip(parts, torch.split(weight, sizes), strict=True):
        part.weight = nn.Parameter(view, requires_grad=False)
        if isinstance(plain, PackedWeight):
            part.drop_weight()
    return plain


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
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None

    def finalize(self) -> None:
        """Called once, after loading."""
        if self.weight.device.type == "cpu" and self.weight.dtype == torch.float32:
            self._scaled = scaled_weight(self.weight.detach(), self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] → the same shape and dtype."""
        if self._scaled is not None:
            return rms_norm_scaled(x, *self._scaled)
        return rms_norm(x, self.weight, self.eps)

    def apply_(self, x: torch.Tensor) -> None:
        """`forward` in place."""
        if self._scaled is not None:
            rms_norm_scaled_(x, *self._scaled)
        else:
            x.copy_(rms_norm(x, self.weight, self.eps))


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
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        fp8 = fp8 and intermediate % BLOCK == 0  # up's blocks begin where gate's end
        self.gate_up_proj = Linear(hidden, 2 * intermediate, dtype=dtype, device=device, fp8=fp8)
        self.down_proj = Linear(intermediate, hidden, dtype=dtype, device=device, fp8=fp8)
        self._plain: tuple[PlainWeight, PlainWeight] | None = None

    def finalize(self) -> None:
        """Called once, after loading."""
        self._plain = (self.gate_up_proj.plain(), self.down_proj.plain())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] → [T, D]."""
        out: torch.Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out [T, D] += self(x)."""
        if self._plain is None:  # before `finalize`
            out += self(x)
            return
        gate_up, down = self._plain
        down.add_to(out, silu_mul(gate_up(x)))
