"""From engine events to text: the part that all generation endpoints share.

    RequestStream ─ events ─► Generation ─► Choice (detokenise, stop strings) ─ Delta ─► renderer

A Generation is one HTTP request: p prompts with n choices each; choice c = prompt · n + i.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radix_mla.engine.ipc import Admitted, SequenceOutput, TokenLogprobs
from radix_mla.errors import EngineError, Overloaded, RequestFailed
from radix_mla.request import Request
from radix_mla.text.detokenizer import make_detokenizer
from radix_mla.text.stops import StopChecker
from radix_mla.text.tokenizer import Tokenizer
from server.engine_client import EngineClient
from server.metrics import Metrics, RequestRecord

logger = logging.getLogger("radix_mla.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How tokens become output. `discard`: max_tokens 0, the one token that was made is dropped."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    discard: bool = False


class TokenEntry(NamedTuple):
    """One token with its logprobs and the length of the text before it."""

    token_id: int
    logprobs: TokenLogprobs | None
    text_offset: int


@dataclass(slots=True)
class Delta:
    """What is new of one choice. Text may lag behind tokens while a stop string is possible."""

    choice: int
    text: str
    token_ids: list[int]
    entries: list[TokenEntry]
    finish_reason: str | None


class Choice:
    """One sequence on its way to text."""

    __slots__ = (
        "_detokenizer",
        "_num_chars",
        "_options",
        "_stops",
        "finish_reason",
        "index",
        "num_tokens",
        "prompt_logprobs",
        "stop_reason",
    )

    def __init__(self, index: int, tokenizer: Tokenizer | None, options: OutputOptions) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._options = options
        self._num_chars = 0
        self._stops = StopChecker(options.stops, include_stop=options.include_stop)
        self._detokenizer = (
            make_detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
            if tokenizer is not None
            else None
        )

    def feed(self, output: SequenceOutput) -> Delta:
        """Takes the output of some steps. After a stop string the rest of it is dropped."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        delta = Delta(self.index, "", [], [], None)
        if self._options.discard:
            self.finish_reason = delta.finish_reason = "length"
            return delta
        for position, token_id in enumerate(output.token_ids):
            is_last = position == len(output.token_ids) - 1
            stops_here = is_last and output.stop_token_id is not None
            logprobs = output.logprobs[position] if output.logprobs is not None else None
            delta.token_ids.append(token_id)
            delta.entries.append(TokenEntry(token_id, logprobs, self._num_chars))
            delta.text += self._push(token_id, silent=stops_here and not self._options.include_stop)
            if self._stops.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
                break
        if self.finish_reason is None and output.finish_reason is not None:
            delta.text += self._finish(output)
        delta.finish_reason = self.finish_reason
        return delta

    def _push(self, token_id: int, *, silent: bool) -> str:
        self.num_tokens += 1
        if self._detokenizer is None or silent:
            return ""
        return self._release(self._detokenizer.push(token_id))

    def _release(self, piece: str) -> str:
        self._num_chars += len(piece)
        if self.num_tokens < self._options.min_tokens:
            return self._stops.skip(piece)
        return self._stops.push(piece)

    def _finish(self, output: SequenceOutput) -> str:
        text = ""
        if self._detokenizer is not None:
            text = self._release(self._detokenizer.flush())
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
            return text
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_token_id
        return text + self._stops.flush()


@dataclass(slots=True)
class Usage:
    """Token counts of one HTTP request; a prompt counts once, whatever n is."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0

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
            "completion_tokens_details": {"reasoning_tokens": 0},
            "prompt_cache_hit_tokens": self.cached_tokens,
            "prompt_cache_miss_tokens": self.prompt_tokens - self.cached_tokens,
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
        usage = Usage(completion_tokens=sum(choice.num_tokens for choice in self.choices))
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

        Raises EngineDead, or RequestFailed when a sequence failed inside the engine.
        """
        try:
            events = await self._stream.receive(timeout_s)
        except EngineError:
            self._end_all("error")
            raise
        except Overloaded:
            self._end_all("abort")
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
        return _joined(deltas)

    def close(self) -> None:
        """Ends what still runs (the client is gone); after the end it only tidies up."""
        self._end_all("abort")
        self._on_close(self)

    def expire(self, error: Overloaded) -> None:
        """The drain's time is over: the consumer gets `error` after what has arrived."""
        self._stream.fail(error)

    def _end_all(self, reason: str) -> None:
        for record in self.records:
            if record.finished is None:
                self._engine.abort(record.request_id)
                self._metrics.on_finished(record, reason)
            self._engine.forget(record.request_id)

    def _on_output(self, output: SequenceOutput) -> Delta | None:
        place = self._position[output.request_id]
        record = self.records[place]
        choice = self.choices[place * record.num_choices + output.index]
        if choice.finish_reason is not None:
            return None  # on its way when the stop string was found
        self._metrics.on_tokens(record, output.index, len(output.token_ids))
        if output.finish_reason in ("error", "abort"):
            self._fail(record, output)
        delta = choice.feed(output)
        if delta.finish_reason is not None:
            if output.finish_reason is None:
                self._engine.abort(output.request_id, output.index, "stop")
            self._on_choice_end(place)
        return delta

    def _on_choice_end(self, place: int) -> None:
        record = self.records[place]
        self._num_open -= 1
        record.num_open -= 1
        if record.num_open == 0:
            first = self.choices[place * record.num_choices]
            self._metrics.on_finished(record, first.finish_reason or "error")
            self._engine.forget(record.request_id)

    def _fail(self, record: RequestRecord, output: SequenceOutput) -> None:
        """The engine's own text goes to the log, not to the client."""
        logger.error("request %s failed: %s", record.request_id, output.error or "aborted")
        self._metrics.on_finished(record, "error")
        self._engine.abort(record.request_id)
        raise RequestFailed(
            f"The request failed inside the engine (id {record.request_id}); it may be sent again."
        )


def _joined(deltas: list[Delta]) -> list[Delta]:
    """Deltas of one choice put together, in order of first appearance."""
    if len(deltas) < 2:
        return deltas
    merged: dict[int, Delta] = {}
    for delta in deltas:
        known = merged.setdefault(delta.choice, delta)
        if known is not delta:
            known.text += delta.text
            known.token_ids += delta.token_ids
            known.entries += delta.entries
            known.finish_reason = delta.finish_reason
    return list(merged.values())
