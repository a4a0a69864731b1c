"""Rotary embedding against transformers: yarn, mscale, far positions, both pair layouts."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2RotaryEmbedding,
    apply_rotary_emb,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.rotary import RotaryEmbedding, apply_rope

POSITIONS = torch.tensor([0, 1, 7, 200, 5000, 65_535])


def yarn(**words: float) -> dict[str, object]:
    base = {"rope_type": "yarn", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    return base | words


PARAMETERS = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1600000.0},
    yarn(factor=40.0, mscale=0.707, mscale_all_dim=0.707),
    yarn(factor=40.0, mscale=1.0, mscale_all_dim=1.0),
    yarn(factor=40.0, mscale=1.0, mscale_all_dim=0.5),
    yarn(factor=40.0),
    yarn(factor=16.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=16.0, beta_slow=2.0),
    yarn(factor=64.0, mscale=1.0, mscale_all_dim=1.0, beta_fast=1.0, beta_slow=1.0),  # Kimi-K2
    yarn(factor=40.0, truncate=False),
    yarn(factor=1.0, mscale=1.0, mscale_all_dim=1.0),
]


def both(parameters: dict[str, object], rope: int) -> tuple[DeepseekV3Config, RotaryEmbedding]:
    hf = DeepseekV3Config(
        hidden_size=256,
        num_attention_heads=4,
        qk_rope_head_dim=rope,
        max_position_embeddings=163_840,
        rope_parameters=dict(parameters),
    )
    hf.architectures = ["DeepseekV3ForCausalLM"]
    return hf, RotaryEmbedding(ModelConfig.from_hf_dict(hf.to_dict()))


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("rope", [64, 8])
def test_cos_and_sin(parameters: dict[str, object], rope: int) -> None:
    hf, ours = both(parameters, rope)
    cos, sin = ours(POSITIONS)
    assert cos.shape == sin.shape == (len(POSITIONS), rope // 2)
    assert cos.dtype == torch.float32
    want = DeepseekV3RotaryEmbedding(hf)(torch.zeros(1), POSITIONS[None])
    # The angle's rounding grows with the position: 65,535 radians have an ulp of 0.004.
    for got, theirs in zip((cos, sin), want, strict=True):
        torch.testing.assert_close(got, theirs[0, :, : rope // 2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mscale", [0.707, 1.0])
def test_m07_rotated_queries_as_deepseek_v2(mscale: float) -> None:
    parameters = yarn(factor=40.0, mscale=mscale, mscale_all_dim=mscale)
    hf = DeepseekV2Config(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=163_840,
        rope_parameters=dict(parameters),
    )
    hf.architectures = ["DeepseekV2ForCausalLM"]
    raw = hf.to_dict() | {"num_experts_per_tok": 2}
    cos, sin = RotaryEmbedding(ModelConfig.from_hf_dict(raw))(POSITIONS)
    query = torch.randn(1, 4, len(POSITIONS), 64)
    key = torch.randn(1, 1, len(POSITIONS), 64)
    freqs = DeepseekV2RotaryEmbedding(hf)(query, POSITIONS[None])
    want_query, want_key = apply_rotary_emb(query, key, freqs)
    got_query = apply_rope(query[0].transpose(0, 1), cos, sin)  # [T, H, R]
    torch.testing.assert_close(got_query, want_query[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        apply_rope(key[0, 0], cos, sin), want_key[0, 0], rtol=1e-5, atol=1e-5
    )


def test_angles_depend_on_the_distance_only() -> None:
    _, rotary = both(PARAMETERS[0], 64)
    query, key = torch.randn(1, 64), torch.randn(1, 64)

    def product(at: int, distance: int) -> float:
        q = apply_rope(query, *rotary(torch.tensor([at + distance])))
        return float((q * apply_rope(key, *rotary(torch.tensor([at])))).sum())

    assert product(0, 13) == pytest.approx(product(500, 13), abs=1e-3)
    assert product(0, 13) != pytest.approx(product(0, 14), abs=1e-3)
