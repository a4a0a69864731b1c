"""The KV pool's size from a profile run, with an allocator that is a few numbers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.tiny_checkpoint import make_checkpoint

from radix_mla.config import EngineConfig, Hardware, ResolvedConfig
from radix_mla.engine.memory import (
    CudaMemory,
    explain_out_of_memory,
    largest_steps,
    measure_steps,
    size_pool,
)
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import StepPlan
from radix_mla.errors import ConfigError
from radix_mla.models.checkpoint import load_model
from radix_mla.models.hf_config import ModelConfig

GIB = 1 << 30
LITE = ModelConfig.from_dir(Path(__file__).parents[2] / "configs" / "shapes" / "deepseek-v2-lite")
MACHINE = Hardware("cpu", 64 * GIB, 1, native_bf16=False)


@dataclass
class FakeMemory:
    total: int = 140 * GIB
    free_bytes: int = 100 * GIB
    now: int = 40 * GIB
    most: int = 0

    def free(self) -> int:
        return self.free_bytes

    def allocated(self) -> int:
        return self.now

    def restart_peak(self) -> None:
        self.most = self.now

    def peak(self) -> int:
        return self.most

    def use(self, num_bytes: int) -> None:
        """A step that holds so much and gives it back."""
        self.most = max(self.most, self.now + num_bytes)


def asked(**knobs: object) -> EngineConfig:
    return EngineConfig(model="", dtype="bf16", **knobs)  # type: ignore[arg-type]


def resolved(**knobs: object) -> ResolvedConfig:
    return asked(**{"kv_cache_tokens": 1 << 20} | knobs).resolve(LITE, MACHINE)


def test_a_step_costs_what_the_worst_of_them_held() -> None:
    memory = FakeMemory(most=90 * GIB)  # of the loading, long past
    sizes = iter([3 * GIB, 2 * GIB])
    got = measure_steps(resolved(), 7, lambda plan: memory.use(next(sizes)), memory)
    assert got == 3 * GIB
    assert next(sizes, None) is None


def test_largest_steps_fill_the_budget_and_the_workspace() -> None:
    config = resolved(max_num_batched_tokens=2048, workspace_tokens=32_768, max_num_seqs=256)
    long, wide = largest_steps(config, dummy_page=9)
    assert long.num_tokens == wide.num_tokens == 2048
    assert [chunk.start for chunk in long.chunks] == [32_768]
    assert len(wide.chunks) == 256
    for chunk in (*long.chunks, *wide.chunks):
        assert chunk.num_logits == 1
        assert set(chunk.page_table.tolist()) == {9}
        rows = len(chunk.page_table) * config.page_size
        assert 0 <= rows - chunk.start - len(chunk.tokens) < config.page_size


def test_largest_steps_stay_inside_max_model_len() -> None:
    config = resolved(max_model_len=1000, max_num_batched_tokens=4096, max_num_seqs=2)
    long, wide = largest_steps(config, dummy_page=0)
    assert [(chunk.start, len(chunk.tokens)) for chunk in long.chunks] == [(0, 1000)]
    assert [len(chunk.tokens) for chunk in wide.chunks] == [1000, 1000]


def test_the_runner_takes_the_largest_steps_on_a_pool_of_next_to_nothing(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = make_checkpoint(tmp_path)
    model = ModelConfig.from_dir(folder)
    config = EngineConfig(
        model="",
        dtype="fp32",
        kv_cache_tokens=4096,
        max_num_batched_tokens=128,
        workspace_tokens=256,
        max_num_seqs=4,
    ).resolve(model, MACHINE)
    pool = make_pool(model, EngineConfig(model="", kv_cache_tokens=32).resolve(model, MACHINE))
    runner = ModelRunner(load_model(folder, model, dtype=torch.float32, device="cpu"), pool, config)
    results = []

    def run(plan: StepPlan) -> None:
        results.append(runner.execute(plan))

    measure_steps(config, pool.dummy_page, run, FakeMemory())
    assert [len(result.logits) for result in results] == [1, 4]


def test_pages_fill_what_a_step_and_the_reserve_leave() -> None:
    memory = FakeMemory()
    config = size_pool(asked(), LITE, MACHINE, step_bytes=5 * GIB, memory=memory)
    used = (config.num_pages + 1) * config.page_size * config.kv_row_bytes
    room = 100 * GIB - 5 * GIB - int(140 * GIB * 0.02)
    assert 0 <= room - used < config.page_size * config.kv_row_bytes
    assert config.max_model_len == LITE.max_position_embeddings
    assert "a step takes 5.00" in config.decisions[-1]
    assert config.decisions[-1].startswith(f"kv_cache_tokens={config.kv_tokens}: ")
    assert sum(line.startswith("kv_cache_tokens=") for line in config.decisions) == 1


def test_memory_for_graphs_is_set_aside() -> None:
    plain, graphs = (
        size_pool(asked(), LITE, MACHINE, step_bytes=0, memory=FakeMemory(), graph_bytes=size)
        for size in (0, 8 * GIB)
    )
    lost = (plain.num_pages - graphs.num_pages) * plain.page_size * plain.kv_row_bytes
    assert lost == pytest.approx(8 * GIB, rel=1e-3)


def test_a_small_pool_bounds_max_model_len() -> None:
    memory = FakeMemory(free_bytes=4 * GIB)
    config = size_pool(asked(), LITE, MACHINE, step_bytes=0, memory=memory)
    assert config.max_model_len == config.kv_tokens - config.page_size


def test_a_named_size_stays_if_it_fits() -> None:
    words = {"step_bytes": 5 * GIB, "memory": FakeMemory()}
    fits = size_pool(asked(kv_cache_tokens=4096), LITE, MACHINE, **words)  # type: ignore[arg-type]
    assert fits.kv_tokens == 4096
    most = size_pool(asked(), LITE, MACHINE, **words).kv_tokens  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"kv_cache_tokens {most + 64} .* at most {most} do"):
        size_pool(asked(kv_cache_tokens=most + 64), LITE, MACHINE, **words)  # type: ignore[arg-type]


def test_no_room_names_the_knobs() -> None:
    memory = FakeMemory(free_bytes=GIB)
    with pytest.raises(
        ConfigError, match=r"workspace_tokens \(now 32768\).*batched_tokens"
    ) as error:
        size_pool(asked(), LITE, MACHINE, step_bytes=GIB, memory=memory)
    assert "1.00 GiB are free" in str(error.value)


def test_out_of_memory_says_what_to_change() -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
    with (
        pytest.raises(ConfigError, match="while loading the weights") as error,
        explain_out_of_memory(resolved(), "loading the weights"),
    ):
        raise torch.OutOfMemoryError(text)
    for knob in ("kv_cache_tokens", "workspace_tokens", "max_num_batched_tokens"):
        assert knob in str(error.value)
    assert isinstance(error.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_pass() -> None:
    with pytest.raises(ZeroDivisionError), explain_out_of_memory(resolved(), "a step"):
        raise ZeroDivisionError


@pytest.mark.gpu
def test_cuda_memory_counts() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("needs the GPU's memory for itself")
    memory = CudaMemory("cuda:0")
    before = memory.allocated()
    memory.restart_peak()
    tensor = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    assert memory.allocated() - before == tensor.nbytes
    free = memory.free()
    del tensor
    assert memory.peak() - before == 64 << 20
    assert memory.free() - free >= 64 << 20
    assert memory.free() < memory.total
