"""Which leaf goes next: policies as keys over nodes, and the queue of evictable leaves."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from radix_mla.cache.radix_node import NOT_QUEUED, RadixNode

_SPARE_ENTRIES = 64


class NodeStats(Protocol):
    """What a policy may read. Times are ticks of the tree's logical clock."""

    @property
    def created(self) -> int: ...
    @property
    def last_access(self) -> int: ...
    @property
    def num_hits(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def start(self) -> int: ...


class EvictionPolicy(Protocol):
    """Orders evictable leaves: the smallest key goes first.

    The key is read when a leaf becomes evictable and must be comparable with all others.
    """

    def key(self, node: NodeStats) -> Any: ...


class LRU:
    """The least recently used first."""

    def key(self, node: NodeStats) -> int:
        return node.last_access


class LFU:
    """The least often hit first, the least recently used among equals.

    Hits are counted by node: what a request adds to its own leaf has the hits of the leaf.
    """

    def key(self, node: NodeStats) -> tuple[int, int]:
        return node.num_hits, node.last_access


class FIFO:
    """The oldest first; what a request adds to its own leaf is as old as the leaf."""

    def key(self, node: NodeStats) -> int:
        return node.created


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


class EvictionQueue:
    """Heap of evictable leaves with lazy deletion: O(log n) a push, amortised O(log n) a victim.

    `node.queued` names the node's only valid entry; others of it are skipped, and swept out when
    they outnumber the valid ones.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Any, int, RadixNode]] = []
        self._serial = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    @property
    def num_entries(self) -> int:
        """Entries held, stale ones included."""
        return len(self._heap)

    def push(self, node: RadixNode) -> None:
        """Queues a leaf under its present key, instead of an entry that it may have."""
        if node.queued == NOT_QUEUED:
            self._num_valid += 1
        self._serial += 1
        node.queued = self._serial
        heappush(self._heap, (self._policy.key(node), self._serial, node))
        if len(self._heap) > 2 * self._num_valid + _SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2].queued == entry[1]]
            heapify(self._heap)

    def discard(self, node: RadixNode) -> None:
        """Takes a node out, if it is in."""
        if node.queued != NOT_QUEUED:
            node.queued = NOT_QUEUED
            self._num_valid -= 1

    def first(self) -> RadixNode | None:
        """The leaf to evict next; it stays queued."""
        while self._heap:
            _, serial, node = self._heap[0]
            if node.queued == serial:
                return node
            heappop(self._heap)
        return None
