"""PrefixCache: leases, partial pages, duplicates, flushes; one test for each fault a peer had."""

from __future__ import annotations

import numpy as np
import pytest
from support.model_based_cache import CacheSimulation, FakeRequest

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.errors import LeaseError, NoSpace

PAGES = pytest.mark.parametrize("page", [1, 4, 16, 64])


def _serve(
    sim: CacheSimulation, tokens: list[int], namespace: str = "", *, chunk: int = 999
) -> int:
    """A whole request in chunks; returns its hit."""
    request = _run(sim, tokens, namespace, chunk=chunk)
    sim.release(request)
    return request.lease.num_cached


def _run(
    sim: CacheSimulation, tokens: list[int], namespace: str = "", *, chunk: int = 999
) -> FakeRequest:
    """As `_serve`, but the request keeps running."""
    request = sim.start(tokens, namespace)
    while request.num_computed < len(tokens):
        assert sim.compute(request, chunk)
        sim.commit(request)
    return request


def _decode(sim: CacheSimulation, request: FakeRequest, tokens: list[int], every: int = 1) -> None:
    for step, token in enumerate(tokens, start=1):
        request.tokens.append(token)
        assert sim.compute(request, 1)
        if step % every == 0:
            sim.commit(request)


# -- one request after another


@PAGES
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("num_pages", [1, 2, 5])
def test_r05_a_full_prompt_hit_recomputes_one_token(page: int, num_pages: int, extra: int) -> None:
    sim = CacheSimulation(64 if page > 1 else 400, page)
    prompt = list(range(num_pages * page + extra))
    hits = [_serve(sim, prompt) for _ in range(3)]
    assert hits == [0, len(prompt) - 1, len(prompt) - 1]
    assert _serve(sim, [*prompt, 7, 7]) == len(prompt)
    sim.drain()


@PAGES
def test_r07_generated_tokens_hit_in_the_next_turn(page: int) -> None:
    sim = CacheSimulation(400, page)
    request = _run(sim, list(range(100)))
    _decode(sim, request, list(range(200, 249)), every=7)
    sim.commit(request)
    sim.release(request)
    turn = [*request.tokens, 999, *range(300, 350)]  # 999: sampled last, no row yet
    assert _serve(sim, turn) == 149
    sim.drain()


@PAGES
@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_r12_the_whole_cached_prefix_hits_whatever_the_chunk(page: int, chunk: int) -> None:
    sim = CacheSimulation(400, page)
    prompt = list(range(40))
    assert _serve(sim, prompt, chunk=chunk) == 0
    assert _serve(sim, prompt, chunk=chunk) == 39
    sim.drain()


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("num_chunks", [0, 1, 2, 5])
def test_r14_abort_between_chunks_leaves_nothing_behind(num_chunks: int, commits: bool) -> None:
    sim = CacheSimulation(8, 16)
    prompt = list(range(80))
    for _ in range(20):
        request = sim.start(prompt)
        for _ in range(num_chunks):
            sim.compute(request, 16)
            if commits:
                sim.commit(request)
        sim.release(request)
        counts = sim.cache.counts()
        assert (counts.protected, counts.private) == (0, 0)
    assert sim.cache.peek(prompt) == (80 if commits and num_chunks else 0)  # each goes on
    sim.drain()


def test_r17_a_recycled_page_forgets_what_it_held() -> None:
    sim = CacheSimulation(4, 4)
    first, second = list(range(8)), list(range(100, 116))
    assert _serve(sim, first) == 0
    assert _serve(sim, second) == 0
    assert sim.cache.peek(first) == 0
    assert sim.cache.peek(second) == 16
    assert _serve(sim, first) == 0
    sim.drain()


@PAGES
def test_turns_of_one_chat_stay_one_node(page: int) -> None:
    sim = CacheSimulation(400, page)
    history: list[int] = []
    for turn in range(12):
        history += list(range(turn * 100, turn * 100 + 13))
        assert _serve(sim, history) == len(history) - 13
        assert sim.cache.num_nodes == 1
    assert sim.cache.num_cached_tokens == len(history)
    sim.drain()


def test_a_zero_length_sequence() -> None:
    cache = PrefixCache(4, 4)
    lease = cache.acquire([], limit=-1)
    assert cache.grow(lease, 0) == []
    cache.commit(lease, [])
    cache.audit()
    cache.release(lease)
    assert cache.num_namespaces == 0
    cache.audit()


# -- at the same time


@PAGES
@pytest.mark.parametrize("extra", [0, 1, 3])
def test_r01_the_second_of_two_equal_requests_reads_the_pages_of_the_first(
    page: int, extra: int
) -> None:
    sim = CacheSimulation(500, page)
    prompt = list(range(3 * page + extra))
    first, second = sim.start(prompt), sim.start(prompt)
    for request in (first, second):
        sim.compute(request, 999)
    for request in (first, second):
        sim.commit(request)
    shared = len(prompt) // page
    assert np.array_equal(first.lease.page_table[:shared], second.lease.page_table[:shared])
    assert sim.cache.evicted_tokens["duplicate"] == shared * page
    assert sim.cache.num_cached_tokens == len(prompt)
    third = _run(sim, list(range(900, 960)))  # overwrites what was freed
    _decode(sim, first, [1, 2, 3, 4, 5])
    _decode(sim, second, [1, 2, 6, 7, 8])
    for request in (second, third, first):
        sim.release(request)
    assert sim.cache.peek([*prompt, 1, 2, 3, 4, 5]) == len(prompt) + 5
    assert sim.cache.peek([*prompt, 1, 2, 6, 7, 8]) == len(prompt) + 5
    sim.drain()


@pytest.mark.parametrize("other", [[1, 2, 3], [1, 2, 3, 9], [1, 2, 8], [1, 2, 3, 4, 5, 6]], ids=str)
@pytest.mark.parametrize("first_leaves", [False, True])
def test_a_partial_page_in_the_writing_is_never_taken(other: list[int], first_leaves: bool) -> None:
    sim = CacheSimulation(20, 4)
    writer = sim.start([1, 2, 3])
    sim.compute(writer, 2)
    sim.commit(writer)
    own_page = int(writer.lease.page_table[0])
    rival = _run(sim, other)
    assert rival.lease.page_table[0] != own_page
    if first_leaves:
        sim.release(writer)
    else:
        sim.compute(writer, 1)
        sim.commit(writer)
        assert writer.lease.num_committed == 3
        _decode(sim, writer, [9, 5, 6])
    _decode(sim, rival, [4, 4, 4, 4, 4])
    sim.drain()


def test_own_partial_leaf_meets_the_same_full_page_of_another() -> None:
    sim = CacheSimulation(20, 4)
    writer = sim.start([1, 2, 3, 9, 7])
    sim.compute(writer, 2)
    sim.commit(writer)
    rival = _run(sim, [1, 2, 3, 9])
    assert sim.cache.num_nodes == 2
    sim.compute(writer, 1)
    sim.commit(writer)  # the rival's page holds these three: nothing to insert
    assert sim.cache.num_cached_tokens == 2 + 4
    sim.compute(writer, 2)
    sim.commit(writer)
    assert writer.lease.page_table[0] == rival.lease.page_table[0]
    assert sim.cache.num_cached_tokens == 5
    sim.drain()


def test_the_source_of_a_copy_survives_until_it_has_run() -> None:
    sim = CacheSimulation(3, 4)
    _serve(sim, [1, 2, 3])
    request = sim.start([1, 2, 9, 9])
    assert request.lease.num_cached == 2
    source = request.lease.source_page
    copies = sim.cache.grow(request.lease, 4)
    assert [(copy.src_page, copy.num_rows) for copy in copies] == [(source, 2)]
    assert sim.cache.evict(3) == 0
    sim.cache.audit()
    sim.cache.commit(request.lease, [1, 2, 9, 9])
    assert sim.cache.evict(3) == 1
    sim.cache.release(request.lease)
    sim.cache.audit()


def test_a_partial_hit_locks_one_page_of_its_source() -> None:
    sim = CacheSimulation(8, 4)
    _serve(sim, list(range(28)))  # 7 pages
    request = sim.start([0, 1, *range(100, 122)])  # 6 pages of its own
    assert sim.cache.counts().protected == 1
    assert sim.compute(request, 999)
    sim.commit(request)
    sim.drain()


def test_the_copy_comes_with_the_first_page_that_is_grown() -> None:
    cache = PrefixCache(10, 4)
    lease = cache.acquire([1, 2, 3, 4, 5, 6])
    cache.grow(lease, 6)
    cache.commit(lease, [1, 2, 3, 4, 5, 6])
    cache.release(lease)
    lease = cache.acquire([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert (lease.num_cached, lease.num_pages, lease.num_committed) == (6, 1, 6)
    assert cache.pages_needed(lease, 4) == 0
    assert cache.grow(lease, 4) == []
    assert cache.pages_needed(lease, 9) == 2
    (copy,) = cache.grow(lease, 9)
    assert (copy.src_page, copy.dst_page, copy.num_rows) == (1, lease.page_table[1], 2)
    assert cache.grow(lease, 12) == []
    assert lease.num_pages == 3
    cache.release(lease)
    cache.audit()


@PAGES
def test_a_hundred_commits_make_one_node(page: int) -> None:
    sim = CacheSimulation(300, page)
    request = _run(sim, list(range(10)))
    _decode(sim, request, list(range(100, 200)))
    assert sim.cache.num_nodes == 1
    sim.drain()


def test_commits_cost_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PrefixCache(4000, 16, seed=0)
    tokens = np.arange(40_000)
    lease = cache.acquire(tokens[:32_000])
    cache.grow(lease, 32_000)
    cache.commit(lease, tokens[:32_000])
    seen: list[int] = []
    original = cache._tree.insert_after
    monkeypatch.setattr(
        cache._tree,
        "insert_after",
        lambda node, fresh, *rest: seen.append(len(fresh)) or original(node, fresh, *rest),
    )
    for end in range(32_001, 32_200):
        cache.grow(lease, end)
        cache.commit(lease, tokens[:end])
    assert max(seen) <= 17
    assert len(lease.node.run.tokens) < 2 * 32_200


# -- space


def test_s09_no_space_for_one_leaves_the_others_unharmed() -> None:
    sim = CacheSimulation(10, 4)
    requests = [_run(sim, [base, 1, 2, 3]) for base in range(8)]
    victim = requests[3]
    for request in requests[:2]:
        _decode(sim, request, [7])
    victim.tokens.append(7)
    assert not sim.compute(victim, 1)
    with pytest.raises(NoSpace) as caught:
        sim.cache.grow(victim.lease, 5)
    assert (caught.value.needed, caught.value.available) == (1, 0)
    sim.release(victim)
    for request in (requests[0], requests[4]):
        _decode(sim, request, [5])
    sim.drain()


def test_counts_follow_a_page_through_its_states() -> None:
    cache = PrefixCache(10, 4)
    lease = cache.acquire(range(6))
    cache.grow(lease, 6)
    assert cache.counts() == (10, 8, 0, 0, 2, 0)
    cache.commit(lease, range(6))
    assert cache.counts() == (10, 8, 0, 2, 0, 0)
    cache.grow(lease, 9)
    assert cache.counts() == (10, 7, 0, 2, 1, 0)
    cache.release(lease)
    assert cache.counts() == (10, 8, 2, 0, 0, 0)
    assert cache.available_pages() == 10
    assert cache.evict(5) == 2
    assert cache.evicted_tokens["capacity"] == 6
    assert cache.counts() == (10, 10, 0, 0, 0, 0)


def test_a_lease_is_spent_once() -> None:
    cache = PrefixCache(10, 4)
    lease = cache.acquire(range(6))
    cache.grow(lease, 6)
    cache.release(lease)
    with pytest.raises(LeaseError):
        cache.release(lease)
    with pytest.raises(LeaseError):
        cache.grow(lease, 8)
    with pytest.raises(LeaseError):
        cache.commit(lease, range(6))
    cache.audit()


def test_commits_that_cannot_be() -> None:
    cache = PrefixCache(10, 4)
    lease = cache.acquire(range(9))
    with pytest.raises(LeaseError):
        cache.commit(lease, range(1))
    cache.grow(lease, 8)
    with pytest.raises(LeaseError):
        cache.commit(lease, range(9))
    cache.commit(lease, range(8))
    with pytest.raises(LeaseError):
        cache.commit(lease, range(7))
    cache.release(lease)
    cache.audit()


@pytest.mark.parametrize(("num_pages", "page_size"), [(0, 4), (4, 0)])
def test_a_pool_has_pages(num_pages: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        PrefixCache(num_pages, page_size)


# -- flush and namespaces


@PAGES
def test_r19_flush_while_busy(page: int) -> None:
    sim = CacheSimulation(600, page)
    prompt = list(range(2 * page + 3))
    _serve(sim, prompt)
    writer = _run(sim, [*prompt, 50, 51])
    waiting = sim.start([*prompt, 50, 60])  # its partial page is not copied yet
    uncommitted = sim.start(list(range(700, 710)))
    sim.compute(uncommitted, 5)
    sim.flush()
    sim.flush()
    assert sim.cache.peek(prompt) == 0
    _decode(sim, writer, list(range(80, 80 + page + 1)))
    sim.compute(waiting, 9)
    sim.commit(waiting)
    sim.compute(uncommitted, 9)
    sim.commit(uncommitted)
    assert sim.cache.num_cached_tokens == 0
    fresh = _run(sim, prompt)
    assert fresh.lease.num_cached == 0
    for request in (writer, waiting, uncommitted):
        sim.release(request)
    assert sim.cache.peek([*prompt, 50, 51, 80]) == len(prompt)
    sim.drain()


def test_r19_flush_counts_tokens_once() -> None:
    sim = CacheSimulation(20, 4)
    _serve(sim, list(range(10)))
    request = _run(sim, list(range(6)))
    cached = sim.cache.num_cached_tokens
    assert sim.cache.flush() == cached
    assert sim.cache.flush() == 0
    assert sim.cache.evicted_tokens["flush"] == cached
    assert sim.cache.counts().protected > 0
    sim.cache.release(request.lease)
    assert sim.cache.counts().free == 20
    sim.cache.audit()


def test_i01_salts_isolate() -> None:
    sim = CacheSimulation(100, 4)
    prompt = list(range(10))
    hits = [_serve(sim, prompt, salt) for salt in ("", "a", "b", "a", "")]
    assert hits == [0, 0, 0, 9, 9]
    sim.drain()


def test_i04_a_dropped_namespace_leaves_nothing() -> None:
    sim = CacheSimulation(100, 4)
    _serve(sim, list(range(10)))
    _serve(sim, list(range(10)), "once")
    sim.flush("once")
    assert sim.cache.peek(list(range(10)), "once") == 0
    assert sim.cache.peek(list(range(10))) == 10
    assert sim.cache.num_namespaces == 1
    sim.drain()


def test_random_salts_leak_no_namespaces() -> None:
    cache = PrefixCache(8, 4)
    for salt in range(500):
        lease = cache.acquire(range(9), str(salt))
        if salt % 2:
            cache.grow(lease, 9)
            cache.commit(lease, range(9))
        cache.release(lease)
    assert cache.num_namespaces <= 3
    cache.audit()
