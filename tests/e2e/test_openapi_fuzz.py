"""The server and its /openapi.json agree on whatever is sent: schemathesis, as a program.

Its checks: no 5xx, only documented statuses, types and shapes, what contradicts the document is
refused, keys are asked for. What is off, and why: fuzz/schemathesis.toml.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server_process import DEMO, ServerProcess

pytest.importorskip("schemathesis")
HERE = Path(__file__).parent / "fuzz"
KEY = "fuzz"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--kv-cache-tokens", "16384", "--max-model-len", "256", "--api-key", KEY)
    with ServerProcess(DEMO, *flags, "--served-model-name", "demo") as server:
        yield server


def fuzz(server: ServerProcess, folder: Path, *flags: str) -> dict[str, Any]:
    """schemathesis' report; its output is shown when the test fails."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "schemathesis.cli"]
    command += ["--config-file", str(HERE / "schemathesis.toml")]
    command += ["run", f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}"]
    command += ["--seed", "1", "--report", "json", "--report-json-path", str(report), *flags]
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "hooks.py")}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(report.read_text())
    assert (done.returncode, found["failures"], found["errors"]) == (0, [], [])
    assert found["operations"]["tested"] == found["operations"]["total"] >= 19
    assert server.request("GET", "/health")[0] == 200
    return found


def test_three_hundred_cases(server: ServerProcess, tmp_path: Path) -> None:
    """The border values of every field: ten times the cases in less time than random ones."""
    found = fuzz(server, tmp_path, "--phases", "coverage")
    assert found["test_cases"]["generated"] >= 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_five_thousand_cases(server: ServerProcess, tmp_path: Path) -> None:
    found = fuzz(server, tmp_path, "--max-examples", "200")
    assert found["test_cases"]["generated"] >= 5000
