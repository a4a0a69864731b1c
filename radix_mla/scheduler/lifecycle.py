"""Lifecycle: who waits, who runs, and the one place where a sequence begins, pauses and ends.

Each end goes through `end`: it spends the lease, emits the one terminal event and forgets the
sequence, whatever led to it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radix_mla.cache.namespace import ephemeral_namespace, is_ephemeral
from radix_mla.engine.outputs import Admitted, PrefillProgress, SequenceOutput, TokenLogprobs
from radix_mla.errors import InvalidRequest, RequestError
from radix_mla.request import FinishReason, Request
from radix_mla.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from radix_mla.cache.lease import Lease
    from radix_mla.cache.prefix_cache import PrefixCache
    from radix_mla.sampling.constraint import Constraint


@dataclass(slots=True)
class Events:
    """What happened since the last time they were taken; the parts of ipc.Outputs."""

    admitted: list[Admitted] = field(default_factory=list)
    sequences: list[SequenceOutput] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.sequences or self.progress)


@dataclass(slots=True)
class Counters:
    """Sums since the start.

    prefill_tokens: computed = prompt rows computed for the first time; recomputed = rows that a
    prefill after a retraction computed; device = rows reused at the first admission.
    aborted_tokens, by where the sequence was: waiting = its tokens, prefill = rows that it had
    computed, decode = tokens that it had generated.
    """

    prefill_tokens: Counter[str] = field(
        default_factory=lambda: Counter(computed=0, recomputed=0, device=0)
    )
    aborted_tokens: Counter[str] = field(
        default_factory=lambda: Counter(waiting=0, prefill=0, decode=0)
    )
    retractions: int = 0
    nonfinite_requests: int = 0


class Lifecycle:
    """Owns the status of every sequence. `running` is in order of admission."""

    def __init__(self, cache: PrefixCache, *, store: bool) -> None:
        self.running: list[Sequence] = []
        self.counters = Counters()
        self.num_waiting = 0
        self.waiting_tokens = 0
        self.num_compiling = 0  # of num_waiting, those whose grammar is being compiled
        self._cache = cache
        self._store = store
        self._waiting: list[Sequence] = []
        self._choices: dict[str, dict[int, Sequence]] = {}  # open ones, by request and index
        self._events = Events()
        self._next_order = 0

    @property
    def waiting(self) -> list[Sequence]:
        """In order of arrival; not changed in place by admissions and ends."""
        if len(self._waiting) != self.num_waiting:
            self._waiting = [seq for seq in self._waiting if seq.is_waiting]
        return self._waiting

    @property
    def is_empty(self) -> bool:
        return not self._choices

    def choices(self, request_id: str) -> list[Sequence]:
        """The open choices of a request, by index; empty for an unknown id."""
        return list(self._choices.get(request_id, {}).values())

    def first_choice(self, seq: Sequence) -> Sequence:
        """The open choice with the lowest index of the same request."""
        return next(iter(self._choices[seq.request_id].values()))

    def take_events(self) -> Events:
        events, self._events = self._events, Events()
        return events

    # -- begin

    def add(self, request: Request, eos_ids: frozenset[int]) -> None:
        """Queues all choices. Raises InvalidRequest for an id that is in use."""
        request_id = request.request_id
        if request_id in self._choices:
            raise InvalidRequest(f"request id {request_id!r} is in use", param="request_id")
        stored = self._store and request.store
        namespace = request.namespace if stored else ephemeral_namespace(request_id)
        self._choices[request_id] = {}
        for index in range(request.n):
            seq = Sequence(
                request, index, namespace=namespace, order=self._next_order, eos_ids=eos_ids
            )
            self._next_order += 1
            self._choices[request_id][index] = seq
            self._waiting.append(seq)
            self._enter_queue(seq)

    def start(self, seq: Sequence, lease: Lease, missed: dict[str, int], now: float) -> None:
        """WAITING to RUNNING. `missed` is for the first time only."""
        self._leave_queue(seq)
        seq.admit(lease)
        self.running.append(seq)
        if seq.was_admitted:
            return
        seq.was_admitted = True
        self.counters.prefill_tokens["device"] += seq.num_cached
        queue_s = max(0.0, now - seq.request.arrival_s)
        self._events.admitted.append(
            Admitted(seq.request_id, seq.index, seq.num_cached, missed, queue_s)
        )

    def _enter_queue(self, seq: Sequence) -> None:
        self.num_waiting += 1
        self.waiting_tokens += seq.num_tokens
        self.num_compiling += seq.awaits_grammar

    def _leave_queue(self, seq: Sequence) -> None:
        self.num_waiting -= 1
        self.waiting_tokens -= seq.num_tokens
        self.num_compiling -= seq.awaits_grammar

    def constrain(self, seq: Sequence, constraint: Constraint) -> None:
        """Its grammar is compiled: it may be admitted from now on."""
        assert seq.is_waiting
        assert seq.awaits_grammar
        self.num_compiling -= 1
        seq.constraint = constraint

    # -- go on

    def progress(self, seq: Sequence) -> None:
        self._events.progress.append(
            PrefillProgress(seq.request_id, seq.index, min(seq.num_computed, seq.num_prompt_tokens))
        )

    def token(
        self,
        seq: Sequence,
        token_id: int,
        logprobs: TokenLogprobs | None,
        reason: FinishReason | None,
    ) -> None:
        """Emits a sampled token, and the end of the sequence if it ends with it."""
        output = SequenceOutput(seq.request_id, seq.index, [token_id])
        if logprobs is not None:
            output.logprobs = [logprobs]
        if seq.num_generated == 1:
            output.prompt_logprobs = seq.prompt_logprobs
        if reason is FinishReason.STOP:
            output.stop_token_id = token_id
        if reason is None:
            self._events.sequences.append(output)
        else:
            self.end(seq, reason, output=output)

    def commit(self, seq: Sequence) -> None:
        """Puts the computed rows into the tree. A step that was planned ahead may be writing into
        the last page, behind them: a commit swaps full pages only.
        """
        assert seq.lease is not None
        if seq.num_computed > seq.lease.num_committed:
            self._cache.commit(seq.lease, seq.tokens[: seq.num_computed])

    # -- pause and end

    def retract(self, seq: Sequence) -> None:
        """RUNNING to WAITING: gives the pages back; the rows stay in the tree until evicted."""
        try:
            self.commit(seq)
        except Exception as error:
            self.fail(seq, error)
            return
        waiting = self.waiting  # without what it still holds of `seq` from its admission
        self._release(seq)
        seq.retract()
        self.counters.retractions += 1
        insort(waiting, seq, key=lambda other: other.order)
        self._enter_queue(seq)

    def abort(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends `seq` now; `reason` STOP is a stop string found in its text."""
        if reason is FinishReason.ABORT:
            self._count_aborted(seq)
        self.end(seq, reason)

    def fail(self, seq: Sequence, error: BaseException | str) -> None:
        """Ends `seq` with an error; what it has not committed never enters the tree.

        A RequestError is the client's own fault, and told to the client.
        """
        if isinstance(error, RequestError):
            output = SequenceOutput(seq.request_id, seq.index, [], rejected=True)
            self.end(seq, FinishReason.ERROR, output=output, error=error.message)
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        self.end(seq, FinishReason.ERROR, error=text)

    def end(
        self,
        seq: Sequence,
        reason: FinishReason,
        *,
        output: SequenceOutput | None = None,
        error: str | None = None,
    ) -> None:
        """To a terminal state: commits unless it failed, releases, emits the one terminal event."""
        if seq.is_running:
            if reason is not FinishReason.ERROR and not is_ephemeral(seq.namespace):
                try:
                    self.commit(seq)
                except Exception as failure:
                    reason, error = FinishReason.ERROR, f"{type(failure).__name__}: {failure}"
            self._release(seq)
        else:
            self._leave_queue(seq)
        seq.end(reason)
        output = output or SequenceOutput(seq.request_id, seq.index, [])
        output.finish_reason = reason.value
        output.error = error
        if reason is not FinishReason.STOP:
            output.stop_token_id = None
        self._events.sequences.append(output)
        self._forget(seq)

    def _release(self, seq: Sequence) -> None:
        lease, seq.lease = seq.lease, None
        assert lease is not None
        self.running.remove(seq)
        self._cache.release(lease)

    def _forget(self, seq: Sequence) -> None:
        choices = self._choices[seq.request_id]
        del choices[seq.index]
        if not choices:
            del self._choices[seq.request_id]
            if is_ephemeral(seq.namespace):
                self._cache.drop_namespace(seq.namespace)

    def _count_aborted(self, seq: Sequence) -> None:
        aborted = self.counters.aborted_tokens
        if seq.is_waiting:
            aborted["waiting"] += seq.num_tokens
        elif seq.is_prefilling:
            aborted["prefill"] += seq.sunk_work
        else:
            aborted["decode"] += seq.num_generated
