"""The MLA module: how the weight is cut, what the scale is, and q_lora or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.mla_case import ODD

from radix_mla.attention.mla import MLAAttention, mla_dims
from radix_mla.models.hf_config import ModelConfig

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 48,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": ODD.num_heads,
    "kv_lora_rank": ODD.latent,
    "qk_nope_head_dim": ODD.nope,
    "qk_rope_head_dim": ODD.rope,
    "v_head_dim": ODD.value,
    "q_lora_rank": None,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def make_layer(**changes: Any) -> MLAAttention:
    config = ModelConfig.from_hf_dict(CONFIG | changes)
    layer = MLAAttention(config, 0, dtype=torch.float32, device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer


def test_weights_are_cut_per_head() -> None:
    layer = make_layer()
    layer.finalize()
    assert layer._weights is not None
    w_uk, w_uv = layer._weights
    c_kv = torch.randn(5, ODD.latent)
    kv = layer.kv_b_proj(c_kv).view(5, ODD.num_heads, ODD.nope + ODD.value)
    torch.testing.assert_close(torch.einsum("nl,hpl->nhp", c_kv, w_uk), kv[..., : ODD.nope])
    torch.testing.assert_close(torch.einsum("nl,hvl->nhv", c_kv, w_uv), kv[..., ODD.nope :])


def test_scale_depends_on_nope_and_rope_only() -> None:
    """M09: not on the width of the cached row."""
    assert make_layer().scale == pytest.approx((24 + 8) ** -0.5)
    assert make_layer(kv_lora_rank=16).scale == pytest.approx((24 + 8) ** -0.5)


@pytest.mark.parametrize("q_lora_rank", [None, 16])
def test_parameter_names_are_the_checkpoint_s(q_lora_rank: int | None) -> None:
    names = {name for name, _ in make_layer(q_lora_rank=q_lora_rank).named_parameters()}
    q = (
        {"q_proj.weight"}
        if q_lora_rank is None
        else {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
    )
    assert names == q | {
        "kv_a_proj_with_mqa.weight",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
        "o_proj.weight",
    }


def test_bias_where_the_checkpoints_have_it() -> None:
    layer = make_layer(q_lora_rank=16, attention_bias=True)
    biased = {name.split(".")[0] for name, _ in layer.named_parameters() if name.endswith("bias")}
    assert biased == {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_dims() -> None:
    assert mla_dims(ModelConfig.from_hf_dict(CONFIG)) == ODD
    assert (ODD.qk, ODD.row) == (32, 48)
