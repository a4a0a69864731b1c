"""On a GPU in bf16: what is cached, which kernels run and how a prompt is cut change rounding only.

The rule: up to where two greedy runs part they were fed the same tokens; they may part only where
the reference's top two are within 0.1 nats, and their log-probabilities differ, on average, by at
most 1.5 times what two chunk sizes without a cache do. The weights are bf16 too: FP8 products
round their inputs, and a last bit there turns into a sixteenth.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.bf16_copy import bf16_copy
from support.greedy_runs import Greedy, make_request, prefix_families, run, run_one_at_a_time
from support.server_process import DEMO

from radix_mla.config import EngineConfig
from radix_mla.engine.build import build_engine
from radix_mla.engine.engine import Engine
from radix_mla.request import Request

pytestmark = pytest.mark.gpu

GAP = 0.1
PAIRS = [
    ("fa3,flashmla", 64),
    ("fa3,triton", 1),
    ("fa3,triton", 64),
    ("fa2,triton", 16),
    ("triton", 1),
    ("triton", 16),
    ("torch", 16),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bf16_copy(DEMO, tmp_path_factory.mktemp("demo"))


def engine(model: Path, **knobs: object) -> Engine:
    words = {"kv_cache_tokens": 4096, "max_num_seqs": 16, "device": "cuda:0"} | knobs
    return build_engine(EngineConfig(model=str(model), **words))  # type: ignore[arg-type]


def requests() -> list[Request]:
    drawn = prefix_families(7, families=5, prompts=20, vocab=4000, max_prefix=400)
    return [make_request(f"r{i}", prompt, 12) for i, prompt in enumerate(drawn)]


def differences(want: dict[str, Greedy], have: dict[str, Greedy]) -> np.ndarray:
    """|Δ log-probability| of the tokens that both runs chose, all requests in a row."""
    out: list[float] = []
    for name, a in want.items():
        b = have[name]
        assert b.error is None, (name, b.error)
        assert len(a.tokens) == len(b.tokens)
        for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
            if x != y:
                assert a.gaps[i] <= GAP, f"{name} parts at {i} where the gap is {a.gaps[i]:.3f}"
                break
            out.append(abs(a.logprobs[i] - b.logprobs[i]))
    return np.array(out)


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[dict[str, Greedy], float]:
    """One at a time without a cache, and what another chunk size changes of that on average."""
    runs = [
        run_one_at_a_time(
            engine(model, enable_prefix_cache=False, max_num_batched_tokens=chunk), requests()
        )
        for chunk in (512, 64)
    ]
    return runs[0], float(differences(*runs).mean())


@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize(("backend", "page_size"), PAIRS)
def test_backends_pages_and_chunks(
    model: Path,
    reference: tuple[dict[str, Greedy], float],
    backend: str,
    page_size: int,
    chunk: int,
) -> None:
    pytest.importorskip("flash_mla") if "flashmla" in backend else None
    pytest.importorskip("fa3_fwd_interface") if "fa3" in backend else None
    want, usual = reference
    tested = engine(
        model, attention_backend=backend, page_size=page_size, max_num_batched_tokens=chunk
    )
    have = run(tested, requests(), after_step=tested.cache.audit)
    assert sum(result.cached for result in have.values()) > 0
    found = differences(want, have)
    print(f"{backend} page {page_size} chunk {chunk}: {found.mean():.5f}, usual {usual:.5f}")
    assert found.mean() <= 1.5 * usual + 1e-4
    counts = tested.cache.counts()
    assert counts.private == counts.protected == 0
