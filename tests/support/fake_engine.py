"""An engine that follows a script: the server's tests run on it without a process or a model.

By default each choice gets the ids of its script one by one, then ends. Commands are recorded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_mla.engine.ipc import Admitted, EngineStats, SequenceOutput, TokenLogprobs
from radix_mla.errors import EngineDead
from radix_mla.request import Request
from server.request_stream import RequestEvent, RequestStream


@dataclass(slots=True)
class Script:
    """What one choice says. `finish` "stop" with `stop_token_id` means that id is the last."""

    token_ids: Sequence[int] = (72, 105)
    finish: str = "length"
    stop_token_id: int | None = None
    cached: int = 0
    error: str | None = None
    hold: bool = False  # never goes on after admission
    hold_queue: bool = False  # is never admitted
    per_event: int = 1  # tokens in one output


@dataclass
class FakeEngine:
    """`EngineClient` for tests. `script` chooses by request and choice index."""

    script: Callable[[Request, int], Script] = field(default=lambda request, index: Script())
    info: dict[str, Any] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)
    problem: str | None = None
    heartbeat_age_s: float = 0.0
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    aborts: list[tuple[str, int | None, str]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    flushed: list[str | None] = field(default_factory=list)
    open: dict[str, set[int]] = field(default_factory=dict)
    slow_aborts: bool = False
    streams: dict[str, RequestStream] = field(default_factory=dict)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        if self.problem is not None:
            raise EngineDead(self.problem)
        stream = RequestStream()
        for request in requests:
            self.requests.append(request)
            self.streams[request.request_id] = stream
            self.open[request.request_id] = set(range(request.n))
            task = asyncio.create_task(self._play(request, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.submitted.set()
        return stream

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """The terminal events come at once, unless `slow_aborts`."""
        self.aborts.append((request_id, index, reason))
        self.aborted.set()
        if not self.slow_aborts:
            self.settle(request_id, index, reason)

    def settle(self, request_id: str, index: int | None, reason: str) -> None:
        """Ends the open choices of a request as an abort does."""
        stream, still_open = self.streams.get(request_id), self.open.get(request_id, set())
        for choice in sorted(still_open if index is None else still_open & {index}):
            still_open.discard(choice)
            if stream is not None:
                stream.push(SequenceOutput(request_id, choice, [], finish_reason=reason))

    def forget(self, request_id: str) -> None:
        self.streams.pop(request_id, None)
        self.forgotten.append(request_id)

    async def flush(self, namespace: str | None) -> int:
        self.flushed.append(namespace)
        return 123

    async def audit(self) -> dict[str, Any]:
        return {"ok": True, "counts": {"free": 64}}

    async def close(self) -> None:
        self.closed = True

    def die(self) -> None:
        """As when the process is killed: everything pending fails."""
        self.problem = "The engine process is gone."
        for stream in set(self.streams.values()):
            stream.fail(EngineDead("killed by SIGKILL"))

    async def _play(self, request: Request, stream: RequestStream) -> None:
        scripts = [self.script(request, index) for index in range(request.n)]
        for index, script in enumerate(scripts):
            if script.hold_queue:
                return
            stream.push(self.admitted(request, index, script))
        await asyncio.sleep(self.delay_s)
        plays = [self._say(request, index, script, stream) for index, script in enumerate(scripts)]
        await asyncio.gather(*plays)

    async def _say(
        self, request: Request, index: int, script: Script, stream: RequestStream
    ) -> None:
        if script.hold:
            return
        ids = list(script.token_ids)[: request.params.max_tokens]
        finish = script.finish if len(ids) == len(script.token_ids) else "length"
        groups = [ids[i : i + script.per_event] for i in range(0, len(ids), script.per_event)]
        for number, group in enumerate(groups or [[]]):
            if index not in self.open[request.request_id]:
                return
            is_last = number == max(0, len(groups) - 1)
            ended = is_last and finish == "stop"
            stream.push(
                self.output(
                    request,
                    index,
                    group,
                    first=number == 0,
                    finish_reason=finish if is_last and script.error is None else None,
                    stop_token_id=script.stop_token_id if ended else None,
                )
            )
            if is_last and script.error is None:
                self.open[request.request_id].discard(index)
            await asyncio.sleep(self.delay_s)
        if script.error is not None and index in self.open[request.request_id]:
            self.open[request.request_id].discard(index)
            stream.push(
                SequenceOutput(
                    request.request_id, index, [], finish_reason="error", error=script.error
                )
            )

    @staticmethod
    def admitted(request: Request, index: int, script: Script) -> RequestEvent:
        total = len(request.prompt_tokens)
        missed = {"new": total - script.cached}
        if script.cached == total - 1:
            missed = {"last_token": 1}
        return Admitted(request.request_id, index, script.cached, missed, 0.001)

    @staticmethod
    def output(
        request: Request, index: int, ids: list[int], *, first: bool, **end: Any
    ) -> SequenceOutput:
        params = request.params
        logprobs = None
        if params.logprobs is not None:
            logprobs = [_logprobs(token_id, params.logprobs) for token_id in ids]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and first:
            tokens = [int(token_id) for token_id in request.prompt_tokens]
            prompt_logprobs = [None] + [
                _logprobs(token_id, params.prompt_logprobs) for token_id in tokens[1:]
            ]
        return SequenceOutput(request.request_id, index, ids, logprobs, prompt_logprobs, **end)


def _logprobs(token_id: int, top: int) -> TokenLogprobs:
    """The token at -0.5; below it -inf, which JSON does not have."""
    ids = [token_id, *(i for i in range(20) if i != token_id)][:top]
    return TokenLogprobs(-0.5, 1, ids, [-0.5, *([float("-inf")] * 19)][:top])
