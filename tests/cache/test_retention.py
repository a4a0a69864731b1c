"""Retention: the order that ranks give, how they end, and that they never lock."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from radix_mla.cache.eviction import POLICIES
from radix_mla.cache.namespace import ephemeral_namespace
from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.cache.radix_node import RadixNode, walk
from radix_mla.cache.radix_tree import RadixTree
from radix_mla.cache.retention import (
    DEFAULT_TTL_S,
    NO_RETENTION,
    Keep,
    Retention,
    current,
    merged,
)
from radix_mla.errors import AuditError


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def store(
    cache: PrefixCache, tokens: Sequence[int], rank: int = 0, ttl_s: float = 100.0, **options: Any
) -> None:
    """One request from its start to its end."""
    retention = Retention(rank, ttl_s) if rank else NO_RETENTION
    limit = len(tokens) - 1
    lease = cache.acquire(tokens, limit=limit, retention=retention, **options)
    cache.grow(lease, len(tokens))
    cache.commit(lease, tokens)
    cache.release(lease)
    cache.audit()


def kept(cache: PrefixCache, *sequences: Sequence[int]) -> list[int]:
    """How much of each is cached."""
    cache.audit()
    return [cache.peek(tokens) for tokens in sequences]


A, B, C, D = ([start, *range(start + 1, start + 8)] for start in (10, 20, 30, 40))


# -- what is asked for


def test_a_time_alone_is_rank_1_and_a_priority_alone_holds_for_an_hour() -> None:
    assert Retention.of(0, 0.0) == NO_RETENTION
    assert Retention.of(0, 60.0) == (1, 60.0)
    assert Retention.of(4, 0.0) == (4, DEFAULT_TTL_S) == (4, 3600.0)
    assert Retention.of(4, 60.0) == (4, 60.0)
    assert NO_RETENTION.keeps(5.0) == ()
    assert Retention(2, 10.0).keeps(5.0) == (Keep(2, 15.0),)


@pytest.mark.parametrize("seed", range(20))
def test_merged_keeps_have_the_greatest_rank_of_all_at_every_time(seed: int) -> None:
    rng = random.Random(seed)
    given = [Keep(rng.randint(1, 4), float(rng.randint(1, 9))) for _ in range(rng.randint(0, 7))]
    half = rng.randint(0, len(given))
    now_s = float(rng.randint(0, 5))
    keeps = merged(merged((), tuple(given[:half]), now_s), tuple(given[half:]), now_s)
    for time_s in range(int(now_s), 12):
        keep = current(keeps, time_s)
        ranks = [rank for rank, until_s in given if until_s > time_s]
        assert (keep.rank if keep else 0) == max(ranks, default=0)


# -- order


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_lower_ranks_go_first_and_the_policy_orders_a_rank(policy: str) -> None:
    cache = PrefixCache(32, 1, policy=POLICIES[policy](), seed=0)
    for tokens, rank in ((A, 2), (B, 0), (C, 1), (D, 0)):
        store(cache, tokens, rank)
    order: list[str] = []
    for _ in range(4):
        assert cache.evict(8) == 8
        gone = {"ABCD"[i] for i, num in enumerate(kept(cache, A, B, C, D)) if not num}
        order += sorted(gone - set(order))
    assert order == ["B", "D", "C", "A"]


def test_a_rank_ends_with_its_time_and_then_the_policy_decides() -> None:
    cache = PrefixCache(32, 1, seed=0)
    store(cache, A, 1, ttl_s=10.0)
    store(cache, B)
    store(cache, C, 1, ttl_s=20.0)
    cache.set_time(9.9)
    cache.audit()
    cache.evict(1)
    assert kept(cache, A, B, C) == [8, 7, 8]
    cache.set_time(10.0)  # A is the oldest of rank 0 again
    cache.evict(8)
    assert kept(cache, A, B, C) == [0, 7, 8]
    cache.evict(8)
    assert kept(cache, B, C) == [0, 7]


def test_time_does_not_go_back() -> None:
    cache = PrefixCache(16, 1, seed=0)
    cache.set_time(50.0)
    cache.set_time(20.0)
    store(cache, A, 1, ttl_s=10.0)
    store(cache, B)
    cache.set_time(59.0)
    cache.evict(8)
    assert kept(cache, A, B) == [8, 0]


def test_a_use_renews_the_time_and_one_that_asks_for_nothing_does_not() -> None:
    for rank, left in ((1, [8, 0]), (0, [0, 8])):
        cache = PrefixCache(16, 1, seed=0)
        store(cache, A, 1, ttl_s=10.0)
        cache.set_time(8.0)
        store(cache, A, rank, ttl_s=10.0)
        store(cache, B)
        cache.set_time(15.0)
        cache.evict(8)
        assert kept(cache, A, B) == left


def test_the_greatest_rank_that_still_holds_counts() -> None:
    cache = PrefixCache(24, 1, seed=0)
    store(cache, A, 5, ttl_s=10.0)
    store(cache, A, 1, ttl_s=30.0)
    store(cache, B, 2, ttl_s=90.0)
    store(cache, C)
    assert current(_leaf(cache, A).keeps, 0.0) == (5, 10.0)
    cache.set_time(12.0)  # now A has rank 1
    cache.audit()
    cache.evict(8)
    assert kept(cache, A, B, C) == [8, 8, 0]
    cache.evict(8)
    assert kept(cache, A, B) == [0, 8]


def _leaf(cache: PrefixCache, tokens: Sequence[int]) -> RadixNode:
    node = cache._tree.match(_array(tokens)).node
    assert node is not None
    return node


# -- splits, growth, duplicates


def test_a_split_copies_the_rank_to_both_halves() -> None:
    cache = PrefixCache(32, 1, seed=0)
    store(cache, A, 3)
    store(cache, [*A[:4], 99])
    upper, lower = _leaf(cache, A[:4]), _leaf(cache, A)
    assert upper is lower.parent
    assert upper.keeps == lower.keeps == (Keep(3, 100.0),)
    cache.evict(1)
    assert kept(cache, A, [*A[:4], 99]) == [8, 4]


def test_a_prefix_is_kept_without_what_others_put_behind_it() -> None:
    cache = PrefixCache(32, 1, seed=0)
    store(cache, A, 1)
    store(cache, A + B)  # would grow the leaf in place, had it no rank
    store(cache, C)
    cache.evict(16)
    assert kept(cache, A + B, C) == [8, 0]


def test_a_conversation_that_asks_in_each_turn_stays_one_node() -> None:
    cache = PrefixCache(64, 1, seed=0)
    for turn in (A, A + B, A + B + C):
        store(cache, turn, 1)
        cache.set_time(cache._tree.nodes.queue.now_s + 1.0)
    assert cache.num_nodes == 1


def test_a_parent_takes_over_the_rank_of_its_last_child() -> None:
    cache = PrefixCache(32, 1, seed=0)
    store(cache, [*A, 1], 2)
    store(cache, [*A, 2])
    store(cache, B, 1)
    cache.evict(2)  # [.., 2], then a token of B
    cache.evict(7)
    assert kept(cache, [*A, 1], [*A, 2], B) == [9, 8, 0]
    cache.evict(1)
    assert kept(cache, A) == [8]
    assert current(_leaf(cache, A).keeps, 0.0) == (2, 100.0)


def test_a_longer_partial_leaf_takes_over_from_the_one_it_replaces() -> None:
    cache = PrefixCache(8, 4, seed=0)
    store(cache, [1, 2], 3)
    store(cache, [1, 2, 3])
    store(cache, [7, 8])
    cache.evict(1)
    assert kept(cache, [1, 2, 3], [7, 8]) == [3, 0]


def test_a_sibling_that_has_the_tokens_takes_over_from_a_redundant_leaf() -> None:
    """Two compute the same partial page; the one that asks for rank has the shorter one."""
    cache = PrefixCache(8, 4, seed=0)
    short = cache.acquire([1, 2], retention=Retention(3, 100.0))
    longer = cache.acquire([1, 2, 3])
    for lease, tokens in ((short, [1, 2]), (longer, [1, 2, 3])):
        cache.grow(lease, len(tokens))
        cache.commit(lease, tokens)
    cache.release(longer)
    cache.release(short)
    store(cache, [7, 8])
    cache.evict(1)
    assert kept(cache, [1, 2, 3], [7, 8]) == [3, 0]


def test_a_partial_page_that_was_there_already_is_kept_too() -> None:
    cache = PrefixCache(8, 4, seed=0)
    ranked = cache.acquire([1, 2], retention=Retention(3, 100.0))
    cache.grow(ranked, 2)
    store(cache, [1, 2, 3])
    cache.commit(ranked, [1, 2])
    cache.release(ranked)
    store(cache, [7, 8])
    cache.evict(1)
    assert kept(cache, [1, 2, 3], [7, 8]) == [3, 0]


def test_a_hit_of_a_partial_page_keeps_that_page() -> None:
    cache = PrefixCache(8, 4, seed=0)
    store(cache, [1, 2, 3, 4, 5, 6])
    store(cache, [7, 8])
    cache.release(cache.acquire([1, 2, 3, 4, 5], retention=Retention(1, 9.0)))
    store(cache, [7, 8])
    cache.evict(1)
    assert kept(cache, [1, 2, 3, 4, 5, 6], [7, 8]) == [6, 0]


# -- never a lock


def test_a_full_pool_of_ranked_rows_gives_way() -> None:
    cache = PrefixCache(16, 1, seed=0)
    store(cache, A, 10, ttl_s=86_400.0)
    store(cache, B, 9, ttl_s=86_400.0)
    assert cache.available_pages() == 16
    store(cache, C)
    assert kept(cache, A, B, C) == [8, 0, 8]
    store(cache, C + D)
    assert kept(cache, A, C + D) == [0, 16]
    cache.flush()
    cache.audit()
    assert cache.counts().free == 16


def test_what_is_not_stored_has_no_rank() -> None:
    cache = PrefixCache(16, 1, seed=0)
    lease = cache.acquire(A, ephemeral_namespace("r"), retention=Retention(9, 100.0))
    assert lease.retention == NO_RETENTION
    cache.release(lease)
    cache.audit()


# -- cost, audit


def test_entries_of_renewed_ranks_are_swept_out() -> None:
    cache = PrefixCache(100, 1, seed=0)
    store(cache, B)
    for turn in range(2000):
        cache.set_time(float(turn))
        cache.release(cache.acquire(A, retention=Retention(1, 10_000.0)))
        if turn == 0:
            store(cache, A, 1)
    cache.audit()
    assert cache._tree.nodes.queue.num_entries < 300


def test_the_audit_finds_a_leaf_under_a_wrong_rank() -> None:
    cache = PrefixCache(16, 1, seed=0)
    store(cache, A, 2)
    leaf = _leaf(cache, A)
    good = leaf.keeps
    for bad in ((Keep(1, 100.0),), (Keep(2, 99.0),), (), (Keep(1, 9.0), Keep(2, 100.0))):
        leaf.keeps = bad
        with pytest.raises(AuditError):
            cache.audit()
    leaf.keeps = good
    cache.audit()


# -- a naive model


class NaivePages:
    """A trie of single pages; each use stamps all pages on its path, and leaves its keep there."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, ...], int] = {}
        self._stamps: dict[tuple[int, ...], int] = {}
        self._keeps: dict[tuple[int, ...], list[Keep]] = {}
        self._tick = 0

    def access(self, path: tuple[int, ...], pages: list[int] | None = None) -> None:
        self._tick += 1
        for end in range(1, len(path) + 1):
            if pages is not None and path[:end] not in self._pages:
                self._pages[path[:end]] = pages[end - 1]
                self._keeps[path[:end]] = []
            self._stamps[path[:end]] = self._tick

    def keep(self, path: tuple[int, ...], keeps: Sequence[Keep]) -> None:
        self.access(path)
        for end in range(1, len(path) + 1):
            self._keeps[path[:end]] += keeps

    def evict(self, locked: set[tuple[int, ...]], now_s: float) -> int:
        def place(path: tuple[int, ...]) -> tuple[int, int]:
            ranks = [keep.rank for keep in self._keeps[path] if keep.until_s > now_s]
            return max(ranks, default=0), self._stamps[path]

        parents = {path[:-1] for path in self._pages}
        leaves = [path for path in self._pages if path not in parents and path not in locked]
        return self._pages.pop(min(leaves, key=place))


class RankedRun:
    """A tree and the model beside it, with page size 1, random requests and a random clock."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RadixTree(1, POLICIES["lru"]())
        self.model = NaivePages()
        self.next_page = 0
        self.now_s = 0.0
        self.locked: list[tuple[RadixNode, tuple[int, ...], Retention]] = []

    def pass_time(self) -> None:
        self.now_s += self.rng.choice([0.0, 1.0, 5.0])
        self.tree.nodes.queue.advance(self.now_s)

    def request(self) -> None:
        """A hit, then the insertion of the rest; stays locked for a while."""
        rank = self.rng.choice([0, 0, 1, 2, 5])
        retention = Retention(rank, float(self.rng.choice([2, 20, 60]))) if rank else NO_RETENTION
        path = tuple(self.rng.randrange(3) for _ in range(self.rng.randint(1, 7)))
        match = self.tree.match(_array(path))
        pinned = self.tree.pin(match)
        hit = path[: match.num_tokens]
        self.model.access(hit)
        pages = list(range(self.next_page, self.next_page + len(path)))
        self.next_page += len(path)
        keeps = retention.keeps(self.now_s)
        rest = slice(len(hit), None)
        result = self.tree.insert_after(pinned.node, _array(path[rest]), _array(pages[rest]), keeps)
        self.model.access(path, pages)
        self.tree.nodes.lock(result.node)
        self.tree.nodes.unlock(pinned.node, keeps)
        self.model.keep(hit, keeps)
        self.locked.append((result.node, path, retention))
        while len(self.locked) > 3:
            self.unlock_one()

    def unlock_one(self) -> None:
        node, path, retention = self.locked.pop(self.rng.randrange(len(self.locked)))
        keeps = retention.keeps(self.now_s)
        self.tree.nodes.unlock(node, keeps)
        self.model.keep(path, keeps)

    def evict_one(self) -> None:
        locked = {path[:end] for _, path, _ in self.locked for end in range(1, len(path) + 1)}
        assert self.tree.nodes.evict(1).tolist() == [self.model.evict(locked, self.now_s)]

    def audit(self) -> None:
        """Each leaf in the queue has the rank that it has now."""
        for node in walk(self.tree.namespaces.open("").root):
            assert merged(node.keeps, (), float("-inf")) == node.keeps
        entries, expiries = self.tree.nodes.queue.valid()
        for entry in entries:
            keep = current(entry.node.keeps, self.now_s)
            assert entry.rank == (keep.rank if keep else 0)
        assert all(expiry.until_s > self.now_s for expiry in expiries)


@pytest.mark.parametrize("seed", range(12))
def test_order_equals_the_naive_model(seed: int) -> None:
    run = RankedRun(seed)
    for step in range(300):
        run.request()
        run.pass_time()
        while run.tree.nodes.num_evictable_pages > 40 or (
            step % 50 == 49 and run.tree.nodes.num_evictable_pages
        ):
            run.evict_one()
        run.audit()
