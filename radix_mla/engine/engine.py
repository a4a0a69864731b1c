"""Engine: schedule → run → sample → postprocess, in one process and one thread.

It owns what it is given: cache, runner (model and pool), scheduler and sampler. `build.py` makes
one from a configuration; `process.py` runs one behind sockets; `LLM` runs one in place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

from radix_mla.engine.outputs import EngineStats
from radix_mla.engine.pipeline import Done, Pipeline, Runner, TokenSampler
from radix_mla.errors import AuditError, InvalidRequest
from radix_mla.request import FinishReason, Grammar, Request
from radix_mla.sampling.constraint import Constraint
from radix_mla.sampling.grammar import CompiledGrammar, GrammarCompiler
from radix_mla.scheduler.lifecycle import Events
from radix_mla.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import PrefixCache

_AUDIT_EVERY_S = 10.0
_COMPILE_POLL_S = 0.002  # how long a step waits that has nothing else to do than wait for grammars


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
        """`overlap`: as for the `Pipeline`."""
        self.info = info or {}
        self.cache = cache
        self.scheduler = scheduler
        self._pipeline = Pipeline(scheduler, runner, sampler, overlap=overlap)
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._compiling: dict[str, Future[CompiledGrammar]] = {}  # by request id
        self._clock = clock
        self._stats = EngineStats(kv_slots_total=cache.num_pages * cache.page_size)
        self._paths: Counter[str] = Counter()
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
        return self.scheduler.has_work or self._pipeline.has_work

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
        if not self._pipeline.start(begin):
            if self._compiling:
                wait(self._compiling.values(), _COMPILE_POLL_S, FIRST_COMPLETED)
            return self.scheduler.take_events()
        done = self._pipeline.finish(begin, go_ahead=not self._compiling)
        if done is not None:
            self._count(done, begin)
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

    def _count(self, done: Done, begin_s: float) -> None:
        stats, step_s = self._stats, self._clock() - begin_s
        stats.num_steps += 1
        stats.step_s += step_s
        stats.last_step_s = step_s
        if not all(work.is_decode for work in done.scheduled.work):
            stats.last_prefill_step_s = step_s
        if done.result is not None:
            # With overlap the device works on this step while the host does something else.
            stats.step_host_s += max(0.0, step_s - done.result.forward_s)
            stats.prefill_context_chunks += done.result.num_context_chunks
            self._paths.update(done.result.paths)

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
