"""The absorbed form: W_UK moves to the queries, so that they meet the KV rows as they are stored.

Letters: `attention/mla.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from radix_mla.attention.context import ForwardContext
    from radix_mla.attention.metadata import LatentWeights
    from radix_mla.attention.plan import AbsorbedPlan


def attend_absorbed(
    ctx: ForwardContext,
    layer: int,
    plan: AbsorbedPlan,
    q: torch.Tensor,
    weights: LatentWeights,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Fills out[plan.tokens]; q [T, H, P + R], out [T, H, V]. The step's rows are in the pool."""
    w_uk, w_uv = weights
    nope, latent = w_uk.shape[1:]
    q = q[plan.tokens]
    q_abs = ctx.workspace.absorbed_queries(q.shape[0])  # [t, H, L + R]
    q_nope = q[..., :nope].transpose(0, 1)  # [H, t, P]
    torch.bmm(q_nope, w_uk, out=q_abs[..., :latent].transpose(0, 1))
    q_abs[..., latent:] = q[..., nope:]
    o_latent = ctx.backend.run_mqa(
        plan.work, q_abs, ctx.pool.layer(layer), ctx.workspace.rows(), latent, scale
    ).out  # [t, H, L]
    if isinstance(plan.tokens, slice):
        target = out[plan.tokens].transpose(0, 1)  # [H, t, V]
        torch.bmm(o_latent.transpose(0, 1), w_uv.transpose(1, 2), out=target)
    else:
        out[plan.tokens] = torch.bmm(o_latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
