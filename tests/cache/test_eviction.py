"""Eviction: order, trimming, and what it costs."""

from __future__ import annotations

import heapq
import random
from typing import Any

import numpy as np
import pytest

from radix_mla.cache import eviction
from radix_mla.cache.eviction import FIFO, LFU, LRU, EvictionPolicy
from radix_mla.cache.radix_node import RadixNode
from radix_mla.cache.radix_tree import RadixTree


class NaivePages:
    """The model: a trie of single pages; each access stamps all pages on its path."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, ...], int] = {}
        self._stamps: dict[tuple[int, ...], int] = {}
        self._tick = 0

    def access(self, path: tuple[int, ...], pages: list[int] | None = None) -> None:
        """A hit of `path`, or with `pages` its insertion."""
        self._tick += 1
        for end in range(1, len(path) + 1):
            if pages is not None:
                self._pages.setdefault(path[:end], pages[end - 1])
            self._stamps[path[:end]] = self._tick

    def evict(self, locked: set[tuple[int, ...]]) -> int:
        parents = {path[:-1] for path in self._pages}
        leaves = [path for path in self._pages if path not in parents and path not in locked]
        return self._pages.pop(min(leaves, key=self._stamps.__getitem__))


def _array(values: Any) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class EvictionRun:
    """A tree and the model beside it, with page size 1 and random requests."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.tree = RadixTree(1, LRU())
        self.model = NaivePages()
        self.next_page = 0
        self.locked: list[tuple[RadixNode, tuple[int, ...]]] = []

    def request(self) -> None:
        """A hit, then the insertion of the rest; stays locked for a while now and then."""
        path = tuple(self.rng.randrange(3) for _ in range(self.rng.randint(1, 7)))
        match = self.tree.match(_array(path))
        pinned = self.tree.pin(match)
        self.model.access(path[: match.num_tokens])
        pages = list(range(self.next_page, self.next_page + len(path)))
        self.next_page += len(path)
        rest = slice(match.num_tokens, None)
        result = self.tree.insert_after(pinned.node, _array(path[rest]), _array(pages[rest]))
        self.model.access(path, pages)
        self.tree.nodes.lock(result.node)
        self.tree.nodes.unlock(pinned.node)
        self.locked.append((result.node, path))
        while len(self.locked) > 3:
            node, path = self.locked.pop(self.rng.randrange(len(self.locked)))
            self.tree.nodes.unlock(node)
            self.model.access(path)

    def evict_one(self) -> None:
        locked = {path[:end] for _, path in self.locked for end in range(1, len(path) + 1)}
        assert self.tree.nodes.evict(1).tolist() == [self.model.evict(locked)]


@pytest.mark.parametrize("seed", range(8))
def test_r10_order_equals_naive_lru(seed: int) -> None:
    run = EvictionRun(seed)
    for step in range(400):
        run.request()
        while run.tree.nodes.num_evictable_pages > 40 or (
            step % 50 == 49 and run.tree.nodes.num_evictable_pages
        ):
            run.evict_one()


def _leaves(count: int, policy: EvictionPolicy | None = None, length: int = 16) -> RadixTree:
    tree = RadixTree(1, policy or LRU())
    for leaf in range(count):
        tokens = leaf * length + np.arange(length, dtype=np.int32)
        tree.insert(tokens, tokens)
    return tree


def test_fifo_takes_the_oldest() -> None:
    tree = _leaves(3, FIFO())
    pinned = tree.pin(tree.match(np.arange(16, dtype=np.int32)))
    tree.nodes.unlock(pinned.node)
    assert tree.nodes.evict(16).tolist() == list(range(16))


def test_lfu_takes_the_least_used() -> None:
    tree = _leaves(3, LFU())
    for leaf in (0, 0, 1, 2, 2):
        pinned = tree.pin(tree.match(leaf * 16 + np.arange(16, dtype=np.int32)))
        tree.nodes.unlock(pinned.node)
    assert tree.nodes.evict(16).tolist() == list(range(16, 32))


def test_the_last_leaf_is_trimmed_from_its_end() -> None:
    tree = _leaves(3)
    assert sorted(tree.nodes.evict(20).tolist()) == [*range(16), *range(28, 32)]
    assert tree.match(16 + np.arange(16, dtype=np.int32)).num_tokens == 12
    assert tree.match(32 + np.arange(16, dtype=np.int32)).num_tokens == 16


def test_a_partial_page_is_trimmed_first_and_whole() -> None:
    tree = RadixTree(4, LRU())
    tree.insert(np.arange(10, dtype=np.int32), np.arange(3, dtype=np.int32))
    assert tree.nodes.evict(1).tolist() == [2]
    assert (tree.nodes.num_tokens, tree.match(np.arange(10, dtype=np.int32)).num_tokens) == (8, 8)


def test_a_parent_goes_after_its_last_child() -> None:
    tree = RadixTree(1, LRU())
    for tokens in ([1, 2, 3], [1, 2, 4]):
        tree.insert(_array(tokens), _array([token * 10 + tokens[-1] for token in tokens]))
    assert tree.nodes.evict(1).tolist() == [33]
    assert tree.nodes.evict(1).tolist() == [44]
    assert sorted(tree.nodes.evict(9).tolist()) == [13, 23]
    assert tree.nodes.evict(1).tolist() == []


def test_r10_heap_work_a_victim_does_not_grow_with_the_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def push(heap: list[Any], entry: Any) -> None:
        calls.append("push")
        heapq.heappush(heap, entry)

    def pop(heap: list[Any]) -> Any:
        calls.append("pop")
        return heapq.heappop(heap)

    monkeypatch.setattr(eviction, "heappush", push)
    monkeypatch.setattr(eviction, "heappop", pop)
    monkeypatch.setattr(eviction, "heapify", lambda heap: pytest.fail("heap rebuilt"))
    counts = []
    for leaves in (100, 10_000):
        tree = _leaves(leaves)
        calls.clear()
        for _ in range(800):
            assert len(tree.nodes.evict(1)) == 1
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 800 // 16


def test_stale_entries_are_swept_out() -> None:
    tree = _leaves(10)
    match = tree.match(np.arange(16, dtype=np.int32))
    for _ in range(5000):
        pinned = tree.pin(match)
        tree.nodes.unlock(pinned.node)
    assert tree.nodes.queue.num_entries < 100
    assert len(tree.nodes.queue) == 10
    assert len(tree.nodes.evict(1000)) == 160
