"""Batch: the step being planned; it becomes a StepPlan and what postprocess needs beside it."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.scheduler.budget import MAX_LOGPROB_ROWS

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import PageCopy
    from radix_mla.engine.outputs import TokenLogprobs
    from radix_mla.scheduler.sequence import Sequence


class Work(NamedTuple):
    """One chunk of the plan and whose it is.

    Its logits are rows [first_row, first_row + num_logits) of StepResult.logits; with `samples` the
    last of them is sampled.
    """

    sequence: Sequence
    num_tokens: int
    is_decode: bool
    samples: bool
    first_row: int
    num_logits: int


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


@dataclass(slots=True)
class Batch:
    """Collects the sequences of a step under its token budget, in order."""

    step_id: int
    tokens_left: int
    logprob_rows_left: int = MAX_LOGPROB_ROWS
    retracted: bool = False
    _entries: dict[Sequence, tuple[int, list[PageCopy]]] = field(default_factory=dict)

    def room(self, seq: Sequence) -> int:
        """How many tokens of `seq` the step's budget can still take."""
        if seq.needs_prompt_logprobs:
            return min(self.tokens_left, self.logprob_rows_left)
        return self.tokens_left

    def add(self, seq: Sequence, num_tokens: int, copies: list[PageCopy]) -> None:
        """Plans the next `num_tokens` of `seq`, whose pages are there."""
        self._entries[seq] = (num_tokens, copies)
        self.tokens_left -= num_tokens
        if seq.needs_prompt_logprobs:
            self.logprob_rows_left -= num_tokens

    def drop(self, seq: Sequence) -> None:
        """Takes a retracted or ended sequence out; its copies are not made."""
        num_tokens, _ = self._entries.pop(seq, (0, []))
        self.tokens_left += num_tokens

    def build(self, page_size: int) -> Scheduled:
        chunks: list[Chunk] = []
        copies: list[PageCopy] = []
        work: list[Work] = []
        first_row = 0
        for seq, (num, seq_copies) in self._entries.items():
            assert seq.lease is not None
            start = seq.num_computed
            samples = start + num == seq.num_tokens
            num_logits = num if seq.needs_prompt_logprobs else int(samples)
            is_decode = not seq.is_prefilling
            num_pages = -(-(start + num) // page_size)
            chunks.append(
                Chunk(
                    tokens=seq.scheduled_tokens(num),
                    start=start,
                    page_table=seq.lease.page_table[:num_pages],
                    num_logits=num_logits,
                    is_decode=is_decode,
                )
            )
            copies += seq_copies
            work.append(Work(seq, num, is_decode, samples, first_row, num_logits))
            first_row += num_logits
        return Scheduled(StepPlan(self.step_id, chunks, copies), work)
