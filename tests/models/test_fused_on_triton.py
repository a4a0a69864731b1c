"""A fused model's forward through the Triton kernels themselves, interpreted, against the CPU's.

In a process of its own: the interpreter is chosen before triton is imported, and CPU tensors are
made to say that they are on a GPU, which is what the kernels' dispatch asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import json
import sys
from pathlib import Path

import numpy as np
import torch

from radix_mla.config import EngineConfig, Hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.models.checkpoint import load_model
from radix_mla.models.hf_config import ModelConfig
from support.tiny_checkpoint import make_checkpoint

torch.set_num_threads(1)
words = dict(hidden=128, heads=2, nope=32, rope=16, v=32, kv_lora=64, experts=4, shared_experts=2)
prompt = np.random.default_rng(0).integers(0, 256, 21, dtype=np.int32)
pages = np.arange(4, dtype=np.int32)


def logits(path, fused):
    config = ModelConfig.from_dir(path)
    resolved = EngineConfig(model="", dtype="fp32", kv_cache_tokens=256).resolve(
        config, Hardware("cpu", 1 << 30, 1, False)
    )
    model = load_model(path, config, dtype=torch.float32, device="cpu", fused=fused)
    runner = ModelRunner(model, make_pool(config, resolved), resolved)
    torch.Tensor.is_cuda = property(lambda self: fused)
    out = [
        runner.execute(StepPlan(i, [Chunk(prompt[a:b], a, pages, b - a, b - a == 1)], [])).logits
        for i, (a, b) in enumerate([(0, 12), (12, 20), (20, 21)])
    ]
    torch.Tensor.is_cuda = property(lambda self: False)
    return torch.cat(out)


errors = {}
for arch, more in (("v2", dict()), ("v3", dict(groups=2, top_groups=1))):
    path = make_checkpoint(Path(sys.argv[1]) / arch, arch=arch, **words, **more)
    errors[arch] = float((logits(path, True) - logits(path, False)).abs().max())
assert "kernels.triton.moe" in sys.modules and "kernels.triton.latent_write" in sys.modules
print(json.dumps(errors))
"""


def test_logits(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    environ = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests"))),
        "CUDA_VISIBLE_DEVICES": "",
    }
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    errors = json.loads(run.stdout)
    assert errors.keys() == {"v2", "v3"}
    assert all(error < 1e-4 for error in errors.values()), errors
