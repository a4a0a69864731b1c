"""The core promise: the same tokens whatever is cached, chunked, batched, evicted or retracted."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.greedy_runs import (
    Greedy,
    assert_equal_runs,
    make_request,
    prefix_families,
    run,
    run_one_at_a_time,
)
from support.server_process import DEMO

from radix_mla.config import EngineConfig
from radix_mla.engine.build import build_engine
from radix_mla.engine.engine import Engine
from radix_mla.request import Request

PAGE_SIZES = (1, 16, 64)
CHUNK_SIZES = (7, 64, 512)
FORMS = ("absorbed", "non_absorbed", "one_shot")
MATRIX = tuple(itertools.product(PAGE_SIZES, CHUNK_SIZES, FORMS))
# a Latin square: each pair of values of two knobs occurs once
PAIRWISE = tuple(
    (PAGE_SIZES[i], CHUNK_SIZES[j], FORMS[(i + j) % 3]) for i in range(3) for j in range(3)
)


def engine(**knobs: object) -> Engine:
    return build_engine(EngineConfig(model=str(DEMO), num_threads=1, **knobs))  # type: ignore[arg-type]


def requests(prompts: int, families: int, max_tokens: int) -> list[Request]:
    drawn = prefix_families(7, families=families, prompts=prompts, vocab=4000)
    return [make_request(f"r{i}", prompt, max_tokens) for i, prompt in enumerate(drawn)]


@pytest.fixture(scope="module")
def reference() -> Callable[[int, int, int], dict[str, Greedy]]:
    """One request at a time, nothing cached, defaults otherwise; computed once per workload."""
    known: dict[tuple[int, int, int], dict[str, Greedy]] = {}

    def of(prompts: int, families: int, max_tokens: int) -> dict[str, Greedy]:
        key = (prompts, families, max_tokens)
        if key not in known:
            alone = engine(enable_prefix_cache=False, kv_cache_tokens=4096)
            known[key] = run_one_at_a_time(alone, requests(*key))
        return known[key]

    return of


def check_knobs(
    want: dict[str, Greedy],
    asked: list[Request],
    page_size: int,
    chunk: int,
    form: str,
    *,
    pool: int,
) -> None:
    """Cache on in a pool too small for all, and off, both concurrent, against `want`."""
    knobs: dict[str, object] = {
        "page_size": page_size,
        "max_num_batched_tokens": chunk,
        "attention_form": form,
        "max_num_seqs": 32,
    }
    cached = engine(**knobs, kv_cache_tokens=pool)
    have = run(cached, asked, after_step=cached.cache.audit)
    assert_equal_runs(want, have)
    assert sum(result.cached for result in have.values()) > 0
    assert sum(cached.cache.evicted_tokens.values()) > 0
    counts = cached.cache.counts()
    assert counts.private == counts.protected == 0
    assert cached.stats().num_running == 0

    off = engine(**knobs, kv_cache_tokens=4096, enable_prefix_cache=False)
    have = run(off, asked)
    assert_equal_runs(want, have)
    assert all(result.cached == 0 for result in have.values())


@pytest.mark.parametrize(("page_size", "chunk", "form"), PAIRWISE)
def test_r20_tokens_do_not_depend_on_the_cache(
    reference: Callable[[int, int, int], dict[str, Greedy]], page_size: int, chunk: int, form: str
) -> None:
    want = reference(20, 5, 8)
    check_knobs(want, requests(20, 5, 8), page_size, chunk, form, pool=1024)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "chunk", "form"), MATRIX)
def test_whole_matrix(
    reference: Callable[[int, int, int], dict[str, Greedy]], page_size: int, chunk: int, form: str
) -> None:
    want = reference(200, 20, 16)
    check_knobs(want, requests(200, 20, 16), page_size, chunk, form, pool=3072)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_eviction_and_retraction_happen_and_change_nothing(
    reference: Callable[[int, int, int], dict[str, Greedy]], page_size: int
) -> None:
    """A pool for three or four at a time, and outputs that outgrow the reserve."""
    want = reference(40, 8, 30)
    small = engine(page_size=page_size, kv_cache_tokens=576, max_num_batched_tokens=128)
    have = run(small, requests(40, 8, 30), after_step=small.cache.audit)
    assert_equal_runs(want, have)
    assert small.stats().retractions > 0
    assert sum(small.cache.evicted_tokens.values()) > 0
    assert small.cache.counts().private == small.cache.counts().protected == 0
