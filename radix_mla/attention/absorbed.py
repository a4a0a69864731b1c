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
    _, nope, latent = w_uk.shape
    tokens = plan.tokens
    whole = isinstance(tokens, slice) and tokens.stop - tokens.start == q.shape[0]
    if not whole:
        q = q[tokens]
    q_abs, of_latent, of_rope = ctx.workspace.absorbed_views(q.shape[0])
    q_nope = q[..., :nope].transpose(0, 1)  # [H, t, P]
    if q.is_cuda:
        torch.bmm(q_nope, w_uk, out=of_latent)
    else:  # with such a result bmm falls back to one GEMM a head there
        of_latent.copy_(torch.bmm(q_nope, w_uk))
    of_rope.copy_(q[..., nope:])
    o_latent = ctx.backend.run_mqa(
        plan.work, q_abs, ctx.pool.layer(layer), ctx.workspace.rows(), latent, scale
    ).out  # [t, H, L]
    if isinstance(tokens, slice):
        target = (out if whole else out[tokens]).transpose(0, 1)  # [H, t, V]
        torch.bmm(o_latent.transpose(0, 1), w_uv.transpose(1, 2), out=target)
    else:
        out[tokens] = torch.bmm(o_latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
