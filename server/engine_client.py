"""The API process's view of the engine: submit requests, take their events, abort, flush, audit.

    engine ─ Outputs ─► one reader task ─► RequestStream per HTTP request ─► its handler

The reader takes every message that has arrived before it lets the handlers run, so when the event
loop lags, a handler finds several tokens at once and sends them in one chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from radix_mla.engine.ipc import (
    Abort,
    Audit,
    Command,
    Drain,
    EngineStats,
    Event,
    Fatal,
    Flush,
    Outputs,
    Ready,
    Reply,
    Submit,
)
from radix_mla.errors import EngineDead, EngineError
from radix_mla.request import Request
from server.request_stream import RequestEvent, RequestStream

logger = logging.getLogger("radix_mla.server")

_CALL_TIMEOUT_S = 60.0
_WATCH_S = 0.25
_CONNECT_S = 10.0
_MAX_SILENCE_S = 5.0
_DRAIN_WAIT_S = 5.0


class EngineClient(Protocol):
    """What the server needs of an engine. All methods are called on the event loop."""

    @property
    def info(self) -> dict[str, Any]:
        """`Ready.info`: the resolved config, dims and decisions."""

    @property
    def stats(self) -> EngineStats:
        """The newest statistics."""

    @property
    def problem(self) -> str | None:
        """Why the engine cannot work, for the client's eyes; None while it can."""

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the engine's last sign of life, idle or busy."""

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        """Queues requests with one stream for all. Raises EngineDead."""

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        """Ends a sequence, or all of a request; their terminal events follow."""

    def forget(self, request_id: str) -> None:
        """The request has ended: its late events are dropped."""

    async def flush(self, namespace: str | None) -> int:
        """Drops the cache (of a namespace); tokens dropped. Raises EngineDead."""

    async def audit(self) -> dict[str, Any]:
        """Checks the cache's invariants: {"ok", "counts"}. Raises EngineDead."""

    async def close(self) -> None:
        """Lets the engine finish what it has and exit, or ends it."""


class Channel(Protocol):
    """One side of the message pipe: whole messages, in order."""

    async def connect(self, timeout_s: float) -> bool:
        """Waits for the peer; whether it came."""

    def send(self, command: Command) -> None:
        """Queues a command; never blocks, and a peer that is gone is no error here."""

    async def receive(self, timeout_s: float) -> list[Event]:
        """All events that have arrived; [] after `timeout_s` without one."""

    def close(self) -> None:
        """Closes the sockets."""


class Process(Protocol):
    """What is asked of `radix_mla.engine.process.EngineHandle`."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def exit_cause(self) -> str | None: ...

    @property
    def heartbeat_age_s(self) -> float | None: ...

    @property
    def step_age_s(self) -> float: ...

    def wait(self, timeout_s: float | None = None) -> bool: ...

    def close(self, grace_s: float = 5.0) -> None: ...


class ChannelEngineClient:
    """`EngineClient` over a channel to the engine process."""

    def __init__(
        self,
        channel: Channel,
        process: Process,
        info: dict[str, Any],
        *,
        step_timeout_s: float = 120.0,
    ) -> None:
        """A step, or a silence, longer than `step_timeout_s` ends the engine."""
        self._channel = channel
        self._process = process
        self._info = info
        self._step_timeout_s = step_timeout_s
        self._streams: dict[str, RequestStream] = {}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._stats = EngineStats()
        self._dead: EngineDead | None = None
        self._closing = False
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects and starts the reader task. Raises EngineDead when the engine does not come."""
        if not await self._channel.connect(_CONNECT_S):
            raise EngineDead(f"it did not connect: {self._process.exit_cause or 'no answer'}")
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @property
    def info(self) -> dict[str, Any]:
        return self._info

    @property
    def stats(self) -> EngineStats:
        return self._stats

    @property
    def problem(self) -> str | None:
        if self._dead is not None or not self._process.is_alive:
            return "The engine process is gone; this server needs a restart."
        if self.heartbeat_age_s > _MAX_SILENCE_S:
            return f"The engine has been silent for {self.heartbeat_age_s:.0f} seconds."
        if self._process.step_age_s > self._step_timeout_s:
            return f"The engine's step has run for {self._process.step_age_s:.0f} seconds."
        return None

    @property
    def heartbeat_age_s(self) -> float:
        return self._process.heartbeat_age_s or 0.0

    def submit(self, requests: Sequence[Request]) -> RequestStream:
        if self._dead is not None:
            raise self._dead
        stream = RequestStream()
        for request in requests:
            self._streams[request.request_id] = stream
            self._channel.send(Submit(request))
        return stream

    def abort(self, request_id: str, index: int | None = None, reason: str = "abort") -> None:
        if self._dead is None:
            self._channel.send(Abort(request_id, index, reason))

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    async def flush(self, namespace: str | None) -> int:
        reply = await self._call(lambda call_id: Flush(call_id, namespace))
        return int(reply["tokens"])

    async def audit(self) -> dict[str, Any]:
        return await self._call(Audit)

    async def close(self) -> None:
        self._closing = True
        if self._dead is None:
            self._channel.send(Drain())
            await asyncio.to_thread(self._process.wait, _DRAIN_WAIT_S)
        await asyncio.to_thread(self._process.close, 0.5)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._channel.close()

    async def _call(self, make: Callable[[int], Flush | Audit]) -> dict[str, Any]:
        if self._dead is not None:
            raise self._dead
        if (problem := self.problem) is not None:  # it would wait for an answer that may never come
            raise EngineDead(problem)
        self._num_calls += 1
        call_id = self._num_calls
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._channel.send(make(call_id))
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await future
        except TimeoutError:
            raise EngineError(f"the engine did not answer within {_CALL_TIMEOUT_S} s") from None
        finally:
            del self._calls[call_id]

    async def _read(self) -> None:
        """The one reader; ends with everything pending failed."""
        try:
            while True:
                events = await self._channel.receive(_WATCH_S)
                for event in events:
                    self._dispatch(event)
                if not events:
                    self._check_process()
        except EngineDead as error:
            self._die(error)
        except Exception as error:  # a message that cannot be read: nothing after it is safe
            logger.exception("the engine's messages cannot be read")
            self._die(EngineDead(f"unreadable message from the engine: {error}"))

    def _check_process(self) -> None:
        """Raises EngineDead when the process is gone, or has been stuck for too long."""
        process = self._process
        if not process.is_alive:
            raise EngineDead(process.exit_cause or "the process ended")
        stuck_s = max(process.step_age_s, self.heartbeat_age_s)
        if stuck_s > self._step_timeout_s:
            process.close(grace_s=0.0)
            raise EngineDead(f"it was stuck for {stuck_s:.0f} s (--step-timeout) and was ended")

    def _dispatch(self, event: Event) -> None:
        match event:
            case Outputs():
                self._stats = event.stats
                items: list[RequestEvent] = [*event.admitted, *event.progress, *event.sequences]
                for item in items:
                    stream = self._streams.get(item.request_id)
                    if stream is not None:
                        stream.push(item)
            case Reply():
                future = self._calls.get(event.call_id)
                if future is not None and not future.done():
                    future.set_result(event.value)
            case Fatal():
                raise EngineDead(f"{event.kind}: {event.message}")
            case Ready():
                self._info = event.info

    def _die(self, error: EngineDead) -> None:
        if not self._closing:
            logger.error("the engine is gone: %s", error)
        self._dead = error
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
