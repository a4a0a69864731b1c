"""Small random Hugging Face checkpoints with the true MLA row (512 + 64) and tiny everything else.

Weights are at unit scale, norms are not 1 and the head is wide, so that tokens, routing and logits
spread: a forgotten norm, scale or bias shows.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from support.byte_tokenizer import make_byte_tokenizer

Arch = Literal["v2", "v3", "glm", "youtu"]

_ARCHITECTURE = {
    "v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
    "glm": ("Glm4MoeLiteForCausalLM", "glm4_moe_lite"),
    "youtu": ("YoutuForCausalLM", "youtu"),
}
_BLOCK = 128
_NEVER_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "shared_head")


def make_checkpoint(
    path: str | Path,
    *,
    arch: Arch = "v3",
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    q_lora: int | Literal["auto"] | None = "auto",
    kv_lora: int = 512,
    nope: int = 128,
    rope: int = 64,
    v: int = 128,
    intermediate: int = 96,
    vocab: int = 256,
    experts: int = 8,
    shared_experts: int = 1,
    top_k: int = 2,
    moe_intermediate: int = 48,
    first_dense: int = 1,
    groups: int | Literal["auto"] = "auto",
    top_groups: int | Literal["auto"] = "auto",
    topk_method: str | None = None,
    norm_topk_prob: bool | None = None,
    routed_scaling: float | None = None,
    yarn_factor: float | Literal["auto"] | None = "auto",
    mscale: float = 0.707,
    mscale_all_dim: float = 0.707,
    original_positions: int = 64,
    max_positions: int = 4096,
    rope_interleave: bool = True,
    attention_bias: bool = False,
    tied: bool | None = None,
    mtp_layers: int = 0,
    dtype: Literal["fp32", "bf16"] = "fp32",
    fp8: bool = False,
    shards: int = 1,
    tokenizer: bool = False,
    extra_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    seed: int = 0,
) -> Path:
    """Writes config.json and weights into `path` (made if needed) and returns it.

    "auto": V2 has no q_lora, greedy softmax routing and yarn; V3 q_lora 32, noaux_tc in 4 groups of
    which 2, and yarn; GLM is V3 without yarn; Youtu is dense with q_lora 32 and without yarn. `fp8`
    stores the big matrices in 128×128 blocks. `shards` > 1 writes an index. `tokenizer` adds a
    byte-level tokenizer and needs vocab ≥ 261. Equal arguments give equal bytes.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    v3, dense = arch in ("v3", "glm"), arch == "youtu"
    architecture, model_type = _ARCHITECTURE[arch]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": (None if arch == "v2" else 32) if q_lora == "auto" else q_lora,
        "kv_lora_rank": kv_lora,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": v,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_interleave": rope_interleave,
        "attention_bias": attention_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": dense if tied is None else tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }
    if yarn_factor == "auto":
        yarn_factor = None if arch in ("youtu", "glm") else 40.0
    if yarn_factor is not None:
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": yarn_factor,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": original_positions,
        }
    if not dense:
        grouped = v3 or topk_method == "group_limited_greedy"
        config |= {
            "n_routed_experts": experts,
            "n_shared_experts": shared_experts,
            "num_experts_per_tok": top_k,
            "moe_intermediate_size": moe_intermediate,
            "first_k_dense_replace": first_dense,
            "moe_layer_freq": 1,
            "n_group": (4 if grouped else 1) if groups == "auto" else groups,
            "topk_group": (2 if grouped else 1) if top_groups == "auto" else top_groups,
            "topk_method": topk_method or ("noaux_tc" if v3 else "greedy"),
            "scoring_func": "sigmoid" if v3 else "softmax",
            "norm_topk_prob": v3 if norm_topk_prob is None else norm_topk_prob,
            "routed_scaling_factor": (
                (2.5 if v3 else 1.0) if routed_scaling is None else routed_scaling
            ),
        }
    if v3:
        config["num_nextn_predict_layers"] = mtp_layers
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        }
    config |= extra_config or {}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    tensors = random_tensors(config, mtp_layers=mtp_layers, dtype=dtype, seed=seed)
    write_tensors(folder, quantize_tensors(tensors) if fp8 else tensors, shards=shards)
    if tokenizer:
        make_byte_tokenizer(folder, vocab_size=min(vocab, 320))
    return folder


def random_tensors(
    config: dict[str, Any], *, mtp_layers: int, dtype: str, seed: int
) -> dict[str, torch.Tensor]:
    """The weights of a config.json, by checkpoint name."""
    generator = torch.Generator().manual_seed(seed)
    out: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(config, mtp_layers).items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1.0 + 0.2 * value
        elif name.endswith("bias"):
            value *= 0.3
        elif not name.endswith("embed_tokens.weight"):
            value /= math.sqrt(shape[-1])
        elif config["tie_word_embeddings"]:
            value *= 0.3  # else the residual stream echoes the last token
        if name in ("lm_head.weight",) or ".mlp.gate." in name:
            value *= 4.0
        keep = name.endswith("e_score_correction_bias")
        out[name] = value.bfloat16() if dtype == "bf16" and not keep else value
    return out


def _shapes(config: dict[str, Any], mtp_layers: int) -> dict[str, tuple[int, ...]]:
    hidden, vocab, heads = (
        config[key] for key in ("hidden_size", "vocab_size", "num_attention_heads")
    )
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, v, q_lora = (config[key] for key in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank"))
    experts, layers = config.get("n_routed_experts", 0), config["num_hidden_layers"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)

    def mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, inner)

    for layer in range(layers + mtp_layers):
        prefix = f"model.layers.{layer}"
        attn = f"{prefix}.self_attn"
        q_out = heads * (nope + rope)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if q_lora:
            shapes[f"{attn}.q_a_proj.weight"] = (q_lora, hidden)
            shapes[f"{attn}.q_a_layernorm.weight"] = (q_lora,)
            shapes[f"{attn}.q_b_proj.weight"] = (q_out, q_lora)
        else:
            shapes[f"{attn}.q_proj.weight"] = (q_out, hidden)
        shapes[f"{attn}.kv_a_proj_with_mqa.weight"] = (rank + rope, hidden)
        shapes[f"{attn}.kv_a_layernorm.weight"] = (rank,)
        shapes[f"{attn}.kv_b_proj.weight"] = (heads * (nope + v), rank)
        shapes[f"{attn}.o_proj.weight"] = (hidden, heads * v)
        if config["attention_bias"]:
            if q_lora:
                shapes[f"{attn}.q_a_proj.bias"] = (q_lora,)
            shapes[f"{attn}.kv_a_proj_with_mqa.bias"] = (rank + rope,)
            shapes[f"{attn}.o_proj.bias"] = (hidden,)
        if experts and layer >= config["first_k_dense_replace"]:
            inner = config["moe_intermediate_size"]
            shapes[f"{prefix}.mlp.gate.weight"] = (experts, hidden)
            if config["topk_method"] == "noaux_tc":
                shapes[f"{prefix}.mlp.gate.e_score_correction_bias"] = (experts,)
            for expert in range(experts):
                mlp(f"{prefix}.mlp.experts.{expert}", inner)
            if config["n_shared_experts"]:
                mlp(f"{prefix}.mlp.shared_experts", inner * config["n_shared_experts"])
        else:
            mlp(f"{prefix}.mlp", config["intermediate_size"])
        if layer >= layers:  # a multi-token-prediction layer, with the names of DeepSeek-V3
            shapes[f"{prefix}.enorm.weight"] = (hidden,)
            shapes[f"{prefix}.hnorm.weight"] = (hidden,)
            shapes[f"{prefix}.eh_proj.weight"] = (hidden, 2 * hidden)
            shapes[f"{prefix}.embed_tokens.weight"] = (vocab, hidden)
            shapes[f"{prefix}.shared_head.norm.weight"] = (hidden,)
            shapes[f"{prefix}.shared_head.head.weight"] = (vocab, hidden)
    return shapes


def quantize_tensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The big matrices as e4m3 with `weight_scale_inv`, everything else unchanged."""
    out: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if value.dim() != 2 or any(part in name for part in _NEVER_FP8):
            out[name] = value
        else:
            out[name], out[f"{name}_scale_inv"] = quantize_blocks(value)
    return out


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 [N, K], scale fp32 [ceil(N/128), ceil(K/128)]); each block's largest value is 448."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -cols % _BLOCK, 0, -rows % _BLOCK))
    tiles = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scale = tiles.abs().amax(dim=(1, 3)).clamp(min=1e-12) / 448.0
    codes = (tiles / scale[:, None, :, None]).view_as(padded)[:rows, :cols]
    return codes.to(torch.float8_e4m3fn).contiguous(), scale


def write_tensors(folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """One model.safetensors, or `shards` files and an index, tensors dealt in turn.

    Weight files that `folder` holds already are removed.
    """
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
