"""`ModelConfig`: what a Hugging Face `config.json` says about an MLA model, checked and typed.

Letters in comments: H heads, D hidden, L `kv_lora_rank`, P `qk_nope_head_dim`,
R `qk_rope_head_dim`, V `v_head_dim`, E routed experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radix_mla.errors import CheckpointError, ConfigError, UnsupportedModel
from radix_mla.models.config_reader import ConfigReader, flat_keys, merge_overrides, read_json
from radix_mla.models.generation_config import GenerationDefaults
from radix_mla.models.moe_config import ScoringFunc, TopkMethod, read_moe
from radix_mla.models.rope_scaling import YarnScaling, read_rope

__all__ = ["FP8_BLOCK", "GenerationDefaults", "ModelConfig", "ScoringFunc", "TopkMethod"]

FP8_BLOCK = 128

# model_type → architecture, for configs that were saved without `architectures`. Moonlight and
# Kimi-K2 are DeepSeek-V3 with other numbers, and so is GLM-4.7-Flash, whatever its name.
_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "KimiK2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
}
_SPARSE_KEYS = ("index_topk", "index_n_heads", "index_head_dim", "compress_ratios")
_SPARSE_ARCHITECTURES = ("DeepseekV32", "DeepseekV4", "GlmMoeDsa")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense or MoE MLA model. Field names are the checkpoint's; `None` means absent.

    `q_lora_rank` None: `q_proj` alone. `n_routed_experts` 0: every layer is dense.
    `rope_interleave` False: the checkpoint's rope dims pair (i, i + R/2); the loader permutes those
    rows, so that the running model always has interleaved pairs (2i, 2i + 1).
    `fp8` True: matrices may come as e4m3 with a `weight_scale_inv` for each 128×128 block.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    rope_theta: float
    yarn: YarnScaling | None
    rope_interleave: bool
    attention_bias: bool
    tie_word_embeddings: bool
    hidden_act: str
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    n_group: int
    topk_group: int
    topk_method: TopkMethod
    scoring_func: ScoringFunc
    norm_topk_prob: bool
    routed_scaling_factor: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    fp8: bool

    @classmethod
    def from_dir(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Reads `path`/config.json, with the values of `overrides` in place of its own.

        Raises CheckpointError (file missing, not JSON, missing or malformed key), UnsupportedModel
        or, for an override that nothing reads, ConfigError; all name the key.
        """
        return cls.from_hf_dict(read_json(Path(path) / "config.json"), overrides)

    @classmethod
    def from_hf_dict(
        cls, raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """From the parsed config.json, in old (`rope_scaling`) or new (`rope_parameters`) words."""
        reader = ConfigReader(merge_overrides(raw, overrides or {}))
        config = cls._from_reader(reader)
        unread = [key for key in flat_keys(overrides or {}) if key not in reader.read]
        if unread:
            raise ConfigError(
                f"hf_overrides: {unread[0]} is no key of config.json that is read here"
            )
        return config

    @classmethod
    def _from_reader(cls, reader: ConfigReader) -> ModelConfig:
        architecture = _architecture(reader)
        is_v2 = architecture == "DeepseekV2ForCausalLM"
        rope_theta, yarn = read_rope(reader)
        hidden_act = reader.text("hidden_act", "silu")
        if hidden_act != "silu":
            raise UnsupportedModel(f"hidden_act {hidden_act!r} is not supported: silu only")
        if reader.flag("mlp_bias", False):
            raise UnsupportedModel("mlp_bias true is not supported")
        rope_dim = reader.size("qk_rope_head_dim")
        if rope_dim % 2:
            raise CheckpointError(f"config.json: qk_rope_head_dim is {rope_dim}, it must be even")
        return cls(
            architecture=architecture,
            vocab_size=reader.size("vocab_size"),
            hidden_size=reader.size("hidden_size"),
            intermediate_size=reader.size("intermediate_size"),
            num_hidden_layers=reader.size("num_hidden_layers"),
            num_attention_heads=reader.size("num_attention_heads"),
            max_position_embeddings=reader.size("max_position_embeddings"),
            q_lora_rank=reader.count("q_lora_rank", 0) or None,
            kv_lora_rank=reader.size("kv_lora_rank"),
            qk_nope_head_dim=reader.size("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=reader.size("v_head_dim"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            rope_theta=rope_theta,
            yarn=yarn,
            # transformers' V2 knows interleaved pairs only, whatever its config says.
            rope_interleave=is_v2 or reader.flag("rope_interleave", True),
            attention_bias=reader.flag("attention_bias", False),
            tie_word_embeddings=reader.flag(
                "tie_word_embeddings", architecture == "YoutuForCausalLM"
            ),
            hidden_act=hidden_act,
            bos_token_id=reader.optional_count("bos_token_id"),
            eos_token_ids=reader.token_ids("eos_token_id"),
            num_nextn_predict_layers=reader.count("num_nextn_predict_layers", 0),
            fp8=_is_fp8(reader),
            **read_moe(reader, is_v2=is_v2, dense=architecture == "YoutuForCausalLM"),
        )

    @property
    def kv_row_width(self) -> int:
        """Values in a token's KV row of one layer: L + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """P + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(P + R)^-0.5 · mscale(factor, mscale_all_dim)²; nothing of L in it."""
        return 1.0 / math.sqrt(self.qk_head_dim) * (self.yarn.softmax_factor if self.yarn else 1.0)

    def is_moe_layer(self, layer_idx: int) -> bool:
        return (
            self.n_routed_experts > 0
            and layer_idx >= self.first_k_dense_replace
            and layer_idx % self.moe_layer_freq == 0
        )

    @property
    def num_params(self) -> int:
        """All parameters of the served model (MTP layers excluded, a tied head counted once)."""
        heads = 1 if self.tie_word_embeddings else 2
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        layers = sum(
            self._attention_params + self._mlp_params(i, active=False)
            for i in range(self.num_hidden_layers)
        )
        return heads * self.vocab_size * self.hidden_size + norms + layers

    @property
    def active_params(self) -> int:
        """Matrix parameters that every prefill token is multiplied with: FLOPs = 2 · this.

        Attention projections and the chosen experts. Not the embedding (a look-up) and not the
        head, which runs for the tokens that are sampled only.
        """
        return sum(
            self._attention_params + self._mlp_params(i, active=True)
            for i in range(self.num_hidden_layers)
        )

    @property
    def _attention_params(self) -> int:
        heads, hidden, rank = self.num_attention_heads, self.hidden_size, self.q_lora_rank
        q_out = heads * self.qk_head_dim
        q = rank * (hidden + q_out + 1) if rank else hidden * q_out
        kv_a = hidden * self.kv_row_width + self.kv_lora_rank
        kv_b = self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        bias = ((rank or 0) + self.kv_row_width + hidden) if self.attention_bias else 0
        return q + kv_a + kv_b + heads * self.v_head_dim * hidden + bias

    def _mlp_params(self, layer_idx: int, *, active: bool) -> int:
        if not self.is_moe_layer(layer_idx):
            return 3 * self.hidden_size * self.intermediate_size
        routed = self.num_experts_per_tok if active else self.n_routed_experts
        expert = 3 * self.hidden_size * self.moe_intermediate_size
        gate = self.n_routed_experts * self.hidden_size
        if self.topk_method == "noaux_tc":
            gate += self.n_routed_experts
        return (routed + self.n_shared_experts) * expert + gate


def _architecture(reader: ConfigReader) -> str:
    names = reader.get("architectures") or []
    model_type = reader.get("model_type")
    name = str(names[0]) if names else _ARCHITECTURES.get(str(model_type))
    sparse = next((key for key in _SPARSE_KEYS if reader.get(key) is not None), None)
    if sparse or (name or "").startswith(_SPARSE_ARCHITECTURES):
        raise UnsupportedModel(
            f"{name or model_type} uses sparse attention"
            f"{f' ({sparse})' if sparse else ''}, which is not supported"
        )
    if name is None:
        raise UnsupportedModel(
            f"config.json has no architectures, and model_type {model_type!r} is not known"
        )
    if name not in _ARCHITECTURES.values():
        known = ", ".join(_ARCHITECTURES.values())
        raise UnsupportedModel(f"architecture {name!r} is not supported; supported: {known}")
    return name


def _is_fp8(reader: ConfigReader) -> bool:
    """Whether weights may be block-scaled e4m3. Any other quantization is refused by name."""
    if not reader.get("quantization_config"):
        return False
    quant = reader.section("quantization_config")
    method = quant.text("quant_method", "")
    if method != "fp8":
        raise UnsupportedModel(f"quantization_config: quant_method {method!r} is not supported")
    block = quant.get("weight_block_size")
    if list(block or []) != [FP8_BLOCK, FP8_BLOCK]:
        raise UnsupportedModel(
            f"quantization_config: weight_block_size {block} is not supported: [128, 128] only"
        )
    if (fmt := quant.text("fmt", "e4m3")) != "e4m3":
        raise UnsupportedModel(f"quantization_config: fmt {fmt!r} is not supported: e4m3 only")
    return True
