"""`ForwardContext`: what a layer can ask of its step: store rows, attend. Nothing global."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from radix_mla.attention.absorbed import attend_absorbed
from radix_mla.attention.two_stage import attend_non_absorbed, attend_one_shot

if TYPE_CHECKING:
    from radix_mla.attention.backend import AttentionBackend
    from radix_mla.attention.metadata import LatentWeights
    from radix_mla.attention.plan import AttentionPlan, TokenSet
    from radix_mla.attention.workspace import Workspace
    from radix_mla.cache.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Frozen for the step and given to every layer. positions, slots int64 [T] on the device.

    `first_slot`: slots are first_slot, first_slot + 1, ...; None where they are not.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    plan: AttentionPlan
    pool: KVPool
    workspace: Workspace
    backend: AttentionBackend
    first_slot: int | None = None

    def write(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Stores the new tokens' rows [T, L + R]; returns them as stored, in their own dtype."""
        if self.first_slot is None:
            self.pool.write(layer, self.slots, rows)
        else:
            self.pool.write_run(layer, self.first_slot, rows)
        return self.pool.layout.as_stored(rows)

    def attend(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, weights: LatentWeights, scale: float
    ) -> torch.Tensor:
        """Attention of every new token to its context and the new tokens up to itself.

        q [T, H, P + R], rope applied; rows [T, L + R] from `write`. Returns [T, H, V].
        """
        plan, num_tokens = self.plan, q.shape[0]
        if plan.non_absorbed is not None and _is_whole(plan.non_absorbed.tokens, num_tokens):
            two_stage = plan.non_absorbed
            return attend_non_absorbed(self, layer, two_stage, q, rows, weights, scale).contiguous()
        shape = (num_tokens, q.shape[1], weights.w_uv.shape[1])
        out = torch.empty(shape, dtype=q.dtype, device=q.device)  # [T, H, V]
        if plan.absorbed is not None:
            attend_absorbed(self, layer, plan.absorbed, q, weights, scale, out)
        if plan.non_absorbed is not None:
            out[plan.non_absorbed.tokens] = attend_non_absorbed(
                self, layer, plan.non_absorbed, q, rows, weights, scale
            )
        for part in plan.one_shot.passes if plan.one_shot is not None else ():
            o = attend_one_shot(self, layer, part, q, weights, scale)
            if _is_whole(part.tokens, num_tokens):
                return o.contiguous()
            out[part.tokens] = o
        return out


def _is_whole(tokens: TokenSet, num_tokens: int) -> bool:
    """Whether `tokens` are all of the step, in order."""
    return isinstance(tokens, slice) and tokens.stop - tokens.start == num_tokens
