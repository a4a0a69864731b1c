"""Gates and MoE layers against transformers' modules with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe, DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE, DeepseekV3TopkRouter

from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.moe import Gate, MoE

DIMS: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def both(architecture: str, **words: Any) -> tuple[Any, ModelConfig]:
    kind = DeepseekV2Config if architecture == "DeepseekV2ForCausalLM" else DeepseekV3Config
    reference = kind(**DIMS | words)
    reference.architectures = [architecture]
    reference._experts_implementation = "eager"
    return reference, ModelConfig.from_hf_dict(reference.to_dict())


def v2(**words: Any) -> tuple[Any, ModelConfig]:
    return both("DeepseekV2ForCausalLM", **words)


def v3(**words: Any) -> tuple[Any, ModelConfig]:
    return both("DeepseekV3ForCausalLM", **words)


def by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(dim=-1)
    return weights.gather(1, order), ids


V2_GATES = [
    {"topk_method": "greedy"},
    {"topk_method": "greedy", "routed_scaling_factor": 16.0},
    {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1},
]
V3_GATES = [
    {"n_group": 1, "topk_group": 1},
    {"n_group": 4, "topk_group": 2},
    {"n_group": 6, "topk_group": 5},
    {"n_group": 2, "topk_group": 2},
    # M13: normalisation and scaling, all four.
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 16.0},
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
    {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 16.0},
]


@pytest.mark.parametrize("words", V2_GATES)
def test_v2_gate(words: dict[str, Any]) -> None:
    reference_config, config = v2(**words)
    reference, gate = DeepseekV2TopkRouter(reference_config), Gate(config, device="cpu")
    reference.weight.data.normal_()
    gate.weight.data.copy_(reference.weight)
    x = torch.randn(100, 48)
    with torch.no_grad():
        _, weights, ids = reference(x)
    got, want = by_id(*gate(x)), by_id(weights, ids)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize("words", V3_GATES)
@pytest.mark.parametrize("bias_scale", [0.3, 30.0])
def test_m11_m13_v3_gate(words: dict[str, Any], bias_scale: float) -> None:
    reference_config, config = v3(**words)
    reference, gate = DeepseekV3TopkRouter(reference_config), Gate(config, device="cpu")
    reference.weight.data.normal_()
    reference.e_score_correction_bias.normal_().mul_(bias_scale)
    gate.weight.data.copy_(reference.weight)
    assert gate.e_score_correction_bias is not None
    gate.e_score_correction_bias.data.copy_(reference.e_score_correction_bias)
    x = torch.randn(100, 48)
    with torch.no_grad():
        _, weights, ids = reference(x)
    got, want = by_id(*gate(x)), by_id(weights, ids)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 300])
@pytest.mark.parametrize("version", [2, 3])
def test_moe_layer(version: int, num_tokens: int) -> None:
    if version == 2:
        reference_config, config = v2(topk_method="greedy")
        reference: Any = DeepseekV2Moe(reference_config)
    else:
        reference_config, config = v3(n_group=4, topk_group=2)
        reference = DeepseekV3MoE(reference_config)
    layer = MoE(config, dtype=torch.float32, device="cpu")
    for param in reference.parameters():
        param.data.normal_().div_(param.shape[-1] ** 0.5)
    layer.gate.weight.data.copy_(reference.gate.weight)
    if layer.gate.e_score_correction_bias is not None:
        layer.gate.e_score_correction_bias.data.zero_()
    layer.experts.gate_up_proj.data.copy_(reference.experts.gate_up_proj)
    layer.experts.down_proj.data.copy_(reference.experts.down_proj)
    shared, theirs = layer.shared_experts, reference.shared_experts
    assert shared is not None
    shared.gate_up_proj.weight.data.copy_(
        torch.cat((theirs.gate_proj.weight, theirs.up_proj.weight))
    )
    shared.down_proj.weight.data.copy_(theirs.down_proj.weight)
    layer.finalize()
    x = torch.randn(num_tokens, 48)
    with torch.inference_mode():
        want = reference(x[None])[0]
        got = layer(x.clone())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_layer_without_shared_experts() -> None:
    config = ModelConfig.from_hf_dict(
        v3(n_group=1, topk_group=1)[0].to_dict() | {"n_shared_experts": None}
    )
    layer = MoE(config, dtype=torch.float32, device="cpu")
    assert layer.shared_experts is None
    for param in layer.parameters():
        param.data.normal_()
    assert layer(torch.randn(5, 48)).shape == (5, 48)
