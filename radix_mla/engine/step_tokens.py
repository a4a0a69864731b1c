"""`StepTokens`: a step's token ids, some of which the step before it is still drawing."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from radix_mla.upload import to_device

if TYPE_CHECKING:
    import torch

    from radix_mla.engine.step import StepPlan


class StepTokens(NamedTuple):
    """known: int64 [T], on the host; where it means nothing, `places` int64 [N] say so, and the ids
    are `drawn` int64 [N], on the device.
    """

    known: np.ndarray
    places: np.ndarray | None = None
    drawn: torch.Tensor | None = None

    @classmethod
    def of(cls, plan: StepPlan, drawn: torch.Tensor | None) -> Self:
        """drawn: int64, what the step before `plan` draws."""
        if plan.drawn is None:
            return cls(_known(plan))
        assert drawn is not None, "a step planned ahead needs the tokens that are drawn"
        places, rows = plan.drawn
        is_decode = len(places) == len(plan.chunks)  # a drawn token is its chunk's only one
        known = np.zeros(len(places), dtype=np.int64) if is_decode else _known(plan)
        if not np.array_equal(rows, np.arange(len(drawn))):  # not all, or in another order
            drawn = drawn.index_select(0, to_device(rows, drawn.device))
        return cls(known, places, drawn)

    def draw_into(self, ids: torch.Tensor) -> None:
        """Puts the drawn ones where they belong in ids int64 [at least T]; waits for nothing."""
        if self.drawn is None or self.places is None:
            return
        if len(self.places) == len(self.known):
            ids[: len(self.known)].copy_(self.drawn)
        else:
            ids.index_copy_(0, to_device(self.places, ids.device), self.drawn)


def _known(plan: StepPlan) -> np.ndarray:
    return np.concatenate([chunk.tokens for chunk in plan.chunks]).astype(np.int64)
