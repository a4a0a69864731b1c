"""Batch: the step being planned; it becomes a StepPlan and what postprocess needs beside it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from radix_mla.engine.step import Chunk, Drawn, StepPlan
from radix_mla.scheduler.budget import MAX_LOGPROB_ROWS

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import PageCopy
    from radix_mla.engine.outputs import TokenLogprobs
    from radix_mla.scheduler.sequence import Sequence


_UNKNOWN = np.zeros(1, dtype=np.int32)


class Work(NamedTuple):
    """One chunk of the plan and whose it is.

    Its logits are rows [first_row, first_row + num_logits) of StepResult.logits; with `samples` the
    last of them is sampled, for position `position` of the sequence. `is_drawn`: its token is what
    the step before this one draws.
    """

    sequence: Sequence
    num_tokens: int
    is_decode: bool
    samples: bool
    first_row: int
    num_logits: int
    position: int
    is_drawn: bool = False


class Sampled(NamedTuple):
    """What came of one chunk's logits.

    token_id: the sampled token, None where none was due. `error` fails the sequence;
    `nonfinite` says that NaN or infinite logits are the cause.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Items[TokenLogprobs] = ()
    error: str | None = None
    nonfinite: bool = False


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A planned step. `work[i]` belongs to `plan.chunks[i]`."""

    plan: StepPlan
    work: list[Work]


class Progress(NamedTuple):
    """Where a sequence stands once the steps that are queued have run: rows, tokens, and which of
    the drawn tokens its last one is (None: it is known).
    """

    num_computed: int
    num_tokens: int
    drawn_row: int | None = None


class _Entry(NamedTuple):
    num_tokens: int
    copies: list[PageCopy]
    progress: Progress


@dataclass(slots=True)
class Batch:
    """Collects the sequences of a step under its token budget, in order.

    `ahead`: new sequences start only with all their tokens; `deferred` says that one did not.
    """

    step_id: int
    tokens_left: int
    ahead: bool = False
    logprob_rows_left: int = MAX_LOGPROB_ROWS
    retracted: bool = False
    deferred: bool = False
    _entries: dict[Sequence, _Entry] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def room(self, seq: Sequence) -> int:
        """How many tokens of `seq` the step's budget can still take."""
        if seq.needs_prompt_logprobs:
            return min(self.tokens_left, self.logprob_rows_left)
        return self.tokens_left

    def add(
        self,
        seq: Sequence,
        num_tokens: int,
        copies: list[PageCopy],
        progress: Progress | None = None,
    ) -> None:
        """Plans the next `num_tokens` of `seq`, whose pages are there. `progress` None: no step of
        it is queued.
        """
        progress = progress or Progress(seq.num_computed, seq.num_tokens)
        self._entries[seq] = _Entry(num_tokens, copies, progress)
        self.tokens_left -= num_tokens
        if seq.needs_prompt_logprobs:
            self.logprob_rows_left -= num_tokens

    def drop(self, seq: Sequence) -> None:
        """Takes a retracted or ended sequence out; its copies are not made."""
        entry = self._entries.pop(seq, None)
        self.tokens_left += entry.num_tokens if entry else 0

    def build(self, page_size: int) -> Scheduled:
        chunks: list[Chunk] = []
        copies: list[PageCopy] = []
        work: list[Work] = []
        drawn: list[tuple[int, int]] = []  # place, row
        first_row = place = 0
        for seq, (num, seq_copies, progress) in self._entries.items():
            assert seq.lease is not None
            start = progress.num_computed
            samples = start + num == progress.num_tokens
            num_logits = num if seq.needs_prompt_logprobs else int(samples)
            is_decode = start >= seq.prefill_target
            is_drawn = progress.drawn_row is not None
            num_pages = -(-(start + num) // page_size)
            chunks.append(
                Chunk(
                    tokens=_UNKNOWN if is_drawn else seq.tokens_at(start, num),
                    start=start,
                    page_table=seq.lease.page_table[:num_pages],
                    num_logits=num_logits,
                    is_decode=is_decode,
                )
            )
            copies += seq_copies
            if progress.drawn_row is not None:
                drawn.append((place, progress.drawn_row))
            position = progress.num_tokens
            work.append(
                Work(seq, num, is_decode, samples, first_row, num_logits, position, is_drawn)
            )
            first_row += num_logits
            place += num
        unknown = Drawn(*np.array(drawn, dtype=np.int64).T) if drawn else None
        return Scheduled(StepPlan(self.step_id, chunks, copies, unknown), work)
