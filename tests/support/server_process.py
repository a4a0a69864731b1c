"""A real server in a process of its own on a free loopback port, for end-to-end tests and bench."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(condition: Callable[[], bool], timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)


class ServerProcess:
    """`radix-mla serve MODEL FLAGS`, ready when the constructor returns.

    `without`: packages that it shall not find, as where they are not installed; without xgrammar no
    compiler for grammars is started beside the engine, which takes seconds of a core.
    Raises RuntimeError with the server's output if it exits or is not ready in time.
    """

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        without: Sequence[str] = (),
        ready_s: float = 60,
        log: Path | None = None,
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = (
            log or Path(os.environ.get("TMPDIR", "/tmp")) / f"radix-mla-{self.port}.log"
        ).open("w+")
        command = [sys.executable, "-m", "server", "serve", str(model), "--port", str(self.port)]
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *flags],
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_hide(without)},
        )
        try:
            self._wait_ready(ready_s)
        except BaseException:
            self.kill()
            raise
        self.ready_after_s = time.monotonic() - self.started

    def _wait_ready(self, ready_s: float) -> None:
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited {self.process.returncode}:\n{self.output()}")
            try:
                with urllib.request.urlopen(f"{self.url}/ready") as reply:
                    if reply.status == 200:
                        return
            except urllib.error.HTTPError as loading:
                loading.close()  # it holds the connection
            except OSError:
                pass
            if time.monotonic() - self.started > ready_s:
                raise RuntimeError(f"server not ready after {ready_s} s:\n{self.output()}")
            time.sleep(0.05)  # polling a port has no event to wait for

    def output(self) -> str:
        self._log.flush()
        self._log.seek(0)
        return self._log.read()

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded JSON (or text) of one call; errors are returned, not raised."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        request.add_header("content-type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                status, raw = reply.status, reply.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except json.JSONDecodeError:
            return status, raw.decode()

    def get(self, path: str) -> Any:
        status, value = self.request("GET", path)
        assert status == 200, (path, status, value)
        return value

    def post(self, path: str, **body: Any) -> Any:
        status, value = self.request("POST", path, body)
        assert status == 200, (path, status, value)
        return value

    def open_stream(self, path: str, **body: Any) -> http.client.HTTPConnection:
        """Asks for a stream; the caller reads and closes it, or just closes it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body["stream"] = True
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        return connection

    def metrics(self) -> Metrics:
        return Metrics.parse(self.get("/metrics"))

    def terminate(self, timeout_s: float = 30) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        self._log.close()
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _hide(packages: Sequence[str]) -> dict[str, str]:
    """What lets a process and its children find no such packages."""
    folder = Path(__file__).parent / "without"
    return {"PYTHONPATH": str(folder), "TEST_WITHOUT": ",".join(packages)} if packages else {}


class Metrics:
    """One scrape: samples by name and labels."""

    def __init__(self, samples: list[tuple[str, dict[str, str], float]]) -> None:
        self.samples = samples

    @classmethod
    def parse(cls, text: str) -> Metrics:
        from prometheus_client.parser import text_string_to_metric_families

        return cls(
            [
                (sample.name, dict(sample.labels), sample.value)
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            ]
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of the samples `radix_mla_<name>` whose labels include `labels`."""
        return sum(value for value in self._select(name, labels))

    def _select(self, name: str, labels: dict[str, str]) -> Iterator[float]:
        for sample, have, value in self.samples:
            if sample == f"radix_mla_{name}" and labels.items() <= have.items():
                yield value

    def by(self, name: str, label: str) -> dict[str, float]:
        out: dict[str, float] = {}
        for sample, have, value in self.samples:
            if sample == f"radix_mla_{name}":
                out[have[label]] = out.get(have[label], 0.0) + value
        return out
