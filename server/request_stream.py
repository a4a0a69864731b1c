"""The queue between the engine's reader task and the handler of one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from radix_mla.engine.ipc import Admitted, PrefillProgress, SequenceOutput
from radix_mla.errors import EngineError, Overloaded

RequestEvent = Admitted | PrefillProgress | SequenceOutput


class RequestStream:
    """Events of the engine requests behind one HTTP request; one reader, one consumer."""

    __slots__ = ("_error", "_events", "_on_error", "_sink", "_waiter")

    def __init__(self) -> None:
        self._events: list[RequestEvent] = []
        self._error: EngineError | Overloaded | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[RequestEvent], None] | None = None
        self._on_error: Callable[[EngineError | Overloaded], None] | None = None

    def push(self, event: RequestEvent) -> None:
        if self._sink is not None:
            self._sink(event)
            return
        self._events.append(event)
        self._wake()

    def redirect(
        self,
        sink: Callable[[RequestEvent], None],
        on_error: Callable[[EngineError | Overloaded], None],
    ) -> None:
        """The consumer leaves: events, those that wait first, go straight to `sink` from now on."""
        self._sink, self._on_error = sink, on_error
        events, self._events = self._events, []
        for event in events:
            sink(event)

    def fail(self, error: EngineError | Overloaded) -> None:
        """Ends the stream: `receive` raises `error` after the events that came before."""
        self._error = error
        if self._on_error is not None:
            self._on_error(error)
        self._wake()

    async def receive(self, timeout_s: float | None = None) -> list[RequestEvent]:
        """All events that are there, at least one; [] after `timeout_s` seconds of silence.

        Raises the error that ended the stream. (Called once a token: a future and a timer cost a
        third of asyncio.Event and asyncio.timeout.)
        """
        if not self._events and self._error is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        if not self._events and self._error is not None:
            raise self._error
        events, self._events = self._events, []
        return events

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
