"""RadixTree: match, insert, cut, lock, memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from radix_mla.cache import match as match_module
from radix_mla.cache.audit import audit_tree
from radix_mla.cache.eviction import LRU
from radix_mla.cache.radix_node import RadixNode, walk
from radix_mla.cache.radix_tree import Insert, RadixTree
from radix_mla.errors import AuditError, LeaseError

PAGES = pytest.mark.parametrize("page", [1, 16, 64])


class PagedTree:
    """A tree with a counter for pages: each insert brings fresh ones."""

    def __init__(self, page_size: int) -> None:
        self.tree = RadixTree(page_size, LRU())
        self.nodes = self.tree.nodes
        self.next_page = 0

    def insert(self, tokens: object, namespace: str = "") -> tuple[Insert, np.ndarray]:
        array = np.asarray(tokens, dtype=np.int32)
        count = -(-len(array) // self.tree.page_size)
        pages = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        result = self.tree.insert(array, pages, namespace)
        self.audit()
        return result, pages

    def hit(self, tokens: object, namespace: str = "") -> int:
        return self.tree.match(np.asarray(tokens, dtype=np.int32), namespace).num_tokens

    def audit(self, *locked: RadixNode) -> None:
        audit_tree(self.tree, Counter(locked))


def _runs(tree: RadixTree) -> list:
    nodes = [
        node for root in tree.namespaces.roots() for node in walk(root) if node.parent is not None
    ]
    return list({id(node.run): node.run for node in nodes}.values())


@PAGES
@pytest.mark.parametrize(
    ("num_pages", "extra"), [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1), (3, 0), (3, 1)]
)
def test_r04_keys_of_every_length(page: int, num_pages: int, extra: int) -> None:
    length = num_pages * page + extra
    paged, tokens = PagedTree(page), np.arange(length)
    result, pages = paged.insert(tokens)
    assert (result.num_matched, result.num_owned) == (0, len(pages))
    assert paged.hit(tokens) == paged.nodes.num_tokens == length
    assert paged.hit(np.append(tokens, 99)) == length
    assert paged.hit(tokens[: length // 2]) == length // 2
    again, _ = paged.insert(tokens)
    assert (again.num_matched, paged.nodes.num_tokens) == (length, length)
    assert sorted(paged.nodes.evict(1000)) == sorted(pages)
    assert (paged.nodes.num_tokens, paged.nodes.num_nodes, paged.hit(tokens)) == (0, 0, 0)
    paged.audit()


@PAGES
def test_match_of_nothing(page: int) -> None:
    paged = PagedTree(page)
    assert paged.hit([]) == paged.hit([1]) == 0
    paged.insert([1, 2])
    assert paged.hit([]) == paged.hit([2]) == 0


@PAGES
def test_match_reads_only(page: int) -> None:
    paged = PagedTree(page)
    paged.insert(np.arange(200))
    before = (paged.nodes.num_nodes, paged.nodes.queue.num_entries, paged.nodes.clock)
    for length in range(0, 200, 7):
        assert paged.hit([*range(length), 9999]) == length
    assert before == (paged.nodes.num_nodes, paged.nodes.queue.num_entries, paged.nodes.clock)


@PAGES
def test_insert_cuts_at_page_borders_inside_a_shared_run(page: int) -> None:
    paged, base = PagedTree(page), np.arange(4 * 64)
    _, pages = paged.insert(base)
    for length in (200, 130, 65, 64, 63, 1):
        other = np.append(base[:length], 10_000 + length)
        result, _ = paged.insert(other)
        assert result.num_matched == length // page * page
        assert paged.hit(other) == length + 1
        match = paged.tree.match(base.astype(np.int32))
        assert match.num_tokens == len(base)
        assert match.pages.tolist() == pages.tolist()
    assert len({id(node.run) for root in paged.tree.namespaces.roots() for node in walk(root)}) > 2


def test_a_chain_in_one_run_is_one_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, base = PagedTree(16), np.arange(16 * 200)
    paged.insert(base)
    for cut in range(16, 16 * 200, 16):
        paged.insert(np.append(base[:cut], -5))
    compares: list[int] = []
    original = match_module.common_prefix
    monkeypatch.setattr(
        match_module, "common_prefix", lambda a, b: compares.append(1) or original(a, b)
    )
    assert paged.hit(base) == len(base)
    assert paged.nodes.num_nodes >= 390
    assert len(compares) == 1


def test_longest_partial_page_among_many_children() -> None:
    paged, page = PagedTree(64), 64
    rng = np.random.default_rng(3)
    keys = [np.append(np.zeros(63, dtype=int), tail) for tail in range(1, 2001)]
    keys += [
        np.append(np.zeros(depth, dtype=int), rng.integers(1, 9, page - depth)) for depth in (5, 9)
    ]
    for key in keys:
        paged.tree.insert(key.astype(np.int32), np.zeros(1, dtype=np.int32))
    assert paged.hit(np.append(np.zeros(63, dtype=int), 5000)) == 63
    assert paged.hit(np.append(np.zeros(20, dtype=int), 5000)) == 20
    for key in keys[::97]:
        assert paged.hit(key) == 64
        assert paged.hit(key[:50]) == 50


def test_partial_match_equals_the_naive_longest_prefix() -> None:
    rng = np.random.default_rng(5)
    paged, known = PagedTree(8), []
    for _ in range(150):
        tokens = rng.integers(0, 3, rng.integers(1, 20))
        paged.insert(tokens)
        known.append(tokens)
        query = rng.integers(0, 3, 20)
        best = max(int(np.argmin(np.append(query[: len(key)] == key, False))) for key in known)
        assert paged.hit(query) == best


def test_a_shorter_partial_leaf_is_replaced() -> None:
    paged = PagedTree(16)
    _, first = paged.insert([1, 2, 3])
    result, _ = paged.insert([1, 2, 3, 4])
    assert result.dropped.tolist() == first.tolist()
    assert (paged.nodes.num_nodes, paged.nodes.num_tokens) == (1, 4)
    result, _ = paged.insert([1, 2])
    assert (result.num_matched, result.num_owned) == (2, 0)
    paged.insert([1, 2, 9])
    assert paged.nodes.num_nodes == 2


def test_r02_lock_covers_the_node_itself() -> None:
    paged = PagedTree(1)
    a, _ = paged.insert([1, 2, 3])
    paged.insert([1, 2, 3, 4])
    paged.insert([1, 2, 3, 5])
    assert a.node.num_tokens == 3 or paged.hit([1, 2, 3]) == 3
    b = paged.insert([1, 2, 3, 4])[0].node
    parent = b.parent
    assert parent is not None
    paged.nodes.lock(b)
    paged.audit(b)
    paged.nodes.evict(100)
    paged.audit(b)
    assert paged.hit([1, 2, 3, 4]) == 4
    assert paged.hit([1, 2, 3, 5]) == 3
    paged.nodes.unlock(b)
    assert (b.lock_ref, parent.lock_ref) == (0, 0)
    assert len(paged.nodes.evict(100)) == 4
    with pytest.raises(LeaseError):
        paged.nodes.unlock(b)


def test_r02_lock_of_a_match_inside_an_edge() -> None:
    paged = PagedTree(1)
    paged.insert(np.arange(10))
    pinned = paged.tree.pin(paged.tree.match(np.arange(4, dtype=np.int32)))
    paged.audit(pinned.node)
    assert len(paged.nodes.evict(100)) == 6
    assert paged.hit(np.arange(10)) == 4
    paged.nodes.unlock(pinned.node)
    paged.audit()
    assert len(paged.nodes.evict(100)) == 4


def test_locks_on_one_path_are_counted() -> None:
    paged = PagedTree(1)
    paged.insert([1, 2, 3])
    paged.insert([1, 2, 4])
    left = paged.insert([1, 2, 3])[0].node
    right = paged.insert([1, 2, 4])[0].node
    for node in (left, left, right):
        paged.nodes.lock(node)
    paged.audit(left, left, right)
    assert paged.nodes.num_protected_pages == 4
    paged.nodes.unlock(left)
    paged.nodes.unlock(right)
    paged.audit(left)
    assert (paged.nodes.num_protected_pages, paged.nodes.num_evictable_pages) == (3, 1)
    paged.nodes.unlock(left)
    paged.audit()


def test_r11_memory_follows_live_tokens() -> None:
    paged, prefix = PagedTree(16), np.arange(10_000)
    for depth in range(0, 10_000, 50):
        paged.insert(np.concatenate([prefix[:depth], 20_000 + depth + np.arange(100)]))
    paged.insert(prefix)
    while paged.nodes.num_tokens > 1000:
        paged.nodes.evict(100)
        paged.audit()
        live = paged.nodes.num_tokens
        held = sum(run.num_bytes for run in _runs(paged.tree))
        assert held <= 3 * live * (4 + 4 / 16) + 4096


@pytest.mark.parametrize("position", range(0, 40, 3))
@PAGES
def test_r16_no_hit_past_the_first_different_token(page: int, position: int) -> None:
    paged = PagedTree(page)
    tokens = np.arange(100, 141)
    paged.insert(tokens)
    other = tokens.copy()
    other[position] += 31
    other[position + 1] -= 1
    assert paged.hit(other) == position


def test_r16_random_pairs_hit_their_common_prefix() -> None:
    rng = np.random.default_rng(1)
    paged = PagedTree(4)
    for _ in range(500):
        tokens = rng.integers(0, 50, 24)
        paged.tree.insert(tokens.astype(np.int32), np.zeros(6, dtype=np.int32), "x")
        cut = rng.integers(0, 24)
        other = tokens.copy()
        other[cut] += 50
        assert paged.hit(other, "x") >= cut
        assert paged.hit(other, "x") < 24


def test_i01_namespaces_share_nothing() -> None:
    paged = PagedTree(4)
    tokens = np.arange(10)
    hits = []
    for salt in ("", "a", "b", "a", ""):
        hits.append(paged.hit(tokens, salt))
        paged.insert(tokens, salt)
    assert hits == [0, 0, 0, 10, 10]


def test_namespaces_leave_with_their_last_node() -> None:
    paged = PagedTree(4)
    for salt in range(1000):
        paged.insert(np.arange(4), str(salt))
        if salt >= 10:
            paged.nodes.evict(1)
    assert len(paged.tree.namespaces.names) == 10
    paged.nodes.evict(1000)
    assert paged.tree.namespaces.names == []
    paged.audit()


def test_a_closed_namespace_does_not_close_its_successor() -> None:
    paged = PagedTree(4)
    closed = paged.insert([])[0].node
    paged.nodes.lock(closed)
    paged.insert([1, 2, 3])
    paged.nodes.unlock(closed)
    assert paged.hit([1, 2, 3]) == 3
    paged.audit()


@pytest.mark.parametrize("counter", ["num_nodes", "num_tokens"])
def test_audit_finds_a_wrong_count(counter: str) -> None:
    paged = PagedTree(4)
    paged.insert(range(10))
    setattr(paged.nodes, counter, getattr(paged.nodes, counter) + 1)
    with pytest.raises(AuditError, match="counted"):
        paged.audit()


def test_audit_finds_a_lock_that_nobody_holds() -> None:
    paged = PagedTree(4)
    paged.insert(range(10))
    paged.nodes.lock(paged.tree.match(np.arange(10, dtype=np.int32), "").node)
    with pytest.raises(AuditError, match="lock count"):
        paged.audit()
