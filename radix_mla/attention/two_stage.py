"""The non-absorbed forms: KV rows are decompressed to per-head keys and values.

    two-stage   (a) new tokens among themselves, causal
                (b) context in chunks: gather, decompress, attend (not causal), merge in place
    one-shot    prefix and new rows together, one causal call, nothing to merge

Letters: `attention/mla.py`. Values keep the backend's padding until after the last merge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.merge_lse import merge_lse_

if TYPE_CHECKING:
    from radix_mla.attention.context import ForwardContext
    from radix_mla.attention.metadata import LatentWeights
    from radix_mla.attention.plan import OneShotPass, TwoStagePlan
    from radix_mla.attention.workspace import Workspace


def attend_non_absorbed(
    ctx: ForwardContext,
    layer: int,
    plan: TwoStagePlan,
    q: torch.Tensor,
    rows: torch.Tensor,
    weights: LatentWeights,
    scale: float,
) -> torch.Tensor:
    """[t, H, V] of the plan's tokens; q [T, H, P + R], rows [T, L + R] as stored."""
    q = q[plan.tokens]
    k, v = decompress(ctx.workspace, rows[plan.tokens], weights)
    o, lse = ctx.backend.run_mha(plan.new, q, k, v, scale)  # stage (a)
    for part in plan.passes:  # stage (b)
        gathered = ctx.pool.gather(layer, part.slots, ctx.workspace.rows(len(part.slots)))
        k, v = decompress(ctx.workspace, gathered, weights)
        covered = slice(part.first, part.last)
        o_chunk, lse_chunk = ctx.backend.run_mha(part.work, q[covered], k, v, scale)
        merge_lse_(o[covered], lse[covered], o_chunk, lse_chunk)
    return o[..., : weights.w_uv.shape[1]]  # the padding of v falls away here


def attend_one_shot(
    ctx: ForwardContext,
    layer: int,
    part: OneShotPass,
    q: torch.Tensor,
    weights: LatentWeights,
    scale: float,
) -> torch.Tensor:
    """[t, H, V] of the pass's tokens. The step's rows are in the pool. Shapes as above."""
    gathered = ctx.pool.gather(layer, part.slots, ctx.workspace.rows(len(part.slots)))
    k, v = decompress(ctx.workspace, gathered, weights)
    o = ctx.backend.run_mha(part.work, q[part.tokens], k, v, scale).out
    return o[..., : weights.w_uv.shape[1]]


def decompress(
    workspace: Workspace, rows: torch.Tensor, weights: LatentWeights
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [H, n, Dk] = [c_kv · W_UKᵀ | k_pe], v [H, n, Dv] = c_kv · W_UVᵀ, in the workspace.

    rows [n, L + R] in the compute dtype. One batched GEMM a half, straight into its place: only
    k_pe is left to broadcast, nothing is concatenated.
    """
    w_uk, w_uv = weights
    heads, nope, latent = w_uk.shape
    value = w_uv.shape[1]
    num_rows, width = rows.shape
    k, v = workspace.keys(num_rows), workspace.values(num_rows)
    c_kv = rows[:, :latent].expand(heads, num_rows, latent)
    torch.bmm(c_kv, w_uk.transpose(1, 2), out=k[..., :nope])  # [H, n, P]
    _broadcast(k[..., nope : nope + width - latent], rows[:, latent:])  # [H, n, R]
    torch.bmm(c_kv, w_uv.transpose(1, 2), out=v[..., :value])  # [H, n, V]
    return k, v


def _broadcast(target: torch.Tensor, source: torch.Tensor) -> None:
    """target [H, n, R] = source [n, R], each with unit stride in R."""
    wide = 8 // target.itemsize  # a GPU copies with strides element by element: give it wide ones
    if target.is_cuda and source.dtype == target.dtype and _splits(target, source, wide):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def _splits(target: torch.Tensor, source: torch.Tensor, wide: int) -> bool:
    """Whether both can be seen as elements `wide` times as large."""
    places = (target.shape[-1], target.storage_offset(), source.storage_offset())
    return not any(n % wide for n in (*places, *target.stride()[:-1], *source.stride()[:-1]))
