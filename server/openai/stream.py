"""One HTTP answer of a generation, streamed or whole, as a plain ASGI response.

Streamed: headers go out at admission, or at the first keep-alive if that comes earlier. What fails
before is JSON with its status; what fails after is one `data: {"error": ...}` event.
A client that goes away ends the generation at once, in both forms.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from server.choice import Delta
from server.errors import Problem, describe, logger
from server.generation import Generation

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def sse(payload: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + _encode(payload) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What an API sends in silence, and when a stream fails."""

    keepalive: bytes
    failure: Callable[[Problem], bytes]
    opening: Callable[[Generation], bytes] = lambda generation: b""  # at admission


OPENAI = Dialect(KEEP_ALIVE, lambda problem: b"data: " + problem.body + b"\n\n")


class Renderer(Protocol):
    """The wire format of one endpoint."""

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        """The SSE events of some deltas; b"" when there is nothing to show."""

    def end(self, generation: Generation) -> bytes:
        """The last events of a stream."""

    def collect(self, deltas: list[Delta]) -> None:
        """Keeps deltas for `body`."""

    def body(self, generation: Generation) -> dict[str, Any]:
        """The whole answer."""


class GenerationResponse(Response):
    """Runs a generation and writes it. `start` submits it; it is called by the server's task."""

    def __init__(
        self,
        start: Callable[[], Generation],
        renderer: Renderer,
        *,
        stream: bool,
        keepalive_s: float,
        headers: Mapping[str, str],
        dialect: Dialect = OPENAI,
        progress: Mapping[str, Any] | None = None,
    ) -> None:
        """`progress`: the chunk that progress of the prompt is sent in; None: it is not sent."""
        super().__init__(headers=headers)
        self._dialect = dialect
        self._progress = progress
        self._start = start
        self._renderer = renderer
        self._stream = stream
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with cancel_on_disconnect(receive):
            generation = self._start()
            try:
                if self._stream:
                    await _EventWriter(self, generation, send).run()
                else:
                    await self._answer(generation, scope, receive, send)
            finally:
                generation.close()

    async def _answer(
        self, generation: Generation, scope: Scope, receive: Receive, send: Send
    ) -> None:
        while not generation.finished:
            self._renderer.collect(await generation.receive() or [])
        response = Response(
            _encode(self._renderer.body(generation)),
            media_type="application/json",
            headers={
                **_extra(self),
                "x-radix-cached-tokens": str(generation.num_cached_tokens),
            },
        )
        await response(scope, receive, send)

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def keepalive_s(self) -> float:
        return self._keepalive_s

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    def progress_event(self, generation: Generation) -> bytes:
        """How far the prompt is, where the client asked for that; else b""."""
        progress = generation.take_progress() if self._progress is not None else None
        if self._progress is None or progress is None:
            return b""
        return sse({**self._progress, "prompt_progress": progress})


class _EventWriter:
    """The streamed form."""

    def __init__(self, response: GenerationResponse, generation: Generation, send: Send) -> None:
        self._response = response
        self._headers = _extra(response)
        self._renderer = response.renderer
        self._keepalive_s = response.keepalive_s
        self._generation = generation
        self._send = send
        self._started = False
        self._loop = asyncio.get_running_loop()
        self._written_s = self._loop.time()

    async def run(self) -> None:
        try:
            while not self._generation.finished:
                await self._step()
            await self._write(self._renderer.end(self._generation), last=True)
        except Exception as error:
            if not self._started:
                raise
            problem = describe(error)
            if problem.code == "internal_error":
                logger.exception("a stream failed")
            await self._write(self._response.dialect.failure(problem), last=True)

    async def _step(self) -> None:
        deltas = await self._generation.receive(self._silence_left())
        body = self._response.progress_event(self._generation)
        if not self._started and self._generation.admitted:
            body = self._response.dialect.opening(self._generation) + body
        if deltas:
            body += self._renderer.events(deltas, self._generation)
        silent = not body and self._silence_left() == 0.0
        if silent:
            body = self._response.dialect.keepalive
        if body:
            await self._write(body)
        elif not self._started and self._generation.admitted:
            await self._begin()

    def _silence_left(self) -> float | None:
        if self._keepalive_s <= 0:
            return None
        return max(0.0, self._written_s + self._keepalive_s - self._loop.time())

    async def _begin(self) -> None:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._headers,
        }
        if self._generation.admitted:
            headers["x-radix-cached-tokens"] = str(self._generation.num_cached_tokens)
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self._started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": raw})

    async def _write(self, body: bytes, *, last: bool = False) -> None:
        if not self._started:
            await self._begin()
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
        self._written_s = self._loop.time()


def _extra(response: Response) -> dict[str, str]:
    """The headers that were given, without those that a body's length and type make."""
    skipped = ("content-length", "content-type")
    return {name: value for name, value in response.headers.items() if name not in skipped}


@asynccontextmanager
async def cancel_on_disconnect(receive: Receive) -> AsyncIterator[None]:
    """Cancels the block when the client goes away; the block's `finally` does the rest."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect-watch")
    try:
        yield
    except asyncio.CancelledError:
        if not gone or task.uncancel() > 0:
            raise
    finally:
        watcher.cancel()
