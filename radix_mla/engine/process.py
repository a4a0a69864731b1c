"""EngineHandle: the parent's hold on an engine process (serve.py is the other side).

    handle = EngineHandle.start(config)
    info = handle.wait_ready(progress)      # raises ConfigError, ModelError or EngineDead
    ...                                     # bind PUSH on handle.command_address and PULL on
    ...                                     # handle.event_address; talk in engine/ipc.py
    handle.close()

Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from radix_mla import errors
from radix_mla.config import EngineConfig
from radix_mla.engine.heartbeat import Pulse
from radix_mla.engine.ipc import (
    Fatal,
    Loading,
    Ready,
    Setup,
    decode_start_event,
    read_frame,
    write_frame,
)
from radix_mla.errors import EngineDead, RadixMlaError

# Idle OpenMP threads sleep instead of spinning: they share the cores with the API process. On a
# busy 2-core machine a spinning decode step took four times as long. The user's setting wins.
_WAITING = {"GOMP_SPINCOUNT": "3000"}

# (stage, done, total), as build.Progress
Progress = Callable[[str, int, int], None]


class EngineHandle:
    """One engine process. The process ends with its parent, and at the latest with `close`."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, start_fd: int) -> None:
        self._process = process
        self._directory = directory
        self._start_pipe = os.fdopen(start_fd, "rb", buffering=0)
        self._pulse = Pulse(directory / "heartbeat")
        self._fatal: str | None = None
        self.info: dict[str, Any] = {}

    @classmethod
    def start(cls, config: EngineConfig) -> Self:
        """Starts the process and returns at once."""
        directory = Path(tempfile.mkdtemp(prefix="radix-mla-"))  # mode 0700
        Pulse.create(directory / "heartbeat")
        read_fd, write_fd = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "radix_mla.engine.serve", str(write_fd)],
                stdin=subprocess.PIPE,
                pass_fds=(write_fd,),
                env={
                    **_WAITING,
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
            )
        except OSError:
            os.close(read_fd)
            shutil.rmtree(directory)
            raise
        finally:
            os.close(write_fd)
        handle = cls(process, directory, read_fd)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead already: wait_ready says so
            setup = Setup(config, str(directory))
            write_frame(process.stdin, msgspec.msgpack.encode(setup))
        return handle

    def wait_ready(
        self, progress: Progress | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Blocks until the engine is warm; returns Ready.info.

        Raises what ended the start: ConfigError, ModelError (as in the engine), else EngineDead;
        TimeoutError after `timeout_s`. The process is closed then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                match self._next_start_event(deadline):
                    case Loading(stage, done, total):
                        if progress is not None:
                            progress(stage, done, total)
                    case Ready(info):
                        self.info = info
                        self._start_pipe.close()
                        return info
                    case Fatal(kind, message):
                        self._fatal = f"{kind}: {message}"
                        raise _rebuild(kind, message)
        except BaseException:
            self.close(grace_s=0.5)
            raise

    def _next_start_event(self, deadline: float | None) -> Loading | Ready | Fatal:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([self._start_pipe], [], [], timeout)[0]:
            raise TimeoutError("the engine did not become ready in time")
        frame = read_frame(self._start_pipe)
        if frame is None:
            self._process.wait()
            raise EngineDead(f"the engine ended while it started: {self.exit_cause}")
        return decode_start_event(frame)

    @property
    def command_address(self) -> str:
        """For a PUSH socket that binds; the engine's PULL connects."""
        return f"ipc://{self._directory / 'commands'}"

    @property
    def event_address(self) -> str:
        """For a PULL socket that binds; the engine's PUSH connects. Ready comes first on it."""
        return f"ipc://{self._directory / 'events'}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_cause(self) -> str | None:
        """Why the process ended, in words; None while it runs."""
        status = self._process.poll()
        if status is None:
            return None
        if self._fatal is not None:
            return self._fatal
        if status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"killed by {name}{hint}"
        return f"exit status {status}"

    @property
    def heartbeat_age_s(self) -> float | None:
        """Seconds since the engine last beat: it beats 4 times a second; None before the first."""
        return self._pulse.heartbeat_age_s

    @property
    def step_age_s(self) -> float:
        """Seconds since the running step began; 0.0 while idle."""
        return self._pulse.step_age_s

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the process to end by itself, as it does after Drain; whether it did."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self, grace_s: float = 5.0) -> None:
        """Ends the process: at once if it listens, by force after `grace_s`. Idempotent.

        To let it finish what it has, send Drain and `wait` first.
        """
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # its end is the signal to go
        if not self.wait(grace_s):
            self._process.kill()
            self._process.wait()
        self._start_pipe.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def _rebuild(kind: str, message: str) -> RadixMlaError:
    """The engine's error as one of ours, where it has a constructor of one message."""
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, errors.ModelError | errors.ConfigError):
        return known(message)
    return EngineDead(f"{kind}: {message}")
