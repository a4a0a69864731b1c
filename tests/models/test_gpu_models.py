"""Models on a GPU against the same checkpoint in fp32 on the CPU; what loading costs; graphs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny_checkpoint import make_checkpoint

from radix_mla.attention.metadata import LatentWeights
from radix_mla.config import EngineConfig, detect_hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.models.checkpoint import load_model
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.fp8_weight import FP8
from radix_mla.models.hf_config import ModelConfig

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
# True head dims and whole blocks, little else.
WORDS: dict[str, Any] = {"hidden": 256, "intermediate": 256, "moe_intermediate": 128, "heads": 16}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "v2": {"arch": "v2", "shared_experts": 2},
    "v3": {"arch": "v3", "q_lora": 128},
    "glm": {"arch": "glm", "nope": 192, "v": 256, "q_lora": 128, "groups": 1, "top_groups": 1},
    "fp8": {"arch": "v3", "q_lora": 128, "fp8": True},
}


def runner_of(model: DeepseekForCausalLM, device: str, dtype: str) -> ModelRunner:
    config = EngineConfig(model="", device=device, dtype=dtype, kv_cache_tokens=4096).resolve(  # type: ignore[arg-type]
        model.config, detect_hardware(device)
    )
    return ModelRunner(model, make_pool(model.config, config), config)


def logits_of(runner: ModelRunner, tokens: np.ndarray) -> torch.Tensor:
    """Of a prefill in two chunks, the second on context, and of the last token as a decode."""
    size = runner.pool.page_size
    pages = np.arange(-(-len(tokens) // size), dtype=np.int32)
    out, last = [], len(tokens) - 1
    for step, (start, stop) in enumerate([(0, 100), (100, last), (last, len(tokens))]):
        table = pages[: -(-stop // size)]
        chunk = Chunk(tokens[start:stop], start, table, stop - start, stop - start == 1)
        out.append(runner.execute(StepPlan(step, [chunk], [])).logits.float().cpu())
    return torch.cat(out)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits(name: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype="bf16", **WORDS | CHECKPOINTS[name])
    config = ModelConfig.from_dir(path)
    tokens = np.random.default_rng(0).integers(0, 256, 200, dtype=np.int32)

    def logits(device: str, dtype: str, **words: Any) -> torch.Tensor:
        kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
        model = load_model(path, config, dtype=kinds[dtype], device=device, **words)
        return logits_of(runner_of(model, device, dtype), tokens)

    def error(got: torch.Tensor) -> float:
        """Median over tokens: where routing turns over, a token has a large one of its own."""
        return float(((got - exact).norm(dim=1) / exact.norm(dim=1)).median())

    exact = logits("cpu", "fp32")
    plain = error(logits("cpu", "bf16"))
    if name == "fp8":  # rounds the products' inputs too
        plain = max(plain, error(logits("cpu", "fp32", fused=True, fp8=True)))
    got = error(logits(GPU, "bf16"))
    print(f"{name}: relative error {got:.5f} on the GPU, {plain:.5f} plain")
    assert got <= 2 * plain + 1e-4
    if name == "v3":
        assert error(logits(GPU, "fp32")) < 1e-4


class _Context:
    """A step whose attention is of each token to itself alone: no plan, no backend."""

    def __init__(self, num: int, layers: int) -> None:
        self.positions = torch.arange(num, device=GPU)
        self.slots = torch.arange(num, device=GPU)
        pools = torch.zeros(layers, num, 576, dtype=torch.bfloat16, device=GPU)
        self.pool = SimpleNamespace(layer=lambda index: pools[index])

    def attend(
        self, layer: int, q: torch.Tensor, rows: torch.Tensor, weights: LatentWeights, scale: float
    ) -> torch.Tensor:
        return torch.einsum("tl,hvl->thv", rows[:, :512], weights.w_uv) * (1 + q.mean() * scale)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("num", [3, 40])
def test_forward_is_one_graph_without_a_sync(name: str, num: int, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype="bf16", **WORDS | CHECKPOINTS[name])
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype=torch.bfloat16, device=GPU)
    ctx: Any = _Context(num, config.num_hidden_layers)
    tokens = torch.randint(0, 256, (num,), device=GPU)

    def forward() -> torch.Tensor:
        return model.compute_logits(model(tokens, ctx))

    forward()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    tokens.copy_(torch.randint(0, 256, (num,), device=GPU))
    graph.replay()
    torch.testing.assert_close(out, forward())


def test_loading_holds_no_second_copy(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path, dtype="bf16", hidden=1024, moe_intermediate=1024, experts=16, shared_experts=2
    )
    config = ModelConfig.from_dir(path)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model = load_model(path, config, dtype=torch.bfloat16, device=GPU)
    weights = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    assert weights > 16 * 3 * 1024 * 1024 * 2
    assert peak < 1.1 * weights
    assert all(param.is_cuda for param in model.parameters())


@pytest.mark.parametrize("fp8", [False, True])
def test_dummy_weights_are_made_on_the_gpu(fp8: bool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, dtype="bf16", fp8=fp8, q_lora=128, **WORDS)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype=torch.bfloat16, device=GPU, load_format="dummy")
    experts: Any = model.get_submodule("model.layers.1.mlp.experts")
    assert (experts.gate_up_proj.dtype == FP8) == fp8
    wide = experts.gate_up_proj.float()
    if fp8:
        scale = experts.gate_up_proj_scale_inv
        wide *= scale.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)
    assert float(wide.std()) == pytest.approx(256**-0.5, rel=0.02)
    tokens = np.arange(120, dtype=np.int32)
    assert bool(logits_of(runner_of(model, GPU, "bf16"), tokens).isfinite().all())
