"""`Parent`: the process that started this one, seen through a pipe that it holds open."""

from __future__ import annotations

import os
import select
import threading

_CHECK_S = 2.0
_GRACE_S = 2.0  # for the main thread to see it and leave; it may be loading, or hung in a step


class Parent:
    """`fd` reaches its end when the parent ends or lets go of it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = os.getppid()
        self._gone = threading.Event()

    def is_gone(self) -> bool:
        """Does not block; true for good once it was."""
        if not self._gone.is_set():
            self._look(0.0)
        return self._gone.is_set()

    def watch(self) -> None:
        """From now on this process ends a few seconds after the parent at the latest: no orphan."""
        threading.Thread(target=self._watch, name="parent-watch", daemon=True).start()

    def _watch(self) -> None:
        while not self._gone.is_set():
            self._look(_CHECK_S)
        threading.Event().wait(_GRACE_S)
        os._exit(0)

    def _look(self, timeout_s: float) -> None:
        readable, _, _ = select.select([self.fd], [], [], timeout_s)
        if os.getppid() != self._pid or (readable and not os.read(self.fd, 4096)):
            self._gone.set()
