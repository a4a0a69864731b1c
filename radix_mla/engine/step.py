"""What the scheduler asks of the model runner in one step, and what comes back.

schedule ─ StepPlan ─► run ─ StepResult ─► postprocess
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from radix_mla.cache.prefix_cache import PageCopy


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's tokens in a step: positions [start, start + len(tokens)).

    tokens: int32 [num]; page_table: int32 [ceil((start + num) / page_size)], pages of rows
    [0, start + num); rows [0, start) exist already. `num_logits`: how many of the chunk's last
    tokens need logits (0: a chunk before the prompt's end; 1: sampled; num: prompt logprobs).
    `is_decode`: exactly one token that was sampled by the previous step.
    """

    tokens: np.ndarray
    start: int
    page_table: np.ndarray
    num_logits: int
    is_decode: bool


class Drawn(NamedTuple):
    """Tokens that are not known yet: those at `places` int64 [N] of the step's T tokens are rows
    `rows` int64 [N] of what the step before it draws.
    """

    places: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `copies` run first, in order; then all chunks in one ragged batch.

    `drawn`: for a step that was planned ahead; what the chunks hold there means nothing.
    """

    step_id: int
    chunks: list[Chunk]
    copies: list[PageCopy]
    drawn: Drawn | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


class StepResult:
    """What a forward pass left.

    logits: fp32 [sum of num_logits, vocab], in chunk order (CPU or device). `paths` counts tokens
    an attention path. On a GPU the step may still run: `rows_finite` and `forward_s` wait for it.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        rows_finite: np.ndarray | Callable[[], np.ndarray],
        paths: dict[str, int],
        num_context_chunks: int,
        forward_s: float | Callable[[], float],
    ) -> None:
        self.logits = logits
        self.paths = paths
        self.num_context_chunks = num_context_chunks
        self._rows_finite = rows_finite
        self._forward_s = forward_s

    @cached_property
    def rows_finite(self) -> np.ndarray:
        """bool [num chunks]; False where a chunk wrote a non-finite KV row: that sequence must fail
        and its rows must not be committed.
        """
        known = self._rows_finite
        return known() if callable(known) else known

    @cached_property
    def forward_s(self) -> float:
        """Seconds that the device took."""
        known = self._forward_s
        return known() if callable(known) else known
