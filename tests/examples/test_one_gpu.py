"""The example runs as it is, small, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_small(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    run = subprocess.run(
        [sys.executable, "examples/one_gpu.py", "--small", "--output", str(output)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert json.loads(output.read_text()) == result
    assert result["device"] == "cpu"
    (first,) = result["first_token"]
    assert first["cached_tokens"] == {"cold": 0, "warm": 1024, "partial": 512}
    assert all(first[f"{kind}_ms"] > 0 for kind in ("cold", "warm", "partial"))
    assert [row["batch"] for row in result["decode"]] == [1, 4]
    assert all(row["tokens_per_s"] > 0 for row in result["decode"])
