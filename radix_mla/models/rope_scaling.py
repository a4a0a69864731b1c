"""The rotary embedding's parameters, from either of their spellings in config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass

from radix_mla.errors import CheckpointError, UnsupportedModel
from radix_mla.models.config_reader import ConfigReader


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 · mscale · ln(factor) + 1, and 1 without extension (YaRN, arXiv 2309.00071, eq. 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Context extension of the rotary embedding; names as in `rope_scaling`."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0  # 0: absent
    mscale_all_dim: float = 0.0  # 0: absent
    attention_factor: float | None = None
    truncate: bool = True

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin, as transformers infers it: 1 where both mscales are equal."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(
                self.factor, self.mscale_all_dim
            )
        return yarn_mscale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """Factor on the softmax scale: mscale², 1 where `mscale_all_dim` is absent or 0."""
        if not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


def read_rope(reader: ConfigReader) -> tuple[float, YarnScaling | None]:
    """(theta, yarn), from `rope_scaling` or from `rope_parameters` (which holds theta too)."""
    key = "rope_scaling" if reader.get("rope_scaling") else "rope_parameters"
    rope = reader.section(key)
    theta = rope.optional_number("rope_theta") or reader.optional_number("rope_theta")
    if theta is None:
        raise CheckpointError("config.json has no rope_theta")
    for part in (rope, reader):
        if part.optional_number("partial_rotary_factor") not in (None, 1.0):
            raise UnsupportedModel(f"{key}: partial_rotary_factor is not supported")
    rope_type = rope.text("rope_type", rope.text("type", "default"))
    if rope_type == "default":
        return theta, None
    if rope_type != "yarn":
        raise UnsupportedModel(f"{key} type {rope_type!r} is not supported: yarn or none")
    max_position = reader.size("max_position_embeddings")
    original = rope.optional_count("original_max_position_embeddings") or max_position
    return theta, YarnScaling(
        factor=rope.optional_number("factor") or max_position / original,
        original_max_position_embeddings=original,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=rope.optional_number("mscale") or 0.0,
        mscale_all_dim=rope.optional_number("mscale_all_dim") or 0.0,
        attention_factor=rope.optional_number("attention_factor"),
        truncate=rope.flag("truncate", True),
    )
