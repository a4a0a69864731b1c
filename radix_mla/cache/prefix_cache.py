"""PrefixCache: the only owner of pages.

Each page is in one place: free, in the tree (evictable, or protected by a lock), or private to one
lease. A lease is acquired before a request runs, grown before each step, committed after steps, and
released once.

    tokens:  |---- in the tree ----|-- computed by us --|-- not yet --|
    pages:   |    shared, locked   | ours until commit  | unallocated |
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import NamedTuple

import numpy as np

from radix_mla.cache.audit import audit_pages, audit_tree
from radix_mla.cache.eviction import LRU, EvictionPolicy
from radix_mla.cache.ghost import Ghost
from radix_mla.cache.lease import Lease
from radix_mla.cache.namespace import is_ephemeral
from radix_mla.cache.page_allocator import PageAllocator
from radix_mla.cache.radix_tree import Insert, RadixTree
from radix_mla.cache.retention import NO_RETENTION, Keeps, Retention
from radix_mla.cache.token_run import Int32Array, TokensLike, as_tokens
from radix_mla.errors import LeaseError, NoSpace

_SPARE_TABLE_PAGES = 8


class PageCopy(NamedTuple):
    """The first `num_rows` rows of a page, to be copied on the device before the step's forward."""

    src_page: int
    dst_page: int
    num_rows: int


class CacheCounts(NamedTuple):
    """Pages by state; free + evictable + protected + private + pinned == total."""

    total: int
    free: int
    evictable: int
    protected: int
    private: int
    pinned: int


class PrefixCache:
    """Leases over a radix tree of pages; token-exact hits at every page size.

    A flush takes locked nodes out of the index too. A lease from before it stays out until its
    release: its commits store nothing, its pages are its own, and nothing of it hits.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        policy: EvictionPolicy | None = None,
        seed: int | None = None,
    ) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages={num_pages} and page_size={page_size} must be positive")
        self.num_pages = num_pages
        self.page_size = page_size
        self.evicted_tokens: Counter[str] = Counter(capacity=0, flush=0, duplicate=0)
        self._tree = RadixTree(page_size, policy if policy is not None else LRU())
        self._nodes = self._tree.nodes
        self._allocator = PageAllocator(num_pages)
        self._ghost = Ghost(seed=secrets.randbits(64) if seed is None else seed)
        self._leases: set[Lease] = set()

    # -- a request's life

    def peek(self, tokens: TokensLike, namespace: str = "") -> int:
        """Tokens that a request would hit. Pure read."""
        return self._tree.match(as_tokens(tokens), namespace).num_tokens

    def acquire(
        self,
        tokens: TokensLike,
        namespace: str = "",
        *,
        limit: int | None = None,
        retention: Retention = NO_RETENTION,
    ) -> Lease:
        """Locks the longest cached prefix of tokens[:limit]. Allocates nothing.

        `retention`: how its rows are to be kept once they are unlocked, unless they are dropped
        with their namespace anyway.
        """
        if limit is not None:
            tokens = tokens[: max(0, limit)]
        match = self._tree.match(as_tokens(tokens), namespace)
        num_pages = len(match.pages)
        table = np.empty(num_pages + _SPARE_TABLE_PAGES, dtype=np.int32)
        table[:num_pages] = match.pages
        pinned = self._tree.pin(match, namespace)
        lease = Lease(
            namespace,
            pinned.node,
            table=table,
            num_pages=num_pages,
            num_cached=match.num_tokens,
            retention=NO_RETENTION if is_ephemeral(namespace) else retention,
        )
        if match.partial is not None:
            lease.source, lease.source_page = pinned.source, match.partial.page
            lease.num_partial, lease.copy_pending = match.partial.num_tokens, True
        self._leases.add(lease)
        return lease

    def pages_needed(self, lease: Lease, num_tokens: int) -> int:
        """Pages that grow(lease, num_tokens) would allocate."""
        return max(0, -(-num_tokens // self.page_size) - lease.num_pages)

    def grow(self, lease: Lease, num_tokens: int) -> list[PageCopy]:
        """Makes room for rows [0, num_tokens), evicting if needed.

        Raises NoSpace with nothing changed. The first call that allocates after a partial hit
        returns the copy of its rows; the source stays locked until the next commit or release.
        """
        self._check(lease)
        needed = self.pages_needed(lease, num_tokens)
        if not needed:
            return []
        available = self.available_pages()
        if needed > available:
            raise NoSpace(needed, available)
        self.evict(needed - self._allocator.num_free)
        lease.append_pages(self._allocator.allocate(needed))
        if not lease.copy_pending:
            return []
        lease.copy_pending = False
        dst_page = int(lease.page_table[-needed])
        return [PageCopy(lease.source_page, dst_page, lease.num_partial)]

    def commit(self, lease: Lease, tokens: TokensLike) -> None:
        """Rows [0, len(tokens)) are computed: puts them into the tree. O(new tokens).

        `tokens` is the whole sequence so far. Where the tree held the same tokens already, the
        page table is pointed at its pages and ours are freed.
        """
        self._check(lease)
        num_tokens = len(tokens)
        if num_tokens == lease.num_committed:
            return
        if not lease.num_committed < num_tokens <= lease.num_pages * self.page_size:
            raise LeaseError(
                f"commit of {num_tokens} tokens: {lease.num_committed} are committed, and "
                f"{lease.num_pages} pages of {self.page_size} are held"
            )
        freed = self._unlock_source(lease)
        lease.num_committed = num_tokens
        if not lease.node.namespace.detached:
            self._remember(lease, tokens)
            first_page = lease.node.end // self.page_size
            fresh = as_tokens(tokens[first_page * self.page_size :])
            stop_page = -(-num_tokens // self.page_size)
            result = self._tree.insert_after(
                lease.node, fresh, lease.page_table[first_page:stop_page], self._keeps(lease)
            )
            freed += self._settle(lease, result, first_page)
        self._free(freed)

    def _settle(self, lease: Lease, result: Insert, first_page: int) -> list[Int32Array]:
        """Points the lease at what the tree holds now; returns the pages to free after that."""
        num_matched = len(result.matched_pages)
        num_own = max(0, lease.num_tree_pages - first_page)  # a partial page that the tree has
        table = lease.page_table[first_page : first_page + num_matched]
        duplicates = table[num_own:].copy()
        table[:] = result.matched_pages
        self.evicted_tokens["duplicate"] += len(duplicates) * self.page_size
        freed = [duplicates, result.dropped]
        if result.node is not lease.node:
            self._nodes.lock(result.node)
            freed.append(self._nodes.unlock(lease.node, self._keeps(lease)))
            lease.node = result.node
        return freed

    def release(self, lease: Lease) -> None:
        """Unlocks the path and frees what was not committed."""
        self._check(lease)
        lease.released = True
        self._leases.remove(lease)
        freed = [lease.page_table[lease.num_tree_pages :]]
        freed += self._unlock_source(lease)
        freed.append(self._nodes.unlock(lease.node, self._keeps(lease)))
        self._free(freed)

    def _unlock_source(self, lease: Lease) -> list[Int32Array]:
        if lease.source is None:
            return []
        source, lease.source, lease.copy_pending = lease.source, None, False
        return [self._nodes.unlock(source, self._keeps(lease))]

    def _keeps(self, lease: Lease) -> Keeps:
        return lease.retention.keeps(self._nodes.queue.now_s)

    def _free(self, freed: list[Int32Array]) -> None:
        for pages in freed:
            self._allocator.free(pages)

    def _check(self, lease: Lease) -> None:
        if lease.released:
            raise LeaseError("this lease has been released")

    # -- space

    def set_time(self, now_s: float) -> None:
        """What counts as now in retention, until the next call; before the first one it is 0."""
        self._nodes.queue.advance(now_s)

    def available_pages(self) -> int:
        """Pages that a grow can get: free and evictable."""
        return self._allocator.num_free + self._nodes.num_evictable_pages

    def evict(self, num_pages: int) -> int:
        """Frees up to `num_pages` evictable pages; returns how many."""
        num_tokens = self._nodes.num_tokens
        pages = self._nodes.evict(num_pages)
        self.evicted_tokens["capacity"] += num_tokens - self._nodes.num_tokens
        self._allocator.free(pages)
        return len(pages)

    def flush(self, namespace: str | None = None) -> int:
        """Empties the index, or one namespace of it, at once; returns the tokens dropped.

        Locked pages are freed when their last lease goes.
        """
        names = self._tree.namespaces.names if namespace is None else [namespace]
        num_tokens = 0
        for name in names:
            detached = self._nodes.detach(name)
            num_tokens += detached.num_tokens
            self._allocator.free(detached.pages)
        self.evicted_tokens["flush"] += num_tokens
        return num_tokens

    def drop_namespace(self, namespace: str) -> int:
        """Flushes a namespace of which nothing shall stay."""
        return self.flush(namespace)

    # -- what is there

    @property
    def num_nodes(self) -> int:
        return self._nodes.num_nodes

    @property
    def num_cached_tokens(self) -> int:
        return self._nodes.num_tokens

    @property
    def num_namespaces(self) -> int:
        return len(self._tree.namespaces.names)

    def counts(self) -> CacheCounts:
        """Pages by state, O(1)."""
        free, nodes = self._allocator.num_free, self._nodes
        evictable, protected = nodes.num_evictable_pages, nodes.num_protected_pages
        private = self.num_pages - free - evictable - protected
        return CacheCounts(self.num_pages, free, evictable, protected, private, 0)

    def classify_miss(self, tokens: TokensLike, namespace: str, num_matched: int) -> dict[str, int]:
        """Why tokens[num_matched:] missed: new, evicted, namespace. Ask before their commit."""
        return self._ghost.classify(as_tokens(tokens), namespace, num_matched)

    def _remember(self, lease: Lease, tokens: TokensLike) -> None:
        if not is_ephemeral(lease.namespace):
            trace = lease.trace
            self._ghost.remember(
                as_tokens(tokens[trace.num_tokens :]),
                lease.namespace,
                trace,
                num_known=lease.num_cached,
            )

    def free_pages(self) -> Int32Array:
        """A copy of the free page ids, for tests and tools."""
        return self._allocator.free_pages.copy()

    def audit(self) -> None:
        """Raises AuditError unless every page is in one place and all counts hold. O(pages)."""
        self._allocator.audit()
        locks = Counter(lease.node for lease in self._leases)
        locks.update(lease.source for lease in self._leases if lease.source is not None)
        audit_tree(self._tree, locks)
        audit_pages(self._tree, self._allocator.free_pages, self._leases, self.counts())
