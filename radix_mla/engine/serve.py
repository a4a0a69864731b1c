"""The engine's process: commands in, events out, one engine step after the other.

`EngineHandle` (process.py) starts it as `python -m radix_mla.engine.serve` with three things:

    stdin         one frame, the Setup; then it stays open: its end means that the parent is gone
    start-up fd   (argv[1]) Loading..., then Ready or Fatal; closed then
    directory     (0700) sockets `commands` (PULL) and `events` (PUSH), bound by the parent;
                  `heartbeat`

SIGINT and SIGTERM are ignored here: the API process decides to drain.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec
import zmq

from radix_mla.engine.build import build_engine
from radix_mla.engine.engine import Engine
from radix_mla.engine.heartbeat import Heartbeat
from radix_mla.engine.ipc import (
    Abort,
    Audit,
    Command,
    Drain,
    Fatal,
    Flush,
    Loading,
    Outputs,
    Ready,
    Reply,
    Setup,
    StartEvent,
    Submit,
    decode_command,
    encode,
    read_frame,
    write_frame,
)
from radix_mla.engine.outputs import SequenceOutput
from radix_mla.engine.parent import Parent
from radix_mla.errors import RequestError
from radix_mla.request import FinishReason, Request

logger = logging.getLogger("radix_mla.engine")

_IDLE_POLL_MS = 1000
_STALL_POLL_MS = 1  # nothing could be done though there is work: no busy loop
_LINGER_MS = 2000


class EngineServer:
    """The loop around an engine: drains commands between steps, sends one Outputs a step."""

    def __init__(
        self, engine: Engine, directory: Path, heartbeat: Heartbeat, parent: Parent
    ) -> None:
        self._engine = engine
        self._parent = parent
        self._heartbeat = heartbeat
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._events):
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
        # Connected, not bound: a connected PUSH queues while nobody reads, and never blocks.
        self._commands.connect(f"ipc://{directory / 'commands'}")
        self._events.connect(f"ipc://{directory / 'events'}")
        self._idle_poller = zmq.Poller()
        self._idle_poller.register(self._commands, zmq.POLLIN)
        self._idle_poller.register(parent.fd, zmq.POLLIN)
        self._rejected: list[SequenceOutput] = []
        self._sent_stats = b""
        self._draining = False

    def run(self) -> None:
        """Until drained or the parent is gone. Raises what ends the engine."""
        self._send(Ready(self._engine.info))
        while (self._engine.has_work or not self._draining) and not self._parent.is_gone():
            if not self._engine.has_work:
                self._engine.audit_when_idle()
                self._send_changed_stats()
                self._heartbeat.idle()
                if not self._idle_poller.poll(_IDLE_POLL_MS):
                    self._engine.prepare()
            self._heartbeat.busy()
            while self._commands.poll(0):
                self._receive(self._commands.recv())
            if not self._step():
                self._commands.poll(_STALL_POLL_MS)

    def fatal(self, error: BaseException) -> None:
        self._send(Fatal(type(error).__name__, str(error)))

    def close(self) -> None:
        self._engine.close()
        self._context.destroy(linger=0 if self._parent.is_gone() else _LINGER_MS)

    def _step(self) -> bool:
        """Whether anything happened."""
        engine = self._engine
        num_steps = engine.num_steps
        events = engine.step() if engine.has_work else engine.take_events()
        rejected, self._rejected = self._rejected, []
        if events or rejected:
            sequences = [*events.sequences, *rejected]
            stats = engine.stats()
            self._send(Outputs(events.admitted, sequences, events.progress, stats))
            self._sent_stats = msgspec.msgpack.encode(stats)
        return bool(events) or engine.num_steps > num_steps

    def _send_changed_stats(self) -> None:
        stats = self._engine.stats()
        if msgspec.msgpack.encode(stats) != self._sent_stats:
            self._send(Outputs([], [], [], stats))
            self._sent_stats = msgspec.msgpack.encode(stats)

    def _send(self, event: Ready | Outputs | Reply | Fatal) -> None:
        self._events.send(encode(event))

    def _receive(self, data: bytes) -> None:
        try:
            command = decode_command(data)
        except ValueError:
            logger.exception("a command of %d bytes cannot be read and is ignored", len(data))
            return
        self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Abort(request_id, index, reason):
                known = FinishReason.STOP if reason == "stop" else FinishReason.ABORT
                self._engine.abort(request_id, index, known)
            case Flush(call_id, namespace):
                self._send(Reply(call_id, {"tokens": self._engine.flush(namespace)}))
            case Audit(call_id):
                self._send(Reply(call_id, self._engine.audit()))
            case Drain():
                self._draining = True

    def _submit(self, request: Request) -> None:
        """Queues it, or ends each of its choices at once."""
        try:
            self._engine.add_request(request)
        except Exception as error:
            rejected = isinstance(error, RequestError)
            text = str(error) if rejected else f"{type(error).__name__}: {error}"
            self._rejected += [
                SequenceOutput(
                    request.request_id, i, [], finish_reason="error", error=text, rejected=rejected
                )
                for i in range(request.n)
            ]


def main() -> int:
    """0 after a drain, 1 after a Fatal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    frame = read_frame(os.fdopen(0, "rb", buffering=0, closefd=False))
    if frame is None:
        return 0  # the parent went away at once
    setup = msgspec.msgpack.decode(frame, type=Setup)
    parent = Parent(fd=0)
    parent.watch()
    heartbeat = Heartbeat(Path(setup.directory) / "heartbeat").start()
    with os.fdopen(int(sys.argv[1]), "wb") as pipe:

        def tell(event: StartEvent) -> None:
            write_frame(pipe, encode(event))

        try:
            engine = build_engine(
                setup.config, lambda stage, done, total: tell(Loading(stage, done, total))
            )
            server = EngineServer(engine, Path(setup.directory), heartbeat, parent)
        except Exception as error:
            tell(Fatal(type(error).__name__, str(error)))
            return 1
        tell(Ready(engine.info))
    return serve(server)


def serve(server: EngineServer) -> int:
    """Runs to the end and says what it was."""
    try:
        server.run()
    except Exception as error:
        logger.exception("the engine ends")
        server.fatal(error)
        return 1
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
