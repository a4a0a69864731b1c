"""Scheduler: plans each step and books what came of it.

    schedule ─ Scheduled ─► run, sample ─► postprocess

A step holds running decodes first, then prefill chunks of running sequences, then of newly admitted
ones, under one token budget. No torch, no clock, no logging: time comes in as an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_mla.errors import ContextOverflow, InvalidRequest, NoSpace
from radix_mla.request import FinishReason, Request
from radix_mla.scheduler.admission import Admission
from radix_mla.scheduler.ahead import MAX_AHEAD_TOKENS, plan_ahead
from radix_mla.scheduler.batch import Batch, Sampled, Scheduled, Work
from radix_mla.scheduler.budget import GrowthReserve, Limits
from radix_mla.scheduler.lifecycle import Counters, Events, Lifecycle
from radix_mla.scheduler.policy import SchedulePolicy
from radix_mla.scheduler.sequence import Sequence, WaitReason

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import PrefixCache
    from radix_mla.sampling.constraint import Constraint


class Scheduler:
    """The one owner of request state."""

    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        policy: SchedulePolicy,
        *,
        eos_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.limits = limits
        self._cache = cache
        self._eos_ids = eos_ids
        self._reserve = GrowthReserve(limits)
        self._life = Lifecycle(cache, store=limits.enable_prefix_cache)
        self._admission = Admission(cache, limits, policy, self._reserve, self._life)
        self._step_id = 0
        self._deferred = False

    # -- requests

    def add(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, or ContextOverflow naming the real limit."""
        num_prompt, params = len(request.prompt_tokens), request.params
        if not num_prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        if params.max_tokens < 1 or request.n < 1:
            raise InvalidRequest("max_tokens and n must be at least 1", param="max_tokens")
        limits = self.limits
        if num_prompt > limits.max_prompt_tokens:
            limit = min(limits.max_model_len, limits.max_prompt_tokens + 1)
            raise ContextOverflow(limit=limit, prompt=num_prompt, completion=params.max_tokens)
        if num_prompt + params.max_tokens > limits.max_model_len:
            raise ContextOverflow(
                limit=limits.max_model_len, prompt=num_prompt, completion=params.max_tokens
            )
        self._life.add(request, self._eos_ids)

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a request's open choices, or one of them; unknown ids are ignored."""
        for seq in self._life.choices(request_id):
            if index is None or seq.index == index:
                self._life.abort(seq, reason)

    def constrain(self, request_id: str, make: Callable[[], Constraint]) -> None:
        """A request's grammar is compiled: each of its open choices gets a constraint.

        Until then they wait. Unknown ids are ignored.
        """
        for seq in self._life.choices(request_id):
            self._life.constrain(seq, make())

    def reject(self, request_id: str, error: BaseException) -> None:
        """Ends a request's open choices with an error; unknown ids are ignored."""
        for seq in self._life.choices(request_id):
            self._life.fail(seq, error)

    @property
    def has_work(self) -> bool:
        return not self._life.is_empty

    @property
    def running(self) -> list[Sequence]:
        """In order of admission; not to be changed."""
        return self._life.running

    @property
    def waiting(self) -> list[Sequence]:
        """In order of arrival; not to be changed."""
        return self._life.waiting

    @property
    def counters(self) -> Counters:
        return self._life.counters

    @property
    def waiting_tokens(self) -> int:
        return self._life.waiting_tokens

    def num_waiting(self) -> dict[str, int]:
        """By reason; what the last scan did not reach waits for what stopped the scan."""
        num_ready = self._life.num_waiting - self._life.num_compiling
        siblings = min(self._admission.num_siblings, num_ready)
        counts = dict.fromkeys((reason.value for reason in WaitReason), 0)
        counts[WaitReason.GRAMMAR.value] = self._life.num_compiling
        counts[WaitReason.SIBLING.value] = siblings
        counts[self._admission.blocked_by.value] += num_ready - siblings
        return counts

    def take_events(self) -> Events:
        """What happened since the last call."""
        return self._life.take_events()

    # -- a step

    def schedule(self, now: float) -> Scheduled:
        """Plans the next step. An empty plan means that there is nothing to do."""
        self._cache.set_time(now)
        self._step_id += 1
        self._deferred = False  # this step has room for all that a batch can hold
        batch = Batch(self._step_id, self.limits.max_num_batched_tokens)
        self._plan_running(batch)
        if not batch.retracted:
            self._admission.scan(batch, now)
        self._reserve.after_step(retracted=batch.retracted)
        return batch.build(self.limits.page_size)

    def schedule_ahead(self, running: Scheduled, now: float) -> Scheduled | None:
        """Plans the step after `running`, whose tokens are not there yet, or says that it cannot.

        To be called before `running` is booked, and run after it; see `ahead.py`.
        """
        if self._deferred:  # somebody waits for a step with room for a longer prompt
            return None
        self._cache.set_time(now)
        limits = self.limits
        room = min(limits.max_num_batched_tokens, max(MAX_AHEAD_TOKENS, limits.max_num_seqs))
        batch = Batch(self._step_id + 1, room, ahead=True)
        if not plan_ahead(batch, self.running, running, self._cache):
            return None
        self._admission.scan(batch, now)
        self._deferred = batch.deferred
        if batch.is_empty:
            return None
        self._step_id += 1
        self._reserve.after_step(retracted=False)
        return batch.build(limits.page_size)

    def _plan_running(self, batch: Batch) -> None:
        decodes = [seq for seq in self.running if not seq.is_prefilling]
        prefills = [seq for seq in self.running if seq.is_prefilling]
        # The budget holds all decodes: one is admitted only with a token left beside the others'.
        for seq in decodes:
            self._plan(batch, seq, 1)
        for seq in sorted(prefills, key=lambda seq: (seq.effective_priority, seq.order)):
            num = min(batch.room(seq), seq.num_remaining)
            if num > 0:
                self._plan(batch, seq, num)

    def _plan(self, batch: Batch, seq: Sequence, num: int) -> None:
        """Adds `seq` to the batch, retracting others, or itself, while there is no page for it."""
        while seq.is_running:
            assert seq.lease is not None
            try:
                copies = self._cache.grow(seq.lease, seq.num_computed + num)
            except NoSpace:
                self._make_room(batch, seq)
            except Exception as error:
                self._life.fail(seq, error)
            else:
                batch.add(seq, num, copies)
                return

    def _make_room(self, batch: Batch, seq: Sequence) -> None:
        """Retracts the running sequence with the least sunk work, never the oldest.

        With nobody beside it, `seq` has outgrown the pool and ends.
        """
        running = self.running
        if len(running) == 1:
            self._life.end(seq, FinishReason.LENGTH)
            return
        oldest = min(running, key=lambda other: other.order)
        # None of them is at max_retractions: admission lets such a one run only where all worst
        # cases fit together, and then there is always room.
        victim = min(
            (other for other in running if other is not oldest),
            key=lambda other: (-other.effective_priority, other.sunk_work, -other.order),
        )
        self._life.retract(victim)
        batch.drop(victim)
        batch.retracted = True

    # -- what came of it

    def postprocess(
        self, scheduled: Scheduled, rows_finite: NDArray[np.bool_], sampled: Items[Sampled]
    ) -> None:
        """Books a step that ran: commits rows, appends tokens, ends sequences.

        rows_finite: bool [num chunks]; sampled: one for each chunk.
        """
        for work, is_finite, sample in zip(scheduled.work, rows_finite, sampled, strict=True):
            seq = work.sequence
            if not seq.is_running:
                continue  # ended meanwhile
            if not is_finite or sample.nonfinite:
                self.counters.nonfinite_requests += 1
                self._life.fail(seq, sample.error or "the model wrote non-finite KV rows")
            elif sample.error is not None:
                self._life.fail(seq, sample.error)
            else:
                self._book(seq, work, sample)

    def _book(self, seq: Sequence, work: Work, sample: Sampled) -> None:
        was_prefill = not work.is_decode
        seq.add_prompt_logprobs(seq.num_computed + 1, sample.prompt_logprobs)
        num_first = seq.advance(work.num_tokens)
        if was_prefill:
            self.counters.prefill_tokens["computed"] += num_first
            self.counters.prefill_tokens["recomputed"] += work.num_tokens - num_first
        try:
            self._commit_if_due(seq, was_prefill)
        except Exception as error:
            self._life.fail(seq, error)
            return
        if sample.token_id is None:
            self._life.progress(seq)
            return
        reason = seq.append(sample.token_id)
        self._life.token(seq, sample.token_id, sample.logprobs, reason)

    def _commit_if_due(self, seq: Sequence, was_prefill: bool) -> None:
        assert seq.lease is not None
        due = seq.num_computed - seq.lease.num_committed >= self.limits.commit_every
        if was_prefill or due:
            self._life.commit(seq)

    def fail_step(self, scheduled: Scheduled, error: BaseException) -> None:
        """Ends all of a step's sequences: its forward raised, so none of its rows is there."""
        for work in scheduled.work:
            if work.sequence.is_running:
                self._life.fail(work.sequence, error)
