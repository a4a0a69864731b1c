"""DeepSeek V2/V3-style decoder: MLA attention, dense or MoE feed-forward. T tokens, D hidden.

Parameter names are the checkpoint's, but for gate and up projections, which are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from radix_mla.attention.mla import MLAAttention
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.layers import Embedding, GatedMLP, Linear, RMSNorm
from radix_mla.models.moe import MoE
from radix_mla.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from radix_mla.attention.context import ForwardContext


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(
        self, config: ModelConfig, layer_idx: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = MLAAttention(config, layer_idx, dtype=dtype, device=device)
        self.mlp: MoE | GatedMLP = (
            MoE(config, dtype=dtype, device=device)
            if config.is_moe_layer(layer_idx)
            else GatedMLP(hidden, config.intermediate_size, dtype=dtype, device=device)
        )
        self.input_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """hidden [T, D], changed in place and returned."""
        hidden += self.self_attn(self.input_layernorm(hidden), cos, sin, ctx)
        hidden += self.mlp(self.post_attention_layernorm(hidden))
        return hidden


class DeepseekModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_idx, dtype=dtype, device=device)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config, device=device)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def forward(self, tokens: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        cos, sin = self.rotary_emb(ctx.positions)
        hidden = self.embed_tokens(tokens)  # [T, D]
        for layer in self.decoder_layers():
            hidden = layer(hidden, cos, sin, ctx)
        out: torch.Tensor = self.norm(hidden)
        return out


class DeepseekForCausalLM(nn.Module):
    """The served model; `load_model` makes one with its weights. For inference only."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.config = config
        self.model = DeepseekModel(config, dtype=dtype, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def finalize(self) -> None:
        """Called once, after loading: absorbs and packs weights."""
        for layer in self.model.decoder_layers():
            layer.self_attn.finalize()
            for name, child in layer.self_attn.named_children():
                if isinstance(child, Linear) and name != "kv_b_proj":  # MLA works on its views
                    child.pack()
            layer.mlp.finalize()
        self.lm_head.pack()

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """tokens int64 [T], positions in ctx → hidden states after the final norm [T, D]."""
        out: torch.Tensor = self.model(tokens, ctx)
        return out

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] → fp32 [N, vocab]."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()
