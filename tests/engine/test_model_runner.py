"""`ModelRunner` on a tiny model: logits do not depend on pages, chunks, forms or neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from support.tiny_checkpoint import make_checkpoint

from radix_mla.config import AttentionForm, EngineConfig, Hardware
from radix_mla.engine.model_runner import ModelRunner, make_pool
from radix_mla.engine.step import Chunk, StepPlan, StepResult
from radix_mla.models.checkpoint import load_model
from radix_mla.models.deepseek import DeepseekForCausalLM
from radix_mla.models.hf_config import ModelConfig

NUM_TOKENS = 150
TOKENS = np.random.default_rng(0).integers(2, 256, NUM_TOKENS).astype(np.int32)


class Copy(NamedTuple):
    src_page: int
    dst_page: int
    num_rows: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekForCausalLM:
    torch.set_num_threads(1)
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("model"), arch="v3")
    config = ModelConfig.from_dir(folder)
    return load_model(folder, config, dtype=torch.float32, device="cpu")


def make_runner(
    model: DeepseekForCausalLM,
    *,
    page_size: int = 16,
    form: AttentionForm = "auto",
    workspace: int = 4096,
    kv_dtype: str = "fp32",
) -> ModelRunner:
    """Over a pool of 512 tokens that is NaN everywhere."""
    assert kv_dtype in ("fp32", "bf16")
    config = EngineConfig(
        model="tiny",
        page_size=page_size,
        kv_cache_tokens=512,
        attention_form=form,
        workspace_tokens=workspace,
        max_num_batched_tokens=400,
        kv_dtype="bf16" if kv_dtype == "bf16" else "fp32",
    ).resolve(model.config, Hardware("cpu", 1 << 30, 1, native_bf16=False))
    pool = make_pool(model.config, config)
    for layer in range(pool.num_layers):
        pool.layer(layer).fill_(float("nan"))
    return ModelRunner(model, pool, config)


def chunk(
    start: int,
    stop: int,
    pages: np.ndarray,
    page_size: int,
    *,
    num_logits: int | None = None,
    tokens: np.ndarray = TOKENS,
    decode: bool = False,
) -> Chunk:
    asked = stop - start if num_logits is None else num_logits
    return Chunk(tokens[start:stop], start, pages[: -(-stop // page_size)], asked, is_decode=decode)


def run(runner: ModelRunner, *chunks: Chunk, copies: tuple[Copy, ...] = ()) -> StepResult:
    return runner.execute(StepPlan(step_id=1, chunks=list(chunks), copies=list(copies)))


def scattered(page_size: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(512 // page_size).astype(np.int32)


@pytest.fixture(scope="module")
def expected(model: DeepseekForCausalLM) -> torch.Tensor:
    """Logits of all tokens, computed in one chunk."""
    result = run(make_runner(model), chunk(0, NUM_TOKENS, np.arange(32, dtype=np.int32), 16))
    assert result.rows_finite.tolist() == [True]
    return result.logits


@pytest.mark.parametrize("form", ["absorbed", "non_absorbed", "one_shot"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("size", [7, 64, NUM_TOKENS])
def test_chunks_pages_and_forms(
    model: DeepseekForCausalLM,
    expected: torch.Tensor,
    size: int,
    page_size: int,
    form: AttentionForm,
) -> None:
    runner = make_runner(model, page_size=page_size, form=form, workspace=50)
    pages = scattered(page_size)
    for start in range(0, NUM_TOKENS, size):
        stop = min(start + size, NUM_TOKENS)
        result = run(runner, chunk(start, stop, pages, page_size))
        torch.testing.assert_close(result.logits, expected[start:stop], atol=1e-4, rtol=0)


def test_token_by_token(model: DeepseekForCausalLM, expected: torch.Tensor) -> None:
    runner, pages = make_runner(model), scattered(16)
    run(runner, chunk(0, 100, pages, 16))
    for position in range(100, 120):
        result = run(runner, chunk(position, position + 1, pages, 16, decode=True))
        torch.testing.assert_close(
            result.logits, expected[position : position + 1], atol=1e-4, rtol=0
        )
        assert result.paths == {"absorbed": 1}


def test_a_mixed_step(model: DeepseekForCausalLM, expected: torch.Tensor) -> None:
    """Decode, chunk with context and cold chunk in one step; logits in chunk order."""
    runner, pages = make_runner(model), scattered(16)
    a, b, c = pages[:10], pages[10:20], pages[20:30]
    run(runner, chunk(0, 90, a, 16, num_logits=0), chunk(0, 40, b, 16, num_logits=0))
    result = run(
        runner,
        chunk(90, 91, a, 16, decode=True),
        chunk(40, 103, b, 16, num_logits=0),
        chunk(0, 150, c, 16, num_logits=2),
    )
    assert result.rows_finite.tolist() == [True, True, True]
    assert sum(result.paths.values()) == 1 + 63 + 150
    want = expected[[90, 148, 149]]
    torch.testing.assert_close(result.logits, want, atol=1e-4, rtol=0)
    rest = run(runner, chunk(103, 150, b, 16))
    torch.testing.assert_close(rest.logits, expected[103:], atol=1e-4, rtol=0)


def test_copies_come_before_the_forward(model: DeepseekForCausalLM, expected: torch.Tensor) -> None:
    """A hit of 25 of 32 rows: the first page is shared, 9 rows of the second are copied."""
    runner = make_runner(model)
    run(runner, chunk(0, 32, np.array([5, 9], dtype=np.int32), 16))
    pages = np.array([5, 2, 7, 8, 20, 21, 22, 23, 24, 25], dtype=np.int32)
    result = run(runner, chunk(25, NUM_TOKENS, pages, 16), copies=(Copy(9, 2, 9),))
    torch.testing.assert_close(result.logits, expected[25:], atol=1e-4, rtol=0)


def test_bf16_rows_do_not_depend_on_the_chunk(model: DeepseekForCausalLM) -> None:
    whole = run(make_runner(model, kv_dtype="bf16"), chunk(0, NUM_TOKENS, scattered(16), 16))
    runner = make_runner(model, kv_dtype="bf16")
    parts = [
        run(runner, chunk(start, start + 50, scattered(16), 16)).logits
        for start in range(0, NUM_TOKENS, 50)
    ]
    # A few rows may round the other way; reading new rows unrounded would be off everywhere.
    gap = (torch.cat(parts) - whole.logits).abs()
    assert gap.mean() < 2e-3
    assert gap[:50].max() < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layer", [0, 1])
def test_non_finite_context_fails_its_sequence_only(
    model: DeepseekForCausalLM, bad: float, layer: int
) -> None:
    runner, pages = make_runner(model), np.arange(32, dtype=np.int32)
    a, b = pages[:16], pages[16:]
    run(runner, chunk(0, 40, a, 16), chunk(0, 40, b, 16))
    runner.pool.layer(layer)[5] = bad
    result = run(
        runner,
        chunk(40, 50, b, 16, num_logits=0),
        chunk(40, 50, a, 16, num_logits=0),
    )
    assert result.rows_finite.tolist() == [True, False]


def test_non_finite_logits_fail_their_sequence(
    model: DeepseekForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(model)
    compute = model.compute_logits

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        logits[2, 7] = float("inf")
        return logits

    monkeypatch.setattr(model, "compute_logits", broken)
    pages = np.arange(32, dtype=np.int32)
    chunks = [
        chunk(0, 20, pages[:8], 16, num_logits=2),
        chunk(0, 9, pages[8:16], 16, num_logits=0),
        chunk(0, 20, pages[16:], 16, num_logits=2),
    ]
    assert run(runner, *chunks).rows_finite.tolist() == [True, True, False]


def test_a_step_without_logits(model: DeepseekForCausalLM) -> None:
    result = run(make_runner(model), chunk(0, 20, scattered(16), 16, num_logits=0))
    assert result.logits.shape == (0, model.config.vocab_size)
    assert result.rows_finite.tolist() == [True]
    assert result.forward_s > 0


def test_warm_up_touches_only_the_dummy_page(model: DeepseekForCausalLM) -> None:
    runner = make_runner(model)
    runner.warm_up()
    pool = runner.pool
    for layer in range(pool.num_layers):
        assert pool.layer(layer)[: -pool.page_size].isnan().all()


def test_context_chunks_are_counted(model: DeepseekForCausalLM) -> None:
    runner, pages = make_runner(model, form="non_absorbed", workspace=32), scattered(16)
    assert run(runner, chunk(0, 100, pages, 16)).num_context_chunks == 0
    assert run(runner, chunk(100, 150, pages, 16)).num_context_chunks == 4
    assert runner.workspace_bytes > 0
