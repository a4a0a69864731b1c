"""Multi-head latent attention: one KV row a token, two ways to attend to it.

    T    new tokens of the step            D    hidden size
    Sq   new tokens of a sequence          Sk   its context: rows that exist already
    H    heads                             Lq   rank of the query projection (None: a full q_proj)
    L    kv_lora_rank, the latent c_kv     R    qk_rope_head_dim, one rope head for all heads
    P    qk_nope_head_dim                  V    v_head_dim

    W_DKV = kv_a_proj_with_mqa [L + R, D]     c_kv | k_pe = h · W_DKVᵀ
    W_UK  = kv_b_proj [H, P + V, L][:, :P]    k_nope = c_kv · W_UKᵀ, per head
    W_UV  = kv_b_proj [H, P + V, L][:, P:]    v = c_kv · W_UVᵀ, per head: not two halves
    scale = (P + R)^-0.5 · mscale², whatever the form

Every step, for every new token:

    q_nope [H, P], q_pe [H, R] = rope(q_proj(h) or q_b_proj(norm(q_a_proj(h))))
    row [L + R] = [norm(c_kv) | rope(k_pe)], rounded as stored, written to the pool
    o_proj(attention over the sequence's rows)

The stored row is the token's whole KV; new tokens attend to each other's rows as they were stored,
with the bits that a later hit reads.

Non-absorbed (prefill; compute-bound), q [Sq, H, P + R]:

    (a) k, v = decompress(new rows)          k = [c_kv · W_UKᵀ | k_pe] [n, H, P + R], v [n, H, V]
        o, lse = attention(q, k, v, causal)
    (b) for each chunk of the Sk context rows that fits the workspace:
        k, v = decompress(gather(rows))
        o, lse = merge(o, lse, attention(q, k, v, not causal))

    One-shot: (a) over [context | new] at once, when Sk + Sq rows fit the workspace.

Absorbed (decode, and extends of few tokens; memory-bound), every head reads the same rows:

    q' = [q_nope · W_UK | q_pe]              [Sq, H, L + R]
    o_latent = attention(q', rows, rows[:, :L], causal at the end)      [Sq, H, L]
    o = o_latent · W_UVᵀ                     [Sq, H, V]

Both are the same sum: (q_nope · W_UK) · c_kv = q_nope · (W_UK · c_kv).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from kernels.latent_write import norm_rope_write_
from kernels.rope import rotate_
from radix_mla.attention.metadata import LatentWeights
from radix_mla.attention.workspace import MLADims
from radix_mla.models.layers import Linear, RMSNorm, fuse

if TYPE_CHECKING:
    from radix_mla.attention.context import ForwardContext
    from radix_mla.models.hf_config import ModelConfig
    from radix_mla.models.packed import PlainWeight


def mla_dims(config: ModelConfig) -> MLADims:
    """The widths of the model's attention layers."""
    return MLADims(
        num_heads=config.num_attention_heads,
        latent=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
    )


class MLAAttention(nn.Module):
    """One attention layer; parameters named as in the checkpoint. Call `finalize` after loading.

    `add_to` is the CPU's form, `add_to_fused` the GPU's: norm, rotation and row write in one.
    With `fp8` the projections stay FP8, but for kv_b_proj: absorption multiplies by its parts.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer_idx: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fp8: bool = False,
    ) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.dims = dims = mla_dims(config)
        self.scale = config.softmax_scale
        hidden, heads, bias = config.hidden_size, dims.num_heads, config.attention_bias

        def linear(fan_in: int, fan_out: int, *, bias: bool = False, fp8: bool = fp8) -> Linear:
            return Linear(fan_in, fan_out, bias=bias, dtype=dtype, device=device, fp8=fp8)

        # Rope rows that the loader reorders would leave their blocks' scales behind.
        turned = fp8 and config.rope_interleave
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * dims.qk, fp8=turned)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, dtype=dtype, device=device)
            self.q_b_proj = linear(config.q_lora_rank, heads * dims.qk, fp8=turned)
        self.kv_a_proj_with_mqa = linear(hidden, dims.row, bias=bias, fp8=turned)
        self.kv_a_layernorm = RMSNorm(dims.latent, dtype=dtype, device=device)
        self.kv_b_proj = linear(dims.latent, heads * (dims.nope + dims.value), fp8=False)
        self.o_proj = linear(heads * dims.value, hidden, bias=bias)
        self._has_q_lora = config.q_lora_rank is not None
        self._weights: LatentWeights | None = None
        self._q_up: tuple[Callable[[torch.Tensor], torch.Tensor], PlainWeight] | None = None

    def finalize(self) -> None:
        """Packs the projections; those that read the hidden state become one.

        W_UK and W_UV are cut out of kv_b_proj as views: its weight must stay.
        """
        dims = self.dims
        per_head = self.kv_b_proj.weight.view(dims.num_heads, dims.nope + dims.value, dims.latent)
        self._weights = LatentWeights(per_head[:, : dims.nope], per_head[:, dims.nope :])
        first = self.q_a_proj if self._has_q_lora else self.q_proj
        self._q_width = first.weight.shape[0]
        self._down = fuse([first, self.kv_a_proj_with_mqa])
        self._out = self.o_proj.plain()
        self.kv_a_layernorm.finalize()
        self._norm_latent_ = self.kv_a_layernorm.apply_
        self._latent_norm = (self.kv_a_layernorm.weight.detach(), self.kv_a_layernorm.eps)
        if self._has_q_lora:
            self.q_a_layernorm.finalize()
            self._q_up = (self.q_a_layernorm.forward, self.q_b_proj.plain())

    def add_to(
        self,
        out: torch.Tensor,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        ctx: ForwardContext,
    ) -> None:
        """out [T, D] += attention of hidden [T, D]; `turns` of ctx.positions."""
        dims = self.dims
        q, rows = self._project(hidden)
        turn_rows, turn_heads = turns
        rotate_(q[..., dims.nope :], turn_heads)
        rotate_(rows[:, dims.latent :], turn_rows)
        self._norm_latent_(rows[:, : dims.latent])
        rows = ctx.write(self.layer_idx, rows)
        self._attend(out, q, rows, ctx)

    def add_to_fused(
        self,
        out: torch.Tensor,
        hidden: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
        ctx: ForwardContext,
    ) -> None:
        """As `add_to`; `turns` are cos and sin of ctx.positions, fp32 [T, R/2]."""
        dims = self.dims
        q, rows = self._project(hidden)
        weight, eps = self._latent_norm
        cos, sin = turns
        norm_rope_write_(
            rows,
            q[..., dims.nope :],
            weight,
            eps,
            cos,
            sin,
            ctx.pool.layer(self.layer_idx),
            ctx.slots,
        )
        self._attend(out, q, rows, ctx)

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(q [T, H, P + R], rows [T, L + R]) of hidden [T, D], not rotated and rows not normed."""
        assert self._weights is not None, "finalize() was not called after loading"
        down = self._down(hidden)
        q, rows = down[:, : self._q_width], down[:, self._q_width :]
        if self._q_up is not None:
            norm, q_b = self._q_up
            q = q_b(norm(q))
        return q.view(len(hidden), self.dims.num_heads, self.dims.qk), rows

    def _attend(
        self, out: torch.Tensor, q: torch.Tensor, rows: torch.Tensor, ctx: ForwardContext
    ) -> None:
        """out [T, D] += the output projection of q's attention; `rows` as they are stored."""
        assert self._weights is not None
        o = ctx.attend(self.layer_idx, q, rows, self._weights, self.scale)  # [T, H, V]
        self._out.add_to(out, o.view(len(o), -1))
