"""From engine events to text: the part that all generation endpoints share.

    RequestStream ─ events ─► Generation ─► Choice (detokenise, stop strings) ─ Delta ─► renderer

A Generation is one HTTP request: p prompts with n choices each; choice c = prompt · n + i.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radix_mla.engine.ipc import Admitted, PrefillProgress, SequenceOutput
from radix_mla.errors import EngineError, InvalidRequest, Overloaded, RequestFailed
from radix_mla.request import Request
from server.choice import Choice, Delta, joined
from server.engine_client import EngineClient
from server.metrics import Metrics, RequestRecord
from server.request_stream import RequestEvent

logger = logging.getLogger("radix_mla.server")


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request; a prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    reasoning_tokens: int = 0

    def as_dict(self) -> dict[str, object]:
        """OpenAI's shape, with DeepSeek's two names beside it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.cache_write_tokens,
            },
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
        }


@dataclass(slots=True)
class Progress:
    """Prompt tokens whose rows exist; `take` answers in llama.cpp's words, cached ones included."""

    total: int
    _cached: dict[str, int] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)
    _started_s: float = 0.0
    _changed: bool = False

    def note(self, request_id: str, num_tokens: int, *, cached: bool = False) -> None:
        if cached:
            self._cached.setdefault(request_id, num_tokens)
            self._started_s = self._started_s or time.monotonic()
        self._changed = self._changed or num_tokens > self._done.get(request_id, -1)
        self._done[request_id] = max(num_tokens, self._done.get(request_id, 0))

    def complete(self) -> None:
        """Output came: with one prompt, all of it is done."""
        if len(self._done) == 1:
            for request_id in list(self._done):
                self.note(request_id, self.total)

    def take(self) -> dict[str, int] | None:
        if not self._changed:
            return None
        self._changed = False
        return {
            "total": self.total,
            "cache": sum(self._cached.values()),
            "processed": sum(self._done.values()),
            "time_ms": round(1000 * (time.monotonic() - self._started_s)),
        }


_WRITTEN = ("new", "evicted", "namespace")  # missed tokens whose rows this request adds


class Generation:
    """The running requests of one HTTP request. `close` must be called, in a `finally`."""

    def __init__(
        self,
        engine: EngineClient,
        metrics: Metrics,
        requests: Sequence[Request],
        records: Sequence[RequestRecord],
        choices: Sequence[Choice],
        *,
        on_close: Callable[[Generation], None] = lambda generation: None,
    ) -> None:
        """Submits the requests. Raises EngineDead, with nothing counted as accepted."""
        self.requests = requests
        self.records = records
        self.choices = choices
        self._engine = engine
        self._metrics = metrics
        self._position = {record.request_id: place for place, record in enumerate(records)}
        self._num_open = len(choices)
        self._progress = Progress(sum(record.num_prompt_tokens for record in records))
        self._on_close = on_close
        self._stream = engine.submit(requests)
        for record in records:
            metrics.on_accepted(record)

    @property
    def finished(self) -> bool:
        """True when every choice has its finish reason."""
        return self._num_open == 0

    @property
    def admitted(self) -> bool:
        """True when every prompt has left the queue."""
        return all(record.admitted is not None for record in self.records)

    @property
    def num_cached_tokens(self) -> int:
        return sum(record.admitted.num_cached_tokens for record in self.records if record.admitted)

    @property
    def usage(self) -> Usage:
        """Counts so far."""
        usage = Usage(
            completion_tokens=sum(choice.num_tokens for choice in self.choices),
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices),
        )
        for record in self.records:
            usage.prompt_tokens += record.num_prompt_tokens
            if record.admitted is not None:
                usage.cached_tokens += record.admitted.num_cached_tokens
                usage.cache_write_tokens += sum(
                    record.admitted.missed.get(reason, 0) for reason in _WRITTEN
                )
        return usage

    async def receive(self, timeout_s: float | None = None) -> list[Delta] | None:
        """What is new, possibly nothing to show; None after `timeout_s` seconds of silence.

        Raises EngineDead, Overloaded (the drain's end), or RequestFailed (inside the engine).
        """
        try:
            events = await self._stream.receive(timeout_s)
        except EngineError:
            self._settle_all("error")  # nobody is left to say so
            raise
        if not events:
            return None
        deltas: list[Delta] = []
        for event in events:
            if isinstance(event, SequenceOutput):
                delta = self._on_output(event)
                if delta is not None:
                    deltas.append(delta)
            elif isinstance(event, Admitted):
                self._metrics.on_admitted(self.records[self._position[event.request_id]], event)
                self._progress.note(event.request_id, event.num_cached_tokens, cached=True)
            elif isinstance(event, PrefillProgress):
                self._progress.note(event.request_id, event.num_computed)
        if deltas:
            self._progress.complete()
        return joined(deltas)

    def take_progress(self) -> dict[str, int] | None:
        """How far the prompt is, once for each change."""
        return self._progress.take()

    def close(self) -> None:
        """Ends what still runs (the client is gone); after the end it only tidies up.

        A request counts as running until the engine has said that its sequences have ended: then
        its pages are back, and the gauges agree with the pool's.
        """
        self._stream.redirect(self._settle, lambda error: self._settle_all("abort"))
        for place, record in enumerate(self.records):
            if record.finished is None and self._is_running(place):
                record.reason = record.reason or "abort"
                self._engine.abort(record.request_id)
        self._on_close(self)

    def _is_running(self, place: int) -> bool:
        """False when all choices have their text and only the engine's word is missing."""
        n = self.records[place].num_choices
        choices = self.choices[place * n : (place + 1) * n]
        return any(choice.finish_reason is None for choice in choices)

    def expire(self, error: Overloaded) -> None:
        """The drain's time is over: the consumer gets `error` after what has arrived."""
        self._stream.fail(error)

    def _on_output(self, output: SequenceOutput) -> Delta | None:
        place = self._position[output.request_id]
        record = self.records[place]
        choice = self.choices[place * record.num_choices + output.index]
        if choice.finish_reason is not None:  # on its way when the stop string was found
            self._settle(output)
            return None
        self._metrics.on_tokens(record, output.index, len(output.token_ids))
        if output.finish_reason in ("error", "abort"):
            self._fail(record, output)
        delta = choice.feed(output)
        if delta.finish_reason is not None:
            self._num_open -= 1
            if output.finish_reason is None:
                self._engine.abort(output.request_id, output.index, "stop")
        self._settle(output)
        return delta

    def _settle(self, event: RequestEvent) -> None:
        """Notes the engine's terminal events; the last one of a request is its end."""
        if not isinstance(event, SequenceOutput) or event.finish_reason is None:
            return
        place = self._position[event.request_id]
        record = self.records[place]
        record.open_choices.discard(event.index)
        if not record.open_choices:
            first = self.choices[place * record.num_choices]
            self._metrics.on_finished(record, record.reason or first.finish_reason or "abort")
            self._engine.forget(record.request_id)

    def _settle_all(self, reason: str) -> None:
        for record in self.records:
            self._metrics.on_finished(record, record.reason or reason)

    def _fail(self, record: RequestRecord, output: SequenceOutput) -> None:
        """The engine's own text goes to the log, not to the client, but for the client's faults."""
        if output.rejected:
            record.reason = "error"
            self._settle(output)
            raise InvalidRequest(output.error or "The request is not valid.", code="invalid_value")
        logger.error("request %s failed: %s", record.request_id, output.error or "aborted")
        record.reason = "error"
        self._settle(output)
        raise RequestFailed(
            f"The request failed inside the engine (id {record.request_id}); it may be sent again."
        )
