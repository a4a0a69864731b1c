"""On a GPU in bf16: what is cached, which kernels run and how a prompt is cut change rounding only.

The rule, for each backend: up to where two greedy runs part they were fed the same tokens; they may
part only where the reference's top two are within 0.1 nats, and their log-probabilities differ, on
average, by at most 1.5 times what two chunk sizes without a cache do. The model is a mixture of
experts: where a gate's second and third choice are nearly equal, rounding picks another expert and
the answer jumps. Such a token shows by jumping between runs without a cache, and is left out.

And no backend is further from fp32 than twice plain torch in bf16. The weights are bf16 too: FP8
products round their inputs, and a last bit there turns into a sixteenth.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from support.bf16_copy import bf16_copy
from support.greedy_runs import Greedy, make_request, prefix_families, run
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
    drawn = prefix_families(7, families=8, prompts=40, vocab=4000, max_prefix=400)
    return [make_request(f"r{i}", prompt, 12) for i, prompt in enumerate(drawn)]


def without_cache(model: Path, chunk: int, **knobs: object) -> dict[str, Greedy]:
    tested = engine(model, enable_prefix_cache=False, max_num_batched_tokens=chunk, **knobs)
    return run(tested, requests())


class Differences:
    """Of two runs, over the tokens before they part, all requests in a row."""

    def __init__(self, want: dict[str, Greedy], have: dict[str, Greedy]) -> None:
        self.of_token: dict[tuple[str, int], float] = {}  # |Δ log-probability|
        self.parted: dict[tuple[str, int], float] = {}  # `want`'s top-2 gap there
        for name, a in want.items():
            b = have[name]
            assert b.error is None, (name, b.error)
            assert len(a.tokens) == len(b.tokens)
            for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)):
                if x != y:
                    self.parted[name, i] = a.gaps[i]
                    break
                self.of_token[name, i] = abs(a.logprobs[i] - b.logprobs[i])

    def jumps(self) -> set[tuple[str, int]]:
        """Tokens at which more than rounding changed."""
        far = {place for place, change in self.of_token.items() if change > GAP}
        return far | {place for place, gap in self.parted.items() if gap > GAP}

    def mean(self, left_out: Set[tuple[str, int]] = frozenset()) -> float:
        return float(np.mean([v for place, v in self.of_token.items() if place not in left_out]))


class Reference(NamedTuple):
    """Without a cache: a run, how far another chunk size is from it, and tokens that jump."""

    run: dict[str, Greedy]
    usual: float
    jumps: set[tuple[str, int]]


@pytest.fixture(scope="module")
def reference_of(model: Path) -> Callable[[str, int], Reference]:
    @cache
    def make(backend: str, page_size: int) -> Reference:
        knobs: dict[str, object] = {"attention_backend": backend, "page_size": page_size}
        first = without_cache(model, 512, **knobs)
        other = Differences(first, without_cache(model, 64, **knobs))
        few = Differences(first, without_cache(model, 512, max_num_seqs=3, **knobs))
        jumps = other.jumps() | few.jumps()
        assert len(jumps) < 0.02 * 12 * len(first), jumps
        return Reference(first, other.mean(jumps), jumps)

    return make


@pytest.fixture(scope="module")
def exact(model: Path) -> tuple[dict[str, Greedy], float]:
    """fp32, and how far plain torch in bf16 is from it."""
    knobs: dict[str, object] = {"attention_backend": "torch", "page_size": 16}
    want = without_cache(model, 512, dtype="fp32", **knobs)
    return want, Differences(want, without_cache(model, 512, **knobs)).mean()


@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize(("backend", "page_size"), PAIRS)
def test_backends_pages_and_chunks(
    model: Path,
    reference_of: Callable[[str, int], Reference],
    exact: tuple[dict[str, Greedy], float],
    backend: str,
    page_size: int,
    chunk: int,
) -> None:
    pytest.importorskip("flash_mla") if "flashmla" in backend else None
    pytest.importorskip("fa3_fwd_interface") if "fa3" in backend else None
    reference = reference_of(backend, page_size)
    tested = engine(
        model, attention_backend=backend, page_size=page_size, max_num_batched_tokens=chunk
    )
    have = run(tested, requests(), after_step=tested.cache.audit)
    assert sum(result.cached for result in have.values()) > 0
    found = Differences(reference.run, have)
    error, plain = Differences(exact[0], have).mean(), exact[1]
    print(
        f"{backend} page {page_size} chunk {chunk}: {found.mean(reference.jumps):.5f}, "
        f"usual {reference.usual:.5f}; from fp32 {error:.5f}, plain {plain:.5f}; "
        f"left out {reference.jumps}"
    )
    assert found.jumps() <= reference.jumps
    assert found.mean(reference.jumps) <= 1.5 * reference.usual
    assert error <= 2 * plain
    counts = tested.cache.counts()
    assert counts.private == counts.protected == 0
