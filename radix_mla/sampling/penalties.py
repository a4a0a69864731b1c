"""Changes to the logits that depend on what a sequence holds already, and on its own lists of ids.

Order: repetition, frequency, presence, logit_bias, then the mask of ids that may not end it yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_mla.request import SamplingParams

if TYPE_CHECKING:
    from radix_mla.scheduler.sequence import Sequence

# Large enough to win over any logit, small enough that no sum or quotient of it overflows.
_MAX_BIAS = 1e6
_MIN_REPETITION = 1e-3  # scores divided by less are no numbers any more
_MASKED = np.float32(-1e30)


class PenaltyCounts:
    """Which ids a sequence holds, and how often it generated each. Grows with its tokens."""

    __slots__ = ("_counts", "_generated", "_num_counted", "_prompt_ids", "_slots")

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        self._prompt_ids = np.unique(prompt)
        self._num_counted = len(prompt)
        self._slots: dict[int, int] = {}
        self._generated = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)

    def update(self, tokens: NDArray[np.int32]) -> None:
        """Counts the tokens that are new since the last call. `tokens`: the whole sequence."""
        for token in tokens[self._num_counted :].tolist():
            slot = self._slots.get(token)
            if slot is None:
                slot = self._add(token)
            self._counts[slot] += 1
        self._num_counted = len(tokens)

    def _add(self, token: int) -> int:
        slot = self._slots[token] = len(self._slots)
        if slot == len(self._generated):
            self._generated = np.resize(self._generated, 2 * slot)
            self._counts = np.resize(self._counts, 2 * slot)
        self._generated[slot], self._counts[slot] = token, 0
        return slot

    @property
    def generated(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(distinct generated ids, how often)."""
        num = len(self._slots)
        return self._generated[:num], self._counts[:num]

    @property
    def all_ids(self) -> NDArray[np.int64]:
        """Distinct ids of prompt and output."""
        return np.union1d(self._prompt_ids, self.generated[0])


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def changes_logits(seq: Sequence) -> bool:
    """Whether `adjust` would change anything for the next token of `seq`."""
    params = seq.params
    return bool(params.logit_bias or params.min_tokens > seq.num_generated or has_penalties(params))


def adjust(scores: NDArray[np.float32], seq: Sequence) -> None:
    """Changes fp32 [num_sampleable] scores in place; finite ones stay finite."""
    params = seq.params
    if has_penalties(params):
        _penalise(scores, seq)
    if params.logit_bias:
        ids = _inside(np.fromiter(params.logit_bias, dtype=np.int64), scores)
        bias = np.asarray([params.logit_bias[i] for i in ids.tolist()], dtype=np.float64)
        bias = np.nan_to_num(bias, nan=0.0, posinf=_MAX_BIAS, neginf=-_MAX_BIAS)
        scores[ids] += np.clip(bias, -_MAX_BIAS, _MAX_BIAS).astype(np.float32)
    if seq.num_generated < params.min_tokens and seq.stop_ids:
        scores[_inside(np.fromiter(seq.stop_ids, dtype=np.int64), scores)] = _MASKED


def _penalise(scores: NDArray[np.float32], seq: Sequence) -> None:
    params = seq.params
    if seq.penalty_counts is None:
        seq.penalty_counts = PenaltyCounts(seq.tokens[: seq.num_prompt_tokens])
    counts = seq.penalty_counts
    counts.update(seq.tokens)
    if params.repetition_penalty != 1.0:
        ids = _inside(counts.all_ids, scores)
        held = scores[ids]
        factor = np.float32(max(params.repetition_penalty, _MIN_REPETITION))
        scores[ids] = np.where(held > 0, held / factor, held * factor)
    ids, times = counts.generated
    inside = ids < len(scores)
    scores[ids[inside]] -= np.float32(params.frequency_penalty) * times[inside] + np.float32(
        params.presence_penalty
    )


def _inside(ids: NDArray[np.int64], scores: NDArray[np.float32]) -> NDArray[np.int64]:
    return ids[(ids >= 0) & (ids < len(scores))]
