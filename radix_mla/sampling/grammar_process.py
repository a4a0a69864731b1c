"""The engine's side of grammar_worker.py: starts the process, sends it jobs, takes its answers."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from radix_mla.errors import EngineError
from radix_mla.request import Grammar
from radix_mla.sampling.grammar_worker import Setup

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0


class WorkerProcess:
    """Runs as long as its owner does not close it; what is being compiled then fails."""

    def __init__(self, setup: Setup) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[int, Future[bytes]] = {}
        self._num_jobs = 0
        self._ready: Future[dict[str, Any]] = Future()
        self.is_dead = False
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "radix_mla.sampling.grammar_worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                },
            )
        self._socket = mine
        self._connection = Connection(os.dup(mine.fileno()))
        self._connection.send_bytes(setup.to_json())
        self._reader = threading.Thread(target=self._read, name="grammar-replies", daemon=True)
        self._reader.start()

    def wait_ready(self) -> dict[str, Any]:
        """What it says about the vocabulary. Raises EngineError, with the worker's reason."""
        return self._ready.result(_START_TIMEOUT_S)

    def compile(self, grammar: Grammar) -> bytes:
        """The child's answer. Raises EngineError when the worker is gone."""
        future: Future[bytes] = Future()
        with self._lock:
            if self.is_dead:
                raise EngineError("the grammar compiler is gone")
            self._num_jobs += 1
            job = self._num_jobs
            self._jobs[job] = future
            self._connection.send_bytes(json.dumps([job, grammar.kind, grammar.text]).encode())
        return future.result()

    def close(self) -> None:
        """Waits until the worker and its children are gone."""
        with contextlib.suppress(OSError):  # it is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()

    def _read(self) -> None:
        error = EngineError("the grammar compiler is gone")
        try:
            answer = json.loads(self._connection.recv_bytes())
            if "error" in answer:
                error = EngineError(f"the grammar compiler cannot start: {answer['error']}")
                raise error
            self._ready.set_result(answer)
            while True:
                message = self._connection.recv_bytes()
                with self._lock:
                    future = self._jobs.pop(int.from_bytes(message[:8], "little"))
                future.set_result(message[8:])
        except (EOFError, OSError, EngineError):
            self._die(error)

    def _die(self, error: EngineError) -> None:
        with self._lock:
            self.is_dead = True
            jobs, self._jobs = self._jobs, {}
            self._connection.close()
            self._socket.close()
        if not self._ready.done():
            self._ready.set_exception(error)
        for future in jobs.values():
            future.set_exception(error)
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
