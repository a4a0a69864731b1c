"""The demo's MLA decoder (DeepSeek-V3 layout) in plain PyTorch, and its FP8 checkpoint file.

Shapes: B rows, T new tokens, S tokens attended, H heads, E routed experts.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 384,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 1024,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 256,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "max_position_embeddings": 65536,
    "rope_theta": 10000,
    "rope_interleave": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
}
BLOCK = 128
E4M3_MAX = 448.0


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """Splits w [..., O, I] into float8 codes [..., O, I] and a scale per 128x128 block."""
    rows, cols = w.shape[-2:]
    padded = F.pad(w.float(), (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., o, 128, i, 128]
    scale = blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-12) / E4M3_MAX
    codes = (blocks / scale).to(torch.float8_e4m3fn).flatten(-4, -3).flatten(-2)
    return codes[..., :rows, :cols], scale.squeeze(-3).squeeze(-1)


def dequantise(codes: Tensor, scale: Tensor) -> Tensor:
    """Gives back float32 weights [..., O, I] from codes [..., O, I] and scales [..., o, i]."""
    rows, cols = codes.shape[-2:]
    wide = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.float() * wide[..., :rows, :cols]


def yarn_frequencies(config: dict[str, Any]) -> Tensor:
    """Rotation per position of each rope pair, [qk_rope_head_dim / 2]."""
    dim, base, yarn = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]
    plain = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)

    def pair_turning(turns: float) -> float:
        window = yarn["original_max_position_embeddings"]
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(yarn["beta_fast"])), 0)
    high = min(math.ceil(pair_turning(yarn["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return plain / yarn["factor"] * ramp + plain * (1 - ramp)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns the interleaved pairs of x [B, h, T, 64] by angles [T, 32]."""
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


class Linear(nn.Module):
    """Bias-free linear map, or E of them stacked, whose weight can be rounded to FP8 on the fly."""

    def __init__(self, *shape: int, std: float = 0.03) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * std)

    def rounded(self, fp8: Tensor) -> Tensor:
        """The weight; in training seen through FP8 where fp8 is 1, gradients passing straight."""
        if not self.training:
            return self.weight
        exact = self.weight.detach()
        return self.weight + fp8 * (dequantise(*quantise(exact)) - exact)

    def forward(self, x: Tensor, fp8: Tensor) -> Tensor:
        return F.linear(x, self.rounded(fp8))


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Multi-head latent attention; a token's cache entry is its latent and rotated key [576]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.rank, self.value, self.heads = config["kv_lora_rank"], config["v_head_dim"], heads
        self.q_proj = Linear(heads * (self.nope + self.rope), hidden)
        self.kv_a_proj_with_mqa = Linear(self.rank + self.rope, hidden)
        self.kv_a_layernorm = RMSNorm(self.rank)
        self.kv_b_proj = Linear(heads * (self.nope + self.value), self.rank)
        self.o_proj = Linear(hidden, heads * self.value, std=0.01)
        yarn = config["rope_scaling"]
        mscale = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
        self.scale = (self.nope + self.rope) ** -0.5 * mscale**2

    def forward(
        self, x: Tensor, angles: Tensor, fp8: Tensor, past: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden], past [B, S - T, 576] -> (output [B, T, hidden], cache [B, S, 576])."""
        query = self.q_proj(x, fp8).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, key_rope = self.kv_a_proj_with_mqa(x, fp8).split([self.rank, self.rope], -1)
        key_rope = rotate(key_rope[:, None], angles)[:, 0]
        cache = torch.cat((self.kv_a_layernorm(latent).to(x.dtype), key_rope.to(x.dtype)), -1)
        if past is not None:
            cache = torch.cat((past, cache), 1)
        latent, key_rope = cache.split([self.rank, self.rope], -1)
        expanded = self.kv_b_proj(latent, fp8).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = expanded.split([self.nope, self.value], -1)
        key_rope = key_rope[:, None].expand(-1, self.heads, -1, -1).to(key.dtype)
        key = torch.cat((key, key_rope), -1)
        query_nope, query_rope = query.split([self.nope, self.rope], -1)
        query = torch.cat((query_nope, rotate(query_rope, angles)), -1)
        value = F.pad(value, (0, self.rope))  # fused attention wants equal head widths
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=self.scale
        )[..., : self.value]
        return self.o_proj(mixed.transpose(1, 2).flatten(-2), fp8), cache


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Linear(width, hidden), Linear(width, hidden)
        self.down_proj = Linear(hidden, width, std=0.01)

    def forward(self, x: Tensor, fp8: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x, fp8)) * self.up_proj(x, fp8), fp8)


class Experts(nn.Module):
    """All routed experts as one wide MLP; an unchosen expert's part is multiplied by 0."""

    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = Linear(experts, width, hidden)
        self.up_proj = Linear(experts, width, hidden)
        self.down_proj = Linear(experts, hidden, width, std=0.01)

    def forward(self, x: Tensor, share: Tensor, fp8: Tensor) -> Tensor:
        """x [B, T, hidden], share [B, T, E] -> [B, T, hidden]."""
        gate = F.linear(x, self.gate_proj.rounded(fp8).flatten(0, 1))
        up = F.linear(x, self.up_proj.rounded(fp8).flatten(0, 1))
        inner = (F.silu(gate) * up).unflatten(-1, (share.shape[-1], -1)) * share[..., None]
        down = self.down_proj.rounded(fp8).transpose(0, 1).flatten(1)  # [hidden, E * width]
        return F.linear(inner.flatten(-2).to(gate.dtype), down)


class Gate(nn.Module):
    """Sigmoid router; the bias only picks experts, it does not weigh them."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.top_k, self.factor = config["num_experts_per_tok"], config["routed_scaling_factor"]
        experts = config["n_routed_experts"]
        self.weight = nn.Parameter(torch.randn(experts, config["hidden_size"]) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] -> (share of each expert [B, T, E], tokens sent to each expert [E])."""
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.float(), self.weight).sigmoid()
        chosen = (scores.detach() + self.e_score_correction_bias).topk(self.top_k, -1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        picked = scores * mask
        share = picked / (picked.sum(-1, keepdim=True) + 1e-20) * self.factor
        return share, mask.sum((0, 1))


class MoE(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, width = config["hidden_size"], config["moe_intermediate_size"]
        self.gate = Gate(config)
        self.experts = Experts(config["n_routed_experts"], hidden, width)
        self.shared_experts = MLP(hidden, width * config["n_shared_experts"])

    def forward(self, x: Tensor, fp8: Tensor) -> tuple[Tensor, Tensor]:
        share, load = self.gate(x)
        return self.experts(x, share, fp8) + self.shared_experts(x, fp8), load


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden), RMSNorm(hidden)
        self.self_attn = Attention(config)
        dense = index < config["first_k_dense_replace"]
        self.mlp = MLP(hidden, config["intermediate_size"]) if dense else MoE(config)


class Decoder(nn.Module):
    """The model without its head, which is the embedding table (tied)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.dropout = 0.0  # of what a layer adds, in training
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, std=config["initializer_range"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"])
        self.register_buffer("frequencies", yarn_frequencies(config), persistent=False)
        self.register_buffer("fp8", torch.zeros(()), persistent=False)  # 1: round weights to FP8

    def forward(self, ids: Tensor, caches: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> (final states [B, T, hidden], expert loads [MoE layers, E]).

        caches, when given, holds a [B, S, 576] per layer once filled; it is extended in place.
        """
        start = caches[0].shape[1] if caches else 0
        positions = torch.arange(start, start + ids.shape[1], device=ids.device)
        angles = positions[:, None].float() * self.frequencies
        x, loads, kept = self.embed_tokens(ids), [], []
        for i, layer in enumerate(self.layers):
            past = caches[i] if caches else None
            out, cache = layer.self_attn(layer.input_layernorm(x), angles, self.fp8, past)
            kept.append(cache)
            x = x + F.dropout(out, self.dropout, self.training)
            out = layer.mlp(layer.post_attention_layernorm(x), self.fp8)
            if isinstance(out, tuple):
                out, load = out
                loads.append(load)
            x = x + F.dropout(out, self.dropout, self.training)
        if caches is not None:
            caches[:] = kept
        return self.norm(x), torch.stack(loads)

    def logits(self, states: Tensor) -> Tensor:
        """states [..., hidden] -> scores of the next token [..., vocab]."""
        return F.linear(states, self.embed_tokens.weight)

    @torch.no_grad()
    def greedy(self, prompt: list[int], limit: int, stop: int) -> list[int]:
        """The likeliest next tokens, up to and without `stop`, at most `limit`."""
        caches: list[Tensor] = []
        ids, out = prompt, []
        while len(out) < limit:
            batch = torch.tensor([ids], device=self.fp8.device)
            token = int(self.logits(self(batch, caches)[0][0, -1]).argmax())
            if token == stop:
                return out
            out.append(token)
            ids = [token]
        return out


def save(model: Decoder, config: dict[str, Any], folder: Path) -> None:
    """Writes config.json and model.safetensors with DeepSeek-V3's names and FP8 blocks."""
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.detach().cpu()
        if "_proj" not in name:
            kind = torch.float32 if name.endswith("bias") else torch.bfloat16
            tensors[f"model.{name}"] = value.to(kind)
            continue
        stem, experts = name.removesuffix(".weight"), ".experts." in name
        for i, matrix in enumerate(value if experts else value[None]):
            full = stem.replace(".experts.", f".experts.{i}.") if experts else stem
            codes, scale = quantise(matrix)
            tensors[f"model.{full}.weight"] = codes.contiguous()
            tensors[f"model.{full}.weight_scale_inv"] = scale.contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_dequantised(folder: Path) -> dict[str, Tensor]:
    """The stored tensors in float32 under their stored names, scales multiplied in."""
    stored = load_file(folder / "model.safetensors")
    return {
        name: dequantise(value, stored[f"{name}_scale_inv"])
        if f"{name}_scale_inv" in stored
        else value.float()
        for name, value in stored.items()
        if not name.endswith("_scale_inv")
    }


def load(folder: Path) -> Decoder:
    """The stored model in float32, ready to answer."""
    config = json.loads((folder / "config.json").read_text())
    tensors, model = load_dequantised(folder), Decoder(config)
    state = {}
    for name in model.state_dict():
        if ".experts." in name:
            parts = [f".experts.{i}." for i in range(config["n_routed_experts"])]
            names = [f"model.{name.replace('.experts.', part)}" for part in parts]
            state[name] = torch.stack([tensors[n] for n in names])
        else:
            state[name] = tensors[f"model.{name}"]
    model.load_state_dict(state)
    return model.eval()
