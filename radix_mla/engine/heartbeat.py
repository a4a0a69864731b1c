"""Heartbeat: a page of memory shared by the engine process and whoever watches it.

A thread of the engine beats four times a second, so a stopped or dead process goes silent; the
main thread marks when it began what it is doing, so a stuck step shows its age while a long chain
of healthy ones does not. Times are time.monotonic(), one clock for all processes of a host.
"""

from __future__ import annotations

import mmap
import threading
import time
from pathlib import Path
from typing import Self

import numpy as np

_BEAT_S = 0.25
_BEAT, _BUSY_SINCE = 0, 1  # indices; BUSY_SINCE 0.0: idle
_NUM_BYTES = 16


class Heartbeat:
    """The engine's side."""

    def __init__(self, path: Path) -> None:
        self._values = _map(path)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> Self:
        self._values[_BEAT] = time.monotonic()
        self._thread.start()
        return self

    def busy(self) -> None:
        """A step, or another piece of work, begins now."""
        self._values[_BUSY_SINCE] = time.monotonic()

    def idle(self) -> None:
        self._values[_BUSY_SINCE] = 0.0

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(_BEAT_S):
            self._values[_BEAT] = time.monotonic()


class Pulse:
    """The watcher's side. `create` makes the file that Heartbeat maps."""

    def __init__(self, path: Path) -> None:
        self._values = _map(path)

    @classmethod
    def create(cls, path: Path) -> Self:
        path.write_bytes(bytes(_NUM_BYTES))
        return cls(path)

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since the last beat; None before the first."""
        beat = float(self._values[_BEAT])
        return max(0.0, time.monotonic() - beat) if beat else None

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0.0 while idle."""
        since = float(self._values[_BUSY_SINCE])
        return max(0.0, time.monotonic() - since) if since else 0.0


def _map(path: Path) -> np.ndarray:
    """float64 [2] over the file; aligned 8-byte stores, so a reader never sees half of one."""
    with path.open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), _NUM_BYTES), dtype=np.float64)
