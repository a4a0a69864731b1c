"""Sequence: one continuation of one prompt, its tokens, its counters and its only state machine.

tokens:  |---- num_cached ----|-- computed by us --|-- to compute --|-- to be sampled --|
         |<------------ num_computed ------------>|                |
         |<----------------------- num_tokens -------------------->|
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_mla.cache.retention import Retention
from radix_mla.request import FinishReason, Request, SamplingParams

if TYPE_CHECKING:
    from radix_mla.cache.lease import Lease
    from radix_mla.engine.outputs import TokenLogprobs
    from radix_mla.sampling.constraint import Constraint
    from radix_mla.sampling.penalties import PenaltyCounts

_SPARE_TOKENS = 256


class Status(StrEnum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


# WAITING again is a retraction. Each of the last three is reached once and never left.
_NEXT: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.RUNNING, Status.FINISHED, Status.ABORTED, Status.FAILED}),
    Status.RUNNING: frozenset({Status.WAITING, Status.FINISHED, Status.ABORTED, Status.FAILED}),
    Status.FINISHED: frozenset(),
    Status.ABORTED: frozenset(),
    Status.FAILED: frozenset(),
}

_TERMINAL = {FinishReason.ABORT: Status.ABORTED, FinishReason.ERROR: Status.FAILED}


class WaitReason(StrEnum):
    """Why a waiting sequence was not admitted; the values are the ones of /metrics."""

    SLOTS = "slots"
    BUDGET = "budget"
    SIBLING = "sibling"
    GRAMMAR = "grammar"


class Sequence:
    """State of one choice of one request. Only the scheduler changes it.

    `order` is the place in the line of arrivals, unique, kept through retractions. A sequence holds
    a lease exactly while it is RUNNING.
    """

    __slots__ = (
        "_buffer",
        "constraint",
        "effective_priority",
        "index",
        "leader",
        "lease",
        "max_num_tokens",
        "namespace",
        "num_cached",
        "num_computed",
        "num_in_common",
        "num_prompt_tokens",
        "num_retractions",
        "num_rows_ever",
        "num_skips",
        "num_tokens",
        "order",
        "params",
        "penalty_counts",
        "prefill_target",
        "prompt_logprobs",
        "request",
        "retention",
        "sibling_since_s",
        "status",
        "stop_ids",
        "was_admitted",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        namespace: str,
        order: int,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        params = request.params
        prompt = request.prompt_tokens
        self.request = request
        self.index = index
        self.params: SamplingParams = params
        self.namespace = namespace
        self.retention = Retention.of(request.cache_priority, request.cache_ttl_s)
        self.order = order
        self.effective_priority = request.priority
        self.status = Status.WAITING
        self._buffer = np.empty(len(prompt) + min(params.max_tokens, _SPARE_TOKENS), dtype=np.int32)
        self._buffer[: len(prompt)] = prompt
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(prompt)
        self.max_num_tokens = len(prompt) + params.max_tokens
        stop_ids = frozenset(params.stop_token_ids)
        # With a grammar the end is its last token, whatever ignore_eos says: nothing can follow it.
        ends_at_eos = not params.ignore_eos or params.grammar is not None
        self.stop_ids = stop_ids | eos_ids if ends_at_eos else stop_ids
        self.constraint: Constraint | None = None  # of params.grammar, once it is compiled
        # Rows: reused at this admission; present; the most that ever were.
        self.num_cached = 0
        self.num_computed = 0
        self.num_rows_ever = 0
        self.prefill_target = len(prompt)
        self.lease: Lease | None = None
        self.num_retractions = 0
        self.was_admitted = False
        self.num_skips = 0
        # Waiting for another sequence to compute a common prefix.
        self.leader: Sequence | None = None
        self.num_in_common = 0
        self.sibling_since_s: float | None = None
        wants_prompt = params.prompt_logprobs is not None and index == 0
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None
        self.penalty_counts: PenaltyCounts | None = None  # made by the sampler when it is needed

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [num_tokens], prompt and generated; a view."""
        return self._buffer[: self.num_tokens]

    @property
    def num_generated(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_remaining(self) -> int:
        """Tokens whose rows are missing."""
        return self.num_tokens - self.num_computed

    @property
    def is_running(self) -> bool:
        return self.status is Status.RUNNING

    @property
    def is_waiting(self) -> bool:
        return self.status is Status.WAITING

    @property
    def awaits_grammar(self) -> bool:
        """Its grammar is still being compiled."""
        return self.params.grammar is not None and self.constraint is None

    @property
    def has_ended(self) -> bool:
        return not _NEXT[self.status]

    @property
    def is_prefilling(self) -> bool:
        """Rows are missing of the prompt, or of what was generated before a retraction."""
        return self.num_computed < self.prefill_target

    @property
    def sunk_work(self) -> int:
        """Rows computed since the last admission."""
        return self.num_computed - self.num_cached

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Some of the prompt's logprobs are still to be computed."""
        return (
            self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens
        )

    @property
    def lookup_limit(self) -> int:
        """How many tokens may come from the cache: the last one's logits are always needed.

        Prompt logprobs need the logits of every prompt token that has none yet.
        """
        if self.prompt_logprobs is not None and self.needs_prompt_logprobs:
            return len(self.prompt_logprobs) - 1
        return self.num_tokens - 1

    def tokens_at(self, start: int, num: int) -> NDArray[np.int32]:
        """Tokens [start, start + num); a view."""
        return self._buffer[start : start + num]

    def prompt_targets(self, num: int) -> NDArray[np.int32]:
        """The prompt tokens that the next `num` tokens' logits predict; a view."""
        first = self.num_computed + 1
        return self._buffer[first : min(first + num, self.num_prompt_tokens)]

    def move_to(self, status: Status) -> None:
        """The one transition. Raises RuntimeError for one that is not in the table."""
        if status not in _NEXT[self.status]:
            raise RuntimeError(
                f"sequence {self.request_id}/{self.index}: {self.status} -> {status}"
            )
        self.status = status

    def end(self, reason: FinishReason) -> None:
        """To the terminal state that `reason` means."""
        self.move_to(_TERMINAL.get(reason, Status.FINISHED))

    def admit(self, lease: Lease) -> None:
        """To RUNNING with `lease`, whose cached rows count as computed."""
        self.move_to(Status.RUNNING)
        self.lease = lease
        self.num_cached = self.num_computed = lease.num_cached
        self.prefill_target = self.num_tokens
        self.leader, self.num_in_common, self.sibling_since_s = None, 0, None
        self.num_skips = 0

    def retract(self) -> None:
        """Back to WAITING; the rows are gone, the tokens stay."""
        self.move_to(Status.WAITING)
        self.lease = None
        self.num_cached = self.num_computed = 0
        self.num_retractions += 1

    def advance(self, num: int) -> int:
        """Counts `num` new rows; returns how many are the prompt's and new for the first time."""
        known = max(self.num_computed, self.num_rows_ever)
        self.num_computed += num
        self.num_rows_ever = max(self.num_rows_ever, self.num_computed)
        return max(0, min(self.num_computed, self.num_prompt_tokens) - known)

    def add_prompt_logprobs(self, first: int, entries: Items[TokenLogprobs]) -> None:
        """Logprobs of prompt tokens [first, first + len(entries)); known ones are not repeated."""
        if self.prompt_logprobs is not None:
            self.prompt_logprobs.extend(entries[max(0, len(self.prompt_logprobs) - first) :])

    def append(self, token_id: int) -> FinishReason | None:
        """Adds a sampled token; returns why the sequence ends with it, if it does."""
        if self.num_tokens == len(self._buffer):
            room = min(self.max_num_tokens, len(self._buffer) * 2)
            grown = np.empty(max(room, self.num_tokens + 1), dtype=np.int32)
            grown[: self.num_tokens] = self._buffer
            self._buffer = grown
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        if token_id in self.stop_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.max_num_tokens:
            return FinishReason.LENGTH
        return None
