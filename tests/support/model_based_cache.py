"""A PrefixCache under simulated requests, with fake rows and a naive oracle.

The pool holds one integer a row: the hash of namespace and token prefix that a right computation
writes there. Free pages are poisoned after each operation, so a stolen, shared or early freed page
shows as a wrong row of some running request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from radix_mla.cache.eviction import EvictionPolicy
from radix_mla.cache.lease import Lease
from radix_mla.cache.prefix_cache import PageCopy, PrefixCache
from radix_mla.cache.retention import NO_RETENTION, Retention
from radix_mla.errors import NoSpace

POISON = -1


def prefix_hashes(tokens: list[int], namespace: str) -> list[int]:
    """What each row must hold."""
    rows, state = [], hash(namespace)
    for token in tokens:
        state = hash((state, token))
        rows.append(state)
    return rows


class NaiveIndex:
    """The oracle: all committed sequences of each namespace, compared token by token."""

    def __init__(self) -> None:
        self._sequences: dict[str, set[tuple[int, ...]]] = {}
        self._inexact: set[str] = set()

    def add(self, tokens: list[int], namespace: str) -> None:
        self._sequences.setdefault(namespace, set()).add(tuple(tokens))

    def hit(self, tokens: list[int], namespace: str) -> int:
        best = 0
        for known in self._sequences.get(namespace, ()):
            length = 0
            while length < min(len(known), len(tokens)) and known[length] == tokens[length]:
                length += 1
            best = max(best, length)
        return best

    def exact(self, namespace: str) -> bool:
        """Whether nothing of this namespace can have been evicted."""
        return namespace not in self._inexact

    def evicted(self) -> None:
        self._inexact.update(self._sequences)

    def flush(self, namespace: str) -> None:
        self._sequences.pop(namespace, None)
        self._inexact.discard(namespace)

    @property
    def namespaces(self) -> list[str]:
        return list(self._sequences)


@dataclass(eq=False)
class FakeRequest:
    """A sequence that is being computed; `num_computed` rows of it are in the pool."""

    lease: Lease
    tokens: list[int]
    namespace: str
    num_computed: int
    flushed: bool = False
    copies_partial: bool = False  # the hit ended inside a page that is still to be copied


class CacheSimulation:
    """Runs requests against the cache and checks all of them after each operation."""

    def __init__(
        self, num_pages: int, page_size: int, *, policy: EvictionPolicy | None = None
    ) -> None:
        self.cache = PrefixCache(num_pages, page_size, policy=policy, seed=0)
        self.page_size = page_size
        self.now_s = 0.0
        self.rows = np.full(num_pages * page_size, POISON, dtype=np.int64)
        self.oracle = NaiveIndex()
        self.running: list[FakeRequest] = []

    def start(
        self, tokens: list[int], namespace: str = "", retention: Retention = NO_RETENTION
    ) -> FakeRequest:
        """Acquires with limit len - 1, and checks the hit against the oracle."""
        limit = len(tokens) - 1
        expected = self.oracle.hit(tokens[:limit], namespace)
        peeked = self.cache.peek(tokens[:limit], namespace)
        lease = self.cache.acquire(tokens, namespace, limit=limit, retention=retention)
        assert lease.num_cached == peeked
        assert lease.source is None or lease.source.num_pages == 1
        if self.oracle.exact(namespace):
            assert lease.num_cached == expected
        else:
            assert lease.num_cached <= expected
        request = FakeRequest(lease, list(tokens), namespace, lease.num_cached)
        request.copies_partial = lease.num_cached % self.page_size > 0
        self.running.append(request)
        self.check()
        return request

    def compute(self, request: FakeRequest, num_tokens: int) -> bool:
        """One step: room, device copies, rows. False if there is no space, with nothing changed."""
        target = min(request.num_computed + num_tokens, len(request.tokens))
        before = (self.cache.counts(), request.lease.page_table.tolist())
        needed = self.cache.pages_needed(request.lease, target)
        evicted = self.cache.evicted_tokens["capacity"]
        if needed > self.cache.available_pages():
            with pytest.raises(NoSpace) as caught:
                self.cache.grow(request.lease, target)
            assert before == (self.cache.counts(), request.lease.page_table.tolist())
            assert (caught.value.needed, caught.value.available) == (
                needed,
                self.cache.available_pages(),
            )
            return False
        copies = self.cache.grow(request.lease, target)
        assert len(request.lease.page_table) == len(before[1]) + needed
        if self.cache.evicted_tokens["capacity"] > evicted:
            self.oracle.evicted()
        self._poison_free_pages()
        self._run_copies(request, copies, num_new_pages=needed)
        rows = prefix_hashes(request.tokens, request.namespace)
        for position in range(request.num_computed, target):
            self.rows[self._slot(request, position)] = rows[position]
        request.num_computed = target
        self.check()
        return True

    def _run_copies(
        self, request: FakeRequest, copies: list[PageCopy], *, num_new_pages: int
    ) -> None:
        """One copy, in the first growth after a partial hit; none otherwise."""
        assert len(copies) == (request.copies_partial and num_new_pages > 0)
        for copy in copies:
            num_cached = request.lease.num_cached
            assert copy.num_rows == num_cached % self.page_size
            assert copy.dst_page == request.lease.page_table[num_cached // self.page_size]
            source = self._slots(copy.src_page)[: copy.num_rows]
            self.rows[self._slots(copy.dst_page)[: copy.num_rows]] = self.rows[source]
            request.copies_partial = False

    def commit(self, request: FakeRequest) -> None:
        tokens = request.tokens[: request.num_computed]
        if len(tokens) > 0:
            self.cache.commit(request.lease, tokens)
            if not request.flushed:
                self.oracle.add(tokens, request.namespace)
                if self.oracle.exact(request.namespace):
                    assert self.cache.peek(tokens, request.namespace) == len(tokens)
        self.check()

    def release(self, request: FakeRequest) -> None:
        self.cache.release(request.lease)
        self.running.remove(request)
        self.check()

    def evict(self, num_pages: int) -> int:
        expected = min(num_pages, self.cache.counts().evictable)
        count = self.cache.evict(num_pages)
        assert count == expected
        if count:
            self.oracle.evicted()
        self.check()
        return count

    def flush(self, namespace: str | None = None) -> None:
        """Empties one namespace, or all; nothing of before may hit afterwards."""
        known = self.oracle.namespaces if namespace is None else [namespace]
        self.cache.flush(namespace)
        for request in self.running:
            if namespace is None or request.namespace == namespace:
                request.flushed = True
        for name in known:
            self.oracle.flush(name)
        if namespace is None:
            assert self.cache.num_cached_tokens == self.cache.num_nodes == 0
        self.check()

    def pass_time(self, num_s: float) -> None:
        self.now_s += num_s
        self.cache.set_time(self.now_s)
        self.check()

    def check(self) -> None:
        """The audit, and every computed row of every running request."""
        self.cache.audit()
        self._poison_free_pages()
        for request in self.running:
            expected = prefix_hashes(request.tokens, request.namespace)
            if request.copies_partial:  # rows of the partial page are still in its source
                source = self._slots(request.lease.source_page)[: request.lease.num_partial]
                first = request.lease.num_cached - request.lease.num_partial
                assert self.rows[source].tolist() == expected[first : request.lease.num_cached]
                computed = first
            else:
                computed = request.num_computed
            found = [int(self.rows[self._slot(request, at)]) for at in range(computed)]
            assert found == expected[:computed]

    def drain(self) -> None:
        """Releases all and evicts all: every page must come back."""
        for request in list(self.running):
            self.release(request)
        counts = self.cache.counts()
        assert (counts.protected, counts.private) == (0, 0)
        self.evict(counts.total)
        assert self.cache.counts().free == counts.total
        assert self.cache.num_nodes == self.cache.num_namespaces == 0

    def _slot(self, request: FakeRequest, position: int) -> int:
        page = int(request.lease.page_table[position // self.page_size])
        return page * self.page_size + position % self.page_size

    def _slots(self, page: int) -> np.ndarray:
        return np.arange(page * self.page_size, (page + 1) * self.page_size)

    def _poison_free_pages(self) -> None:
        for page in self.cache.free_pages():
            self.rows[self._slots(int(page))] = POISON
