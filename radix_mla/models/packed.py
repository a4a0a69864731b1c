"""Weights stored as fp16 for fp32 arithmetic on x86 CPUs: half the bytes, the same numbers.

A decode step on a CPU is bound by reading weights. FBGEMM's fp16 GEMM, which torch ships, widens
fp16 weights to fp32 in registers and takes and gives fp32. Measured on one AVX2 core: a
129,280 x 384 head takes 10 ms for 1-2 rows against 29-62 ms of `F.linear` in fp32, and 36 against
78 ms for 16; from 2^17 weights on it does not lose beyond the noise, large row counts included.
"""

from __future__ import annotations

import math

import torch

from radix_mla.models.fp8_weight import Fp8Weight

_MIN_WEIGHTS = 1 << 17  # below, the call costs more than the bytes it saves
_PART = 1 << 16
_MAX_EXPONENT = 15  # weights are scaled so that the largest lies in [2^14, 2^15)


class PackedWeight:
    """A weight [N, K] (+ bias [N]) in FBGEMM's fp16 layout, scaled by a power of two."""

    __slots__ = ("_has_bias", "_packed", "_unscale", "_unscale_by")

    def __init__(self, packed: torch.ScriptObject, unscale: float, *, has_bias: bool) -> None:
        self._packed = packed
        self._unscale = unscale
        self._unscale_by = torch.tensor(unscale)  # a Python number is converted in every call
        self._has_bias = has_bias

    @classmethod
    def pack(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight | None:
        """None where it would not pay or not be exact: see `packable`."""
        if not packable(weight):
            return None
        scale = _power_of_two(weight)
        # In parts that stay in the CPU's cache; a weight that is not exact shows in the first.
        if not all(_is_exact(part, scale) for part in torch.split(weight.reshape(-1), _PART)):
            return None
        packed = torch.ops.quantized.linear_prepack_fp16(
            weight.detach() * scale, None if bias is None else bias.detach()
        )
        return cls(packed, 1.0 / scale, has_bias=bias is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x fp32 [..., K] → fp32 [..., N]."""
        # Scaling x is exact (a power of two) and cheaper than scaling the product.
        scaled = torch.mul(x, self._unscale_by)
        out: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(scaled, self._packed)
        return out

    def add_to(self, out: torch.Tensor, x: torch.Tensor, alpha: float = 1.0) -> None:
        """out [M, N] += alpha · self(x), x fp32 [M, K]."""
        if self._has_bias:
            out.add_(self(x), alpha=alpha)
            return
        product = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
        out.add_(product, alpha=alpha * self._unscale)


class DenseWeight:
    """A weight [N, K] (+ bias [N]) as it is, with the interface of `PackedWeight`."""

    __slots__ = ("_bias", "_transposed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._transposed = weight.detach().transpose(0, 1)
        self._bias = None if bias is None else bias.detach()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, K] → [M, N]."""
        if self._bias is None:
            return torch.mm(x, self._transposed)
        return torch.addmm(self._bias, x, self._transposed)

    def add_to(self, out: torch.Tensor, x: torch.Tensor, alpha: float = 1.0) -> None:
        """out [M, N] += alpha · self(x), x [M, K]."""
        if self._bias is None:
            out.addmm_(x, self._transposed, alpha=alpha)
        else:
            out.add_(self(x), alpha=alpha)


PlainWeight = PackedWeight | DenseWeight | Fp8Weight


def plain_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PlainWeight:
    """The faster of the two forms; a call of it is free of `nn.Module`'s."""
    return PackedWeight.pack(weight, bias) or DenseWeight(weight, bias)


def packable(weight: torch.Tensor) -> bool:
    """Large enough, fp32, on a CPU for which this build of torch has FBGEMM."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.numel() >= _MIN_WEIGHTS
        and "fbgemm" in torch.backends.quantized.supported_engines
    )


def _power_of_two(weight: torch.Tensor) -> float:
    largest = max(float(weight.max()), -float(weight.min()))
    if largest == 0.0 or not math.isfinite(largest):
        return 1.0
    return math.ldexp(1.0, _MAX_EXPONENT - math.frexp(largest)[1])


def _is_exact(weight: torch.Tensor, scale: float) -> bool:
    """Whether fp16 holds the scaled weights to within 2^-24 of the largest.

    bf16 checkpoints pass (8 bits of significand, fp16 has 11); weights trained or dequantised to
    full fp32 do not, and stay fp32.
    """
    scaled = weight * scale
    error = (scaled.half().float() - scaled).abs_().max()
    return bool(error <= math.ldexp(1.0, _MAX_EXPONENT - 25))
