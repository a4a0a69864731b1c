"""config.json in all its spellings, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radix_mla.errors import CheckpointError, ConfigError, UnsupportedModel
from radix_mla.models.hf_config import GenerationDefaults, ModelConfig
from radix_mla.models.rope_scaling import yarn_mscale

CONFIGS = Path(__file__).parents[2] / "configs" / "shapes"

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V2_LITE: dict[str, Any] = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "q_lora_rank": None,
    "quantization_config": None,
    "rope_scaling": V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
YOUTU: dict[str, Any] = {
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "kv_lora_rank": 512,
    "max_position_embeddings": 131072,
    "num_attention_heads": 16,
    "num_hidden_layers": 32,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 1600000,
    "tie_word_embeddings": True,
    "v_head_dim": 128,
    "vocab_size": 128256,
}


def without(raw: dict[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k != key}


def test_v3_params_match_the_published_size() -> None:
    config = ModelConfig.from_hf_dict(V3)
    assert config.fp8
    assert config.num_params == pytest.approx(671e9, rel=1e-3)
    # 37B published, with the head's and the embedding's 0.93B each.
    assert config.active_params == pytest.approx(37e9 - 2 * 0.93e9, rel=0.02)


def test_v2_lite_params_match_the_published_size() -> None:
    config = ModelConfig.from_hf_dict(V2_LITE)
    assert config.num_params == 15_706_484_224
    assert (config.q_lora_rank, config.scoring_func) == (None, "softmax")


def test_youtu_is_dense() -> None:
    config = ModelConfig.from_hf_dict(YOUTU)
    assert config.n_routed_experts == 0
    assert not any(map(config.is_moe_layer, range(config.num_hidden_layers)))
    assert config.eos_token_ids == (128001, 128008)
    assert config.num_params == pytest.approx(1.96e9, rel=0.01)
    assert config.yarn is None


def test_m15_kv_row_is_latent_plus_rope_once() -> None:
    config = ModelConfig.from_hf_dict(V3)
    assert config.kv_row_width == 576
    assert config.kv_row_width * 2 * config.num_hidden_layers == 70_272


@pytest.mark.parametrize(
    ("factor", "all_dim", "expected"),
    [(40, 0.707, 1.5897), (40, 1.0, 1.8739), (40, 0.0, 1.0), (1.0, 1.0, 1.0)],
)
def test_m07_softmax_scale_has_mscale_squared(
    factor: float, all_dim: float, expected: float
) -> None:
    yarn = V3["rope_scaling"] | {"factor": factor, "mscale": all_dim, "mscale_all_dim": all_dim}
    config = ModelConfig.from_hf_dict(V3 | {"rope_scaling": yarn})
    assert config.softmax_scale == pytest.approx(192**-0.5 * expected, rel=1e-4)


@pytest.mark.parametrize("scaling", [None, {"type": "default"}])
def test_m07_no_factor_without_yarn(scaling: dict[str, Any] | None) -> None:
    config = ModelConfig.from_hf_dict(V3 | {"rope_scaling": scaling})
    assert config.softmax_scale == pytest.approx(192**-0.5)


@pytest.mark.parametrize(("nope", "rope", "latent"), [(128, 64, 512), (24, 8, 40), (192, 64, 512)])
def test_m09_softmax_scale_depends_on_the_head_dims_only(nope: int, rope: int, latent: int) -> None:
    dims = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "kv_lora_rank": latent}
    config = ModelConfig.from_hf_dict(V3 | dims | {"rope_scaling": None})
    assert config.softmax_scale == pytest.approx((nope + rope) ** -0.5)
    assert config.kv_row_width == latent + rope


def test_m10_missing_null_and_zero_q_lora_rank_are_the_same() -> None:
    configs = {
        ModelConfig.from_hf_dict(raw)
        for raw in (without(V3, "q_lora_rank"), V3 | {"q_lora_rank": None}, V3 | {"q_lora_rank": 0})
    }
    assert {config.q_lora_rank for config in configs} == {None}
    assert len(configs) == 1


def test_old_and_new_rope_spellings_are_the_same() -> None:
    old = ModelConfig.from_hf_dict(V3)
    parameters = without(V3["rope_scaling"], "type") | {"rope_type": "yarn", "rope_theta": 10000.0}
    new = without(without(V3, "rope_scaling"), "rope_theta") | {"rope_parameters": parameters}
    assert ModelConfig.from_hf_dict(new) == old
    both = V3 | {"rope_scaling": V3["rope_scaling"] | {"rope_type": "yarn"}}
    assert ModelConfig.from_hf_dict(both) == old


def test_new_spelling_without_scaling() -> None:
    raw = without(without(YOUTU, "rope_scaling"), "rope_theta")
    config = ModelConfig.from_hf_dict(
        raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 1600000}}
    )
    assert config == ModelConfig.from_hf_dict(YOUTU)


def test_cos_sin_scale_is_the_ratio_of_mscales() -> None:
    def scale(**words: float) -> float:
        yarn = without(without(V3["rope_scaling"], "mscale"), "mscale_all_dim") | words
        config = ModelConfig.from_hf_dict(V3 | {"rope_scaling": yarn})
        assert config.yarn is not None
        return config.yarn.cos_sin_scale

    assert scale(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert scale(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(
        yarn_mscale(40, 1.0) / yarn_mscale(40, 0.5)
    )
    assert scale() == pytest.approx(yarn_mscale(40, 1.0))
    assert scale(attention_factor=1.25) == 1.25


def test_yarn_factor_defaults_to_the_ratio_of_lengths() -> None:
    config = ModelConfig.from_hf_dict(V3 | {"rope_scaling": without(V3["rope_scaling"], "factor")})
    assert config.yarn is not None
    assert config.yarn.factor == 40.0


def test_transformers_saved_config_has_no_gate_words() -> None:
    raw = without(without(V3, "topk_method"), "scoring_func")
    assert ModelConfig.from_hf_dict(raw) == ModelConfig.from_hf_dict(V3)
    v2 = without(without(V2_LITE, "topk_method"), "scoring_func")
    assert ModelConfig.from_hf_dict(v2) == ModelConfig.from_hf_dict(V2_LITE)


def test_architecture_from_model_type() -> None:
    assert ModelConfig.from_hf_dict(without(V3, "architectures")) == ModelConfig.from_hf_dict(V3)


@pytest.mark.parametrize("ids", [[1, 2], 1, None])
def test_eos_ids(ids: Any) -> None:
    config = ModelConfig.from_hf_dict(V3 | {"eos_token_id": ids})
    assert list(config.eos_token_ids) == ([] if ids is None else ids if ids != 1 else [1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": [], "model_type": "mamba"}, "mamba"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM"),
        ({"architectures": ["DeepseekV4ForCausalLM"]}, "sparse attention"),
        ({"index_topk": 2048}, "index_topk"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "llama3"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": None}, "partial"),
        ({"topk_method": "hash"}, "hash"),
        ({"scoring_func": "sqrtsoftplus"}, "sqrtsoftplus"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"\[64, 64\]",
        ),
        (
            {"quantization_config": V3["quantization_config"] | {"fmt": "e5m2"}},
            "e5m2",
        ),
    ],
)
def test_unsupported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        ModelConfig.from_hf_dict(V3 | change)


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rms_norm_eps",
        "rope_theta",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
    ],
)
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        ModelConfig.from_hf_dict(without(V3, key))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "7168"}, "hidden_size is '7168'"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
        ({"eos_token_id": ["a"]}, "eos_token_id"),
        ({"topk_method": 3}, "topk_method"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"qk_rope_head_dim": 63}, "even"),
        ({"n_routed_experts": 255}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 129}, "128 experts"),
    ],
)
def test_malformed_value_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf_dict(V3 | change)


@pytest.mark.parametrize("text", ["{", "[1]", "\x00", ""])
def test_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.from_dir(tmp_path)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json not found"):
        ModelConfig.from_dir(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    config = ModelConfig.from_hf_dict(V3)
    assert GenerationDefaults.from_dir(tmp_path, config) == GenerationDefaults(eos_token_ids=(1,))
    words = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "eos_token_id": [7, 1],
        "do_sample": True,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(words))
    assert GenerationDefaults.from_dir(tmp_path, config) == GenerationDefaults(
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.1,
        eos_token_ids=(7, 1),
    )


def test_generation_defaults_malformed(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature"):
        GenerationDefaults.from_dir(tmp_path, ModelConfig.from_hf_dict(V3))


# Published sizes: parameters, and those active in a token (without the embedding and the head).
SHAPES = {
    "deepseek-v2-lite": ("DeepseekV2ForCausalLM", 15.7e9, 2.24e9),
    "deepseek-v3": ("DeepseekV3ForCausalLM", 671e9, 35.8e9),
    "kimi-k2": ("DeepseekV3ForCausalLM", 1.027e12, 30.6e9),
    "moonlight": ("DeepseekV3ForCausalLM", 15.96e9, 2.24e9),
    "glm-4.7-flash": ("Glm4MoeLiteForCausalLM", 29.9e9, 3.0e9),
    "youtu": ("YoutuForCausalLM", 1.96e9, 1.69e9),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_that_ship(name: str) -> None:
    architecture, num_params, active = SHAPES[name]
    config = ModelConfig.from_dir(CONFIGS / name)
    assert config.architecture == architecture
    assert config.num_params == pytest.approx(num_params, rel=0.02)
    assert config.active_params == pytest.approx(active, rel=0.1)
    assert config.kv_row_width == 576
    assert config.rope_interleave


def test_every_shape_is_tested() -> None:
    assert {path.parent.name for path in CONFIGS.glob("*/config.json")} == SHAPES.keys()


def test_kimi_k2_is_a_deepseek_v3() -> None:
    config = ModelConfig.from_dir(CONFIGS / "kimi-k2")
    assert (config.n_routed_experts, config.n_group, config.num_attention_heads) == (384, 1, 64)
    assert config.fp8
    assert config.scoring_func == "sigmoid"
    raw = json.loads((CONFIGS / "kimi-k2" / "config.json").read_text())
    for change in ({"architectures": ["KimiK2ForCausalLM"]}, {"architectures": None}):
        other = ModelConfig.from_hf_dict(raw | change)
        assert other == replace(config, architecture="KimiK2ForCausalLM")


def test_glm_4_7_flash() -> None:
    """No scoring_func in its config.json: sigmoid, as everything after V2."""
    config = ModelConfig.from_dir(CONFIGS / "glm-4.7-flash")
    assert (config.qk_nope_head_dim, config.v_head_dim, config.qk_head_dim) == (192, 256, 256)
    assert (config.topk_method, config.scoring_func) == ("noaux_tc", "sigmoid")
    assert config.softmax_scale == 256**-0.5
    assert config.yarn is None
    assert config.eos_token_ids == (154820, 154827, 154829)
    assert not config.is_moe_layer(0)
    assert config.is_moe_layer(1)


@pytest.mark.parametrize("dense", [0, 1, 3])
def test_mlp_layer_types_say_where_moe_begins(dense: int) -> None:
    types = ["dense"] * dense + ["sparse"] * (61 - dense)
    config = ModelConfig.from_hf_dict(
        without(V3, "first_k_dense_replace") | {"mlp_layer_types": types}
    )
    assert config.first_k_dense_replace == dense


@pytest.mark.parametrize("types", [["sparse", "dense"], ["dense", "other"], "dense and more"])
def test_other_mlp_layer_types_are_refused(types: Any) -> None:
    with pytest.raises(UnsupportedModel, match="mlp_layer_types"):
        ModelConfig.from_hf_dict(V3 | {"mlp_layer_types": types})


def test_partial_rotary_factor_is_refused_at_the_top_too() -> None:
    assert ModelConfig.from_hf_dict(
        V3 | {"partial_rotary_factor": 1.0}
    ) == ModelConfig.from_hf_dict(V3)
    with pytest.raises(UnsupportedModel, match="partial_rotary_factor"):
        ModelConfig.from_hf_dict(V3 | {"partial_rotary_factor": 0.5})


def test_overrides_replace_values_and_merge_objects() -> None:
    config = ModelConfig.from_hf_dict(V3, {"num_hidden_layers": 4, "rope_scaling": {"factor": 8}})
    want = V3 | {"num_hidden_layers": 4, "rope_scaling": V3["rope_scaling"] | {"factor": 8}}
    assert config == ModelConfig.from_hf_dict(want)
    assert ModelConfig.from_hf_dict(V3, {"rope_scaling": None}).yarn is None
    assert ModelConfig.from_hf_dict(V3, {}) == ModelConfig.from_hf_dict(V3)
    assert V3["num_hidden_layers"] == 61


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"num_hidden_layer": 4}, "num_hidden_layer "),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),  # known to others, without effect here
        ({"rope_scaling": {"facto": 8}}, r"rope_scaling\.facto "),
        ({"num_hidden_layers": 4, "speed": {"warp": 9}}, r"speed\.warp"),
    ],
)
def test_overrides_that_nothing_reads_are_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"hf_overrides: {named}"):
        ModelConfig.from_hf_dict(V3, overrides)


def test_overrides_are_checked_as_the_file_is() -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is 0"):
        ModelConfig.from_hf_dict(V3, {"num_hidden_layers": 0})
