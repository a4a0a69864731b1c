"""Engine: schedule → run → sample → postprocess, in one process and one thread.

It owns what it is given: cache, runner (model and pool), scheduler and sampler. `build.py` makes
one from a configuration; `process.py` runs one behind sockets; `LLM` runs one in place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from radix_mla.engine.outputs import EngineStats
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.errors import AuditError, EngineError, InvalidRequest
from radix_mla.request import FinishReason, Grammar, Request
from radix_mla.sampling.constraint import Constraint
from radix_mla.sampling.grammar import CompiledGrammar, GrammarCompiler
from radix_mla.scheduler.batch import Sampled, Scheduled, Work
from radix_mla.scheduler.lifecycle import Events
from radix_mla.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    import torch

    from radix_mla.cache.prefix_cache import PrefixCache

_MAX_FAILED_STEPS = 5  # in a row; then the engine itself is taken to be broken
_AUDIT_EVERY_S = 10.0
_COMPILE_POLL_S = 0.002  # how long a step waits that has nothing else to do than wait for grammars


class Runner(Protocol):
    """Runs one step's forward pass. `drawn`: the tokens of a plan with `drawn_rows`."""

    def execute(self, plan: StepPlan, drawn: torch.Tensor | None = None) -> StepResult: ...


class Queued(Protocol):
    """A step's tokens, drawn on the device: `tokens` there, `wait` for them here."""

    tokens: torch.Tensor

    def wait(self) -> list[Sampled]: ...


class TokenSampler(Protocol):
    """Makes tokens of a step's logits; a failure of one sequence is its Sampled.error."""

    def sample(self, logits: torch.Tensor, work: Items[Work]) -> list[Sampled]: ...

    def can_queue(self, work: Items[Work]) -> bool:
        """Whether `queue` takes these."""

    def queue(self, logits: torch.Tensor, work: Items[Work], *, ahead: bool) -> Queued:
        """`sample` without waiting; `ahead`: the sequences do not have their last token yet."""


class _InFlight(NamedTuple):
    """A step that was queued; its tokens are `sampled`, or are still being drawn."""

    scheduled: Scheduled
    result: StepResult
    sampled: list[Sampled] | Queued


class Engine:
    """Not thread-safe. `info` describes it (Ready.info)."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        runner: Runner,
        scheduler: Scheduler,
        sampler: TokenSampler,
        vocab_size: int,
        grammars: GrammarCompiler | None = None,
        info: dict[str, Any] | None = None,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`overlap`: the runner only queues steps, in order; then plain decode steps are queued
        before the one in front of them is waited for.
        """
        self.info = info or {}
        self._overlap = overlap
        self._ahead: _InFlight | None = None
        self.cache = cache
        self.scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._compiling: dict[str, Future[CompiledGrammar]] = {}  # by request id
        self._clock = clock
        self._stats = EngineStats(kv_slots_total=cache.num_pages * cache.page_size)
        self._paths: Counter[str] = Counter()
        self._failed_steps = 0
        self._audited_step = 0
        self._audited_s = clock()

    # -- requests

    def add_request(self, request: Request) -> None:
        """Queues a request. Raises RequestError: ids, lengths or its id cannot be served.

        One with a grammar waits until that is compiled, or ends as rejected.
        """
        prompt = request.prompt_tokens
        if len(prompt) and not 0 <= int(prompt.min()) <= int(prompt.max()) < self._vocab_size:
            raise InvalidRequest(
                f"prompt token ids must be in [0, {self._vocab_size}), found "
                f"{int(prompt.min())} to {int(prompt.max())}",
                param="prompt",
            )
        grammar = request.params.grammar
        compiled = None if grammar is None else self._compile(grammar)
        self.scheduler.add(request)
        if compiled is not None:
            self._compiling[request.request_id] = compiled

    def abort(
        self,
        request_id: str,
        index: int | None = None,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """Ends a request's open choices, or one; their terminal events come with the next ones."""
        if index is None:
            self._compiling.pop(request_id, None)
        self.scheduler.abort(request_id, index, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._ahead is not None

    @property
    def num_steps(self) -> int:
        """Steps with a forward pass."""
        return self._stats.num_steps

    # -- a step

    def step(self) -> Events:
        """One forward pass, if there is something to do; what happened since the last call.

        Raises EngineError when the device or several steps in a row failed: the engine is done.
        """
        begin = self._clock()
        if self._compiling:
            self._take_compiled()
        current, self._ahead = self._ahead, None
        if current is None:
            scheduled = self.scheduler.schedule(begin)
            if not scheduled.work:
                if self._compiling:
                    wait(self._compiling.values(), _COMPILE_POLL_S, FIRST_COMPLETED)
                return self.scheduler.take_events()
            current = self._queue(scheduled)
        if current is not None:
            self._ahead = self._queue_next(current, begin)
            is_done = self._finish(current)
            self._count(current.scheduled, current.result if is_done else None, begin)
        return self.scheduler.take_events()

    def take_events(self) -> Events:
        """What happened outside of steps: aborts."""
        return self.scheduler.take_events()

    def _compile(self, grammar: Grammar) -> Future[CompiledGrammar]:
        if self._grammars is None:
            raise InvalidRequest("This engine has no grammars.", code="unsupported_parameter")
        return self._grammars.compile(grammar)

    def _take_compiled(self) -> None:
        """Lets those go on whose grammar is there, and ends those whose grammar is refused."""
        for request_id, future in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                self.scheduler.constrain(request_id, partial(Constraint, future.result()))
            else:
                self.scheduler.reject(request_id, error)

    def _queue(self, scheduled: Scheduled, before: _InFlight | None = None) -> _InFlight | None:
        """Runs a step as far as it goes without waiting for the device; None: it failed.

        `before`: the step in front of it, for one that was planned ahead.
        """
        sampler = self._sampler
        try:
            if before is None:
                result = self._runner.execute(scheduled.plan)
            else:
                assert not isinstance(before.sampled, list), "nothing to go ahead of"
                result = self._runner.execute(scheduled.plan, before.sampled.tokens)
            is_ahead = before is not None  # of sequences that were queued: they can be again
            if is_ahead or (self._overlap and sampler.can_queue(scheduled.work)):
                sampled = sampler.queue(result.logits, scheduled.work, ahead=is_ahead)
                return _InFlight(scheduled, result, sampled)
            return _InFlight(scheduled, result, sampler.sample(result.logits, scheduled.work))
        except Exception as error:
            self._fail(scheduled, error)
            return None

    def _queue_next(self, current: _InFlight, now: float) -> _InFlight | None:
        """The step after `current`, if it can be queued before `current` is waited for."""
        if isinstance(current.sampled, list) or self._compiling:
            return None
        scheduled = self.scheduler.schedule_ahead(current.scheduled, now)
        return None if scheduled is None else self._queue(scheduled, current)

    def _finish(self, step: _InFlight) -> bool:
        """Waits for a step and books it; whether it ran."""
        try:
            sampled = step.sampled if isinstance(step.sampled, list) else step.sampled.wait()
            rows_finite = step.result.rows_finite
        except Exception as error:
            self._fail(step.scheduled, error)
            return False
        self.scheduler.postprocess(step.scheduled, rows_finite, sampled)
        self._failed_steps = 0
        return True

    def _fail(self, scheduled: Scheduled, error: Exception) -> None:
        """A step that raises fails its sequences only. Raises EngineError if that is no help."""
        self.scheduler.fail_step(scheduled, error)
        self._failed_steps += 1
        if self._failed_steps >= _MAX_FAILED_STEPS or _is_device_error(error):
            raise EngineError(
                f"{self._failed_steps} steps in a row failed, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error

    def _count(self, scheduled: Scheduled, result: StepResult | None, begin_s: float) -> None:
        stats, step_s = self._stats, self._clock() - begin_s
        stats.num_steps += 1
        stats.step_s += step_s
        stats.last_step_s = step_s
        if not all(work.is_decode for work in scheduled.work):
            stats.last_prefill_step_s = step_s
        if result is not None:
            # With overlap the device works on this step while the host does something else.
            stats.step_host_s += max(0.0, step_s - result.forward_s)
            stats.prefill_context_chunks += result.num_context_chunks
            self._paths.update(result.paths)

    def prepare(self) -> None:
        """Gets ready, in the background, for what requests have not asked for yet; idempotent."""
        if self._grammars is not None:
            self._grammars.start()

    def close(self) -> None:
        """Ends what runs beside the engine. Idempotent."""
        if self._grammars is not None:
            self._grammars.close()

    # -- the cache and the numbers

    def flush(self, namespace: str | None = None) -> int:
        """Empties the prefix cache, or one namespace; the tokens dropped. Works while busy."""
        return self.cache.flush(namespace)

    def audit(self) -> dict[str, Any]:
        """Checks the cache's invariants: {"ok", "counts" in slots, "error" if not ok}."""
        self._audited_s = self._clock()
        self._audited_step = self._stats.num_steps
        report: dict[str, Any] = {"ok": True, "counts": self._slots()}
        try:
            self.cache.audit()
        except AuditError as error:
            self._stats.audit_failures += 1
            report |= {"ok": False, "error": str(error)}
        return report

    def audit_when_idle(self) -> None:
        """Audits now and then, and only after new steps; to be called while there is no work."""
        is_due = self._clock() - self._audited_s >= _AUDIT_EVERY_S
        if is_due and self._audited_step != self._stats.num_steps:
            self.audit()

    def stats(self) -> EngineStats:
        """Gauges of now, counters since the start; changed by the next call."""
        stats, scheduler, counters = self._stats, self.scheduler, self.scheduler.counters
        stats.num_running = len(scheduler.running)
        stats.num_waiting = scheduler.num_waiting()
        stats.waiting_tokens = scheduler.waiting_tokens
        stats.kv_slots = self._slots()
        stats.evicted_tokens = dict(self.cache.evicted_tokens)
        stats.prefill_tokens = dict(counters.prefill_tokens)
        stats.attention_path_tokens = dict(self._paths)
        stats.retractions = counters.retractions
        stats.nonfinite_requests = counters.nonfinite_requests
        stats.aborted_tokens = dict(counters.aborted_tokens)
        return stats

    def _slots(self) -> dict[str, int]:
        counts = self.cache.counts()._asdict()
        total = counts.pop("total")
        assert total == self.cache.num_pages
        return {state: pages * self.cache.page_size for state, pages in counts.items()}


def _is_device_error(error: BaseException) -> bool:
    """A GPU that has reported an error runs nothing more in this process."""
    return type(error).__name__ in ("AcceleratorError", "OutOfMemoryError") or (
        isinstance(error, RuntimeError) and "CUDA error" in str(error)
    )
