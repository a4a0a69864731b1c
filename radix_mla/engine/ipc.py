"""Messages between the API process and the engine process: tagged msgspec structs over zmq.

API → engine (commands): Submit, Abort, Flush, Audit, Drain.
Engine → API (events):   Ready, Outputs, Reply, Fatal.
One `Outputs` a step carries everything that happened in it (values: engine/outputs.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

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
    "Outputs",
    "PrefillProgress",
    "Ready",
    "Reply",
    "SequenceOutput",
    "Submit",
    "TokenLogprobs",
]


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
