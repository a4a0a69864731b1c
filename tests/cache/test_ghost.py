"""Ghost: reasons of misses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_mla.cache.ghost import Ghost, Trace
from radix_mla.cache.namespace import ephemeral_namespace
from radix_mla.cache.prefix_cache import PrefixCache


def _tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, count, dtype=np.int32)


def _ghost() -> Ghost:
    return Ghost(seed=7, log2_slots=10, block=16)


def _reasons(new: int, evicted: int, namespace: int) -> dict[str, int]:
    return {"new": new, "evicted": evicted, "namespace": namespace}


def test_what_was_never_there_is_new() -> None:
    assert _ghost().classify(_tokens(100), "", 0) == _reasons(100, 0, 0)
    assert _ghost().classify(_tokens(0), "", 0) == _reasons(0, 0, 0)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100])
def test_committed_prefixes_are_known_to_the_token(length: int) -> None:
    ghost = _ghost()
    ghost.remember(_tokens(100)[:length], "a", Trace())
    assert ghost.classify(_tokens(100), "a", 0) == _reasons(100 - length, length, 0)
    assert ghost.classify(_tokens(100), "b", 0) == _reasons(100 - length, 0, length)
    part = length // 2
    assert ghost.classify(_tokens(100), "a", part) == _reasons(100 - length, length - part, 0)
    assert ghost.classify(_tokens(100), "a", 100) == _reasons(0, 0, 0)


def test_own_prefix_counts_before_that_of_others() -> None:
    ghost = _ghost()
    ghost.remember(_tokens(40), "a", Trace())
    ghost.remember(_tokens(90), "b", Trace())
    assert ghost.classify(_tokens(100), "a", 10) == _reasons(10, 30, 50)


def test_many_commits_of_one_sequence_equal_one_commit() -> None:
    ghost, trace, tokens = _ghost(), Trace(), _tokens(100)
    for end in (5, 16, 31, 70, 100):
        ghost.remember(tokens[trace.num_tokens : end], "a", trace)
    assert ghost.classify(tokens, "a", 0) == _reasons(0, 100, 0)


def test_zeros_and_trailing_zeros_are_tokens() -> None:
    ghost = _ghost()
    ghost.remember(np.zeros(20, dtype=np.int32), "a", Trace())
    assert ghost.classify(np.zeros(30, dtype=np.int32), "a", 0) == _reasons(10, 20, 0)


def test_sequences_beyond_the_first_weights() -> None:
    ghost, tokens = _ghost(), _tokens(20_000)
    ghost.remember(tokens, "a", Trace())
    assert ghost.classify(tokens, "a", 0) == _reasons(0, 20_000, 0)


def test_memory_is_bounded_and_the_newest_stays() -> None:
    ghost = _ghost()
    for seed in range(300):
        ghost.remember(_tokens(200, seed), "a", Trace())
    assert ghost.classify(_tokens(200, 299), "a", 0)["evicted"] == 200
    assert ghost.num_bytes < 1 << 20


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    commits=st.lists(
        st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 1), max_size=60)), max_size=6
    ),
    tokens=st.lists(st.integers(0, 1), max_size=60),
    num_matched=st.integers(0, 60),
)
def test_reasons_add_up(commits: list, tokens: list[int], num_matched: int) -> None:
    ghost = _ghost()
    for namespace, committed in commits:
        ghost.remember(np.array(committed, dtype=np.int32), namespace, Trace())
    num_matched = min(num_matched, len(tokens))
    reasons = ghost.classify(np.array(tokens, dtype=np.int32), "a", num_matched)
    assert sum(reasons.values()) == len(tokens) - num_matched
    assert min(reasons.values()) >= 0


def _serve(cache: PrefixCache, tokens: np.ndarray, namespace: str = "") -> int:
    lease = cache.acquire(tokens, namespace, limit=len(tokens) - 1)
    cache.grow(lease, len(tokens))
    cache.commit(lease, tokens)
    cache.release(lease)
    return lease.num_cached


def test_the_cache_explains_its_misses() -> None:
    cache, tokens = PrefixCache(64, 4, seed=1), _tokens(100)
    assert cache.classify_miss(tokens, "", 0) == _reasons(100, 0, 0)
    _serve(cache, tokens)
    assert cache.classify_miss(tokens, "salt", 0) == _reasons(0, 0, 100)
    cache.evict(10)
    hit = cache.peek(tokens)
    assert hit == 60
    assert cache.classify_miss(tokens, "", hit) == _reasons(0, 40, 0)
    cache.flush()
    assert cache.classify_miss(tokens, "", 0) == _reasons(0, 100, 0)


def test_i04_ephemeral_namespaces_leave_no_trace() -> None:
    cache, tokens = PrefixCache(64, 4, seed=1), _tokens(100)
    name = ephemeral_namespace("request-1")
    _serve(cache, tokens, name)
    assert cache.drop_namespace(name) == 100
    assert cache.peek(tokens, name) == cache.num_namespaces == cache.num_nodes == 0
    assert cache.classify_miss(tokens, "", 0) == _reasons(100, 0, 0)
