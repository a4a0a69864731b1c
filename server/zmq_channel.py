"""The channel to the engine process: PUSH for commands, PULL for events, over ipc sockets."""

from __future__ import annotations

import contextlib

import zmq
import zmq.asyncio

from radix_mla.engine.ipc import Command, Event, decode_event, encode


class ZmqChannel:
    """Binds both sockets; must be made and used on one event loop."""

    def __init__(self, command_address: str, event_address: str) -> None:
        self._context = zmq.asyncio.Context()
        # The plain sockets share the context: sends never wait, and reads after a poll do not.
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._commands: zmq.Socket[bytes] = plain.socket(zmq.PUSH)
        self._events = self._context.socket(zmq.PULL)
        self._ready_events: zmq.Socket[bytes] = zmq.Socket.shadow(self._events.underlying)
        for socket in (self._commands, self._events):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
        self._commands.bind(command_address)
        self._events.bind(event_address)

    async def connect(self, timeout_s: float) -> bool:
        """Waits until the engine's sockets are there: what is sent before would be lost."""
        poller = zmq.asyncio.Poller()
        poller.register(self._commands, zmq.POLLOUT)
        return bool(await poller.poll(int(timeout_s * 1000)))

    def send(self, command: Command) -> None:
        with contextlib.suppress(zmq.Again):  # the peer is gone: the process watch will say so
            self._commands.send(encode(command), zmq.NOBLOCK)

    async def receive(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        if await self._events.poll(int(timeout_s * 1000)):
            with contextlib.suppress(zmq.Again):
                while True:
                    events.append(decode_event(self._ready_events.recv(zmq.NOBLOCK)))
        return events

    def close(self) -> None:
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
