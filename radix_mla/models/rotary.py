"""Rotary position embedding with YaRN context extension (arXiv 2309.00071), interleaved pairs.

Shapes: T tokens, R rope dims. Dims (2i, 2i + 1) turn by position · inv_freq[i].
"""

from __future__ import annotations

import math

import torch
from torch import nn

from kernels.rope import apply_rope
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.rope_scaling import YarnScaling

__all__ = ["RotaryEmbedding", "apply_rope", "inverse_frequencies"]


class RotaryEmbedding(nn.Module):
    """(cos, sin) of positions; computed once a step and shared by all layers.

    With `tables` they are looked up instead, as the fused kernels take them.
    """

    inv_freq: torch.Tensor

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str = "cpu", tables: bool = False
    ) -> None:
        super().__init__()
        freq = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.yarn)
        self.register_buffer("inv_freq", freq.to(device), persistent=False)
        self.scale = config.yarn.cos_sin_scale if config.yarn else 1.0
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        if tables:  # fp32 [max positions, R/2] each
            every = torch.arange(config.max_position_embeddings, device=device)
            self._tables = self.forward(every)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int [T] → (cos, sin), fp32 [T, R/2]."""
        angle = positions[:, None].float() * self.inv_freq  # [T, R/2]
        cos, sin = angle.cos(), angle.sin()
        return (cos, sin) if self.scale == 1.0 else (cos * self.scale, sin * self.scale)

    def turns(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos + i·sin, complex64, for `rotate_`: of rows [T, R/2] and of heads [T, 1, R/2].

        With tables: (cos, sin), fp32 [T, R/2]; positions int64, below max_position_embeddings.
        """
        if self._tables is not None:
            cos, sin = self._tables
            return cos.index_select(0, positions), sin.index_select(0, positions)
        turn = torch.complex(*self(positions))
        return turn, turn[:, None]


def inverse_frequencies(dim: int, theta: float, yarn: YarnScaling | None) -> torch.Tensor:
    """fp32 [dim/2]: theta^(-2i/dim), slowed down by `yarn.factor` where waves are long.

    Dims that turn more than beta_fast times in the original context keep their frequency, those
    below beta_slow turns are interpolated, a linear ramp lies between (YaRN, section 3.2).
    """
    wave = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return 1.0 / wave

    def dim_of_turns(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of_turns(yarn.beta_fast), dim_of_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    keep = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (yarn.factor * wave) * (1 - keep) + 1.0 / wave * keep
