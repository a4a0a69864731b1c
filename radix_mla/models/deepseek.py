"""DeepSeek V2/V3-style decoder: MLA attention, dense or MoE feed-forward. T tokens, D hidden.

Parameter names are the checkpoint's, but for gate and up projections, which are merged, and the
shared experts of a fused model, which are in the stacks of the routed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from kernels.linear_fp32 import linear_fp32
from radix_mla.attention.mla import MLAAttention
from radix_mla.models.hf_config import ModelConfig
from radix_mla.models.layers import Embedding, GatedMLP, Linear, RMSNorm
from radix_mla.models.moe import MoE
from radix_mla.models.rotary import RotaryEmbedding

if TYPE_CHECKING:
    from radix_mla.attention.context import ForwardContext


Turns = tuple[torch.Tensor, torch.Tensor]
_Norm = Callable[[torch.Tensor], torch.Tensor]
_Steps = tuple[
    _Norm,
    Callable[[torch.Tensor, torch.Tensor, Turns, "ForwardContext"], None],
    _Norm,
    Callable[[torch.Tensor, torch.Tensor], None],
]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on the normed residual stream and added to it."""

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fused: bool,
        fp8: bool,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._fused = fused
        self.self_attn = MLAAttention(config, layer_idx, dtype=dtype, device=device, fp8=fp8)
        self.mlp: MoE | GatedMLP = (
            MoE(config, dtype=dtype, device=device, fused=fused, fp8=fp8)
            if config.is_moe_layer(layer_idx)
            else GatedMLP(hidden, config.intermediate_size, dtype=dtype, device=device, fp8=fp8)
        )
        self.input_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps, dtype=dtype, device=device)

        self._steps: _Steps | None = None

    def finalize(self) -> None:
        """Called once, after loading."""
        self.self_attn.finalize()
        self.mlp.finalize()
        self.input_layernorm.finalize()
        self.post_attention_layernorm.finalize()
        # Bound methods: a decode step is made of small calls, and `nn.Module` doubles their price.
        self._steps = (
            self.input_layernorm.forward,
            self.self_attn.add_to_fused if self._fused else self.self_attn.add_to,
            self.post_attention_layernorm.forward,
            self.mlp.add_to,
        )

    def forward(self, hidden: torch.Tensor, turns: Turns, ctx: ForwardContext) -> None:
        """hidden [T, D], changed in place."""
        assert self._steps is not None, "finalize() was not called after loading"
        attention_norm, attention, mlp_norm, mlp = self._steps
        attention(hidden, attention_norm(hidden), turns, ctx)
        mlp(hidden, mlp_norm(hidden))


class DeepseekModel(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fused: bool,
        fp8: bool,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer_idx, dtype=dtype, device=device, fused=fused, fp8=fp8)
            for layer_idx in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.rotary_emb = RotaryEmbedding(config, device=device, tables=fused)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        return (cast(DecoderLayer, layer) for layer in self.layers)

    def forward(self, tokens: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        turns = self.rotary_emb.turns(ctx.positions)
        hidden = self.embed_tokens(tokens)  # [T, D]
        for layer in self.decoder_layers():
            layer.forward(hidden, turns, ctx)
        out: torch.Tensor = self.norm(hidden)
        return out


class DeepseekForCausalLM(nn.Module):
    """The served model; `load_model` makes one with its weights. For inference only.

    `fused`: the GPU's form of the layers; default: on a GPU. `fp8`: FP8 checkpoints stay FP8 in
    memory; default: on a GPU that multiplies e4m3, in bf16. A fused forward asks nothing of the
    host and has no shape that depends on data: a CUDA graph can hold it, if the attention can.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fused: bool | None = None,
        fp8: bool | None = None,
    ) -> None:
        super().__init__()
        if fused is None:
            fused = torch.device(device).type == "cuda"
        fp8 = config.fp8 and (_keeps_fp8(device, dtype) if fp8 is None else fp8)
        self.config = config
        self._fused = fused
        self.model = DeepseekModel(config, dtype=dtype, device=device, fused=fused, fp8=fp8)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype, device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def finalize(self) -> None:
        """Called once, after loading: absorbs and packs weights."""
        for layer in self.model.decoder_layers():
            layer.finalize()
        self.model.norm.finalize()
        if not self._fused:
            self.lm_head.pack()

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """tokens int64 [T], positions in ctx → hidden states after the final norm [T, D]."""
        out: torch.Tensor = self.model(tokens, ctx)
        return out

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] → fp32 [N, vocab]."""
        if self._fused:
            return linear_fp32(hidden, self.lm_head.weight)
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()


def _keeps_fp8(device: torch.device | str, dtype: torch.dtype) -> bool:
    device = torch.device(device)
    if device.type != "cuda" or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
