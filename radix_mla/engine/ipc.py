"""Messages between the API process and the engine process: tagged msgspec structs over zmq.

API → engine (commands): Submit, Abort, Flush, Audit, Drain.
Engine → API (events):   Ready, Outputs, Reply, Fatal.
Engine → parent while it starts (on a pipe): Loading, then Ready or Fatal.
One `Outputs` a step carries everything that happened in it (values: engine/outputs.py).
"""

from __future__ import annotations

import struct
from typing import IO, Any

import msgspec

from radix_mla.config import EngineConfig
from radix_mla.engine.outputs import (
    Admitted,
    EngineStats,
    PrefillProgress,
    SequenceOutput,
    TokenLogprobs,
)
from radix_mla.request import Request

__all__ = [
    "Abort",
    "Admitted",
    "Audit",
    "Command",
    "Drain",
    "EngineStats",
    "Event",
    "Fatal",
    "Flush",
    "Loading",
    "Outputs",
    "PrefillProgress",
    "Ready",
    "Reply",
    "SequenceOutput",
    "Setup",
    "StartEvent",
    "Submit",
    "TokenLogprobs",
    "decode_command",
    "decode_event",
    "decode_start_event",
    "encode",
    "read_frame",
    "write_frame",
]


class Setup(msgspec.Struct):
    """What the parent writes to the engine's stdin. `directory` holds sockets and heartbeat."""

    config: EngineConfig
    directory: str


class Submit(msgspec.Struct, tag=True):
    """Queue a request. The engine answers with Admitted/Token/Finished events in `Outputs`."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """End a request's sequences at the next step; unknown ids are ignored.

    `index` None: all of the request's choices. `reason`: "abort" (client gone) or "stop" (a stop
    string was found in the text); it is the finish reason that is counted.
    """

    request_id: str
    index: int | None = None
    reason: str = "abort"


class Flush(msgspec.Struct, tag=True):
    """Drop the prefix cache (one namespace, or all). Answered by Reply {"tokens": dropped}."""

    call_id: int
    namespace: str | None = None


class Audit(msgspec.Struct, tag=True):
    """Check the cache's invariants. Answered by Reply {"ok": bool, "counts": {...}}."""

    call_id: int


class Drain(msgspec.Struct, tag=True):
    """Finish what is accepted, then exit 0 (no new Submit is sent after this)."""


Command = Submit | Abort | Flush | Audit | Drain


class Loading(msgspec.Struct, tag=True):
    """Progress of the start (on the start-up pipe only): `done` of `total` of a stage."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag=True):
    """Model loaded, pool allocated, warm. `info`: the resolved config, dims and decisions."""

    info: dict[str, Any]


class Outputs(msgspec.Struct, tag=True):
    """Everything that happened in a step (or while idle: stats only)."""

    admitted: list[Admitted]
    sequences: list[SequenceOutput]
    progress: list[PrefillProgress]
    stats: EngineStats


class Reply(msgspec.Struct, tag=True):
    """Answer to Flush or Audit."""

    call_id: int
    value: dict[str, Any]


class Fatal(msgspec.Struct, tag=True):
    """The engine is about to die (or failed to start); `kind` is the exception's class name."""

    kind: str
    message: str


Event = Ready | Outputs | Reply | Fatal
StartEvent = Loading | Ready | Fatal

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)
_start_events = msgspec.msgpack.Decoder(StartEvent)


def encode(message: Command | Event | StartEvent) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Raises ValueError (msgspec.ValidationError, DecodeError) for anything else."""
    command: Command = _commands.decode(data)
    return command


def decode_event(data: bytes) -> Event:
    """Raises ValueError (msgspec.ValidationError, DecodeError) for anything else."""
    event: Event = _events.decode(data)
    return event


def decode_start_event(data: bytes) -> StartEvent:
    """Raises ValueError (msgspec.ValidationError, DecodeError) for anything else."""
    event: StartEvent = _start_events.decode(data)
    return event


def write_frame(file: IO[bytes], data: bytes) -> None:
    """Length (uint32) and data."""
    file.write(struct.pack("<I", len(data)) + data)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """One frame of an unbuffered stream; None at its end."""
    head = _read_exactly(file, 4)
    return None if head is None else _read_exactly(file, int(struct.unpack("<I", head)[0]))


def _read_exactly(file: IO[bytes], size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            return None
        data += piece
    return data
