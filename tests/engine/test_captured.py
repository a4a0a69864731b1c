"""Small steps with fixed shapes: padded, captured and replayed, they give what eager steps give."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fake_flashmla import FakeFlashMLA
from support.mla_case import make_case
from support.tiny_checkpoint import make_checkpoint

from radix_mla.attention.backend import BackendPair
from radix_mla.attention.backends import flashmla_kernel
from radix_mla.attention.backends.flashmla import FlashMLABackend
from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.backends.triton import TritonBackend
from radix_mla.attention.metadata import RaggedBatch
from radix_mla.attention.mla import mla_dims
from radix_mla.attention.select import setting_of
from radix_mla.attention.workspace import MLADims, Workspace
from radix_mla.config import EngineConfig, Hardware, detect_hardware
from radix_mla.engine.captured import CapturedSteps, StepOutputs, bucket_sizes
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.engine.step_tokens import StepTokens
from radix_mla.models.checkpoint import load_model
from radix_mla.models.hf_config import ModelConfig

PROMPT = np.random.default_rng(0).integers(2, 256, 90).astype(np.int32)
WORDS = {"hidden": 128, "heads": 2, "nope": 32, "rope": 16, "v": 32, "kv_lora": 64, "experts": 4}


@pytest.mark.parametrize("largest", [1, 5, 64, 300, 512])
def test_buckets_grow_with_little_padding(largest: int) -> None:
    sizes = bucket_sizes(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 40
    for size, following in itertools.pairwise(sizes):
        assert following - size <= max(8, size // 7)


def chunk(start: int, stop: int, first_page: int, page_size: int, *, logits: int = 1) -> Chunk:
    pages = np.arange(first_page, first_page - (-stop // page_size), dtype=np.int32)
    is_decode = stop - start == 1
    return Chunk(PROMPT[start:stop], start, pages, logits, is_decode=is_decode)


def steps(page_size: int) -> list[StepPlan]:
    """Two prompts that share nothing, then mixed and decode steps of 1 to 3 sequences."""
    far = 200 // page_size
    plans = [
        [chunk(0, 40, 0, page_size), chunk(0, 7, far, page_size, logits=0)],
        [chunk(40, 41, 0, page_size), chunk(7, 20, far, page_size, logits=3)],
        [chunk(41, 42, 0, page_size), chunk(20, 21, far, page_size)],
        [chunk(21, 22, far, page_size)],
        [chunk(42, 49, 0, page_size, logits=7), chunk(22, 23, far, page_size)],
    ]
    return [StepPlan(step_id=i, chunks=chunks, copies=[]) for i, chunks in enumerate(plans)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), arch="v3", groups=1, top_groups=1, **WORDS
    )


def test_padded_steps_equal_eager_ones(folder: Path) -> None:
    """Without a graph, in Triton's interpreter, on a pool that is NaN where nothing is written."""
    pytest.importorskip("triton")
    config = ModelConfig.from_dir(folder)
    model = load_model(folder, config, dtype=torch.float32, device="cpu")
    resolved = EngineConfig(model="", dtype="fp32", kv_cache_tokens=512, page_size=16).resolve(
        config, Hardware("cpu", 1 << 30, 1, native_bf16=False)
    )
    runners = [ModelRunner(model, make_pool(config, resolved), resolved) for _ in range(2)]
    for layer in range(config.num_hidden_layers):
        for runner in runners:
            runner.pool.layer(layer).fill_(float("nan"))
            runner.pool.layer(layer)[-16:] = 0.0  # the dummy page
    eager, padded = runners
    backend = TritonBackend(setting_of(resolved, mla_dims(config)), num_programs=3)
    captured = CapturedSteps(
        padded._forward,
        backend,
        padded.pool,
        padded.workspace,
        max_tokens=48,
        max_logits=8,
        vocab_size=config.vocab_size,
    )
    for plan in steps(16):
        batch = RaggedBatch.of(plan.chunks, 16)
        want = eager.execute(plan)
        tokens = np.concatenate([c.tokens for c in plan.chunks]).astype(np.int64)
        asked = [
            range(batch.cu_q[i + 1] - c.num_logits, batch.cu_q[i + 1])
            for i, c in enumerate(plan.chunks)
        ]
        rows = np.concatenate([np.array(r, dtype=np.int64) for r in asked])
        places = np.arange(0, len(tokens), 2)  # these come from the step before
        known = tokens.copy()
        known[places] = 0
        drawn = torch.from_numpy(tokens[places])
        got = captured.run(batch, StepTokens(known, places, drawn), rows)
        assert got is not None
        torch.testing.assert_close(got.logits, want.logits, atol=1e-4, rtol=1e-4)
        assert got.tokens_finite.all()
        assert got.logits_finite.all()
    too_long = RaggedBatch.of([chunk(0, 60, 0, 16)], 16)
    assert captured.run(too_long, StepTokens(np.zeros(60, dtype=np.int64)), np.array([59])) is None


@pytest.mark.parametrize("heads", [64, 128])
def test_more_sequences_than_runs_go_the_eager_way(
    heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many decodes and a short prefill, with a backend that shares nothing."""
    monkeypatch.setattr(flashmla_kernel, "find", lambda: ("", FakeFlashMLA()))
    dims = MLADims(num_heads=heads, latent=32, nope=16, rope=16, value=16)
    case = make_case([(1, 3)] * 200 + [(2, 3)], dims=dims, page_size=64)
    setting = replace(case.setting(), max_num_seqs=256, max_tokens=512, max_pages=4)
    workspace = Workspace(
        dims,
        context_rows=64,
        step_tokens=512,
        pad_heads=False,
        dtype=torch.float32,
        device="cpu",
    )

    def forward(*_: object) -> StepOutputs:
        raise AssertionError("no family has room for it")

    steps = CapturedSteps(
        forward,
        BackendPair(TorchBackend("cpu"), FlashMLABackend(setting)),
        case.pool,
        workspace,
        max_tokens=512,
        max_logits=256,
        vocab_size=8,
    )
    tokens = StepTokens(np.zeros(case.batch.cu_q[-1], dtype=np.int64))
    assert steps.run(case.batch, tokens, np.arange(201)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "flashmla"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_graphs_equal_eager_steps(
    tmp_path_factory: pytest.TempPathFactory, backend: str, page_size: int
) -> None:
    if backend == "flashmla":
        pytest.importorskip("flash_mla")
        if page_size != 64:
            pytest.skip("FlashMLA reads pages of 64")
    folder = make_checkpoint(
        tmp_path_factory.mktemp("model"), arch="v3", heads=16, groups=1, top_groups=1
    )
    config = ModelConfig.from_dir(folder)
    asked = EngineConfig(
        model="",
        kv_cache_tokens=512,
        page_size=page_size,
        attention_backend=backend,
        attention_form="absorbed",
    )
    resolved = asked.resolve(config, detect_hardware("cuda:0"))
    model = load_model(folder, config, dtype=torch.bfloat16, device="cuda:0")
    eager, graphs = (ModelRunner(model, make_pool(config, resolved), resolved) for _ in range(2))
    graphs.warm_up()
    assert graphs._captured is not None
    for plan in steps(page_size) * 2:
        want, got = eager.execute(plan), graphs.execute(plan)
        assert got.rows_finite.all()
        assert want.rows_finite.all()
        assert got.forward_s > 0
        difference = (got.logits - want.logits).abs().max()
        assert difference < 0.05 * want.logits.abs().max(), difference
