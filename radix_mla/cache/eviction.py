"""Which leaf goes next: policies as keys over nodes, and the queue of evictable leaves."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple, Protocol, TypeVar

from radix_mla.cache.radix_node import NOT_QUEUED, RadixNode
from radix_mla.cache.retention import current

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
    """Orders evictable leaves of one rank: the smallest key goes first.

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


class Entry(NamedTuple):
    """A leaf's place: by rank, then in the policy's order."""

    rank: int
    key: Any
    serial: int
    node: RadixNode


class Expiry(NamedTuple):
    """When the entry with this serial is to be queued again, under a lower rank."""

    until_s: float
    serial: int
    node: RadixNode


class EvictionQueue:
    """Heap of evictable leaves with lazy deletion: O(log n) a push, amortised O(log n) a victim.

    `node.queued` names the node's only valid entry; others of it are skipped, and swept out when
    they outnumber the valid ones. A second heap says when ranks end; `advance` tells the time.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.now_s = 0.0
        self._policy = policy
        self._heap: list[Entry] = []
        self._expiries: list[Expiry] = []
        self._serial = 0
        self._num_valid = 0

    def __len__(self) -> int:
        return self._num_valid

    @property
    def num_entries(self) -> int:
        """Entries held, stale ones included."""
        return len(self._heap) + len(self._expiries)

    def valid(self) -> tuple[list[Entry], list[Expiry]]:
        """Without stale ones, for audits. O(n)."""
        return _valid(self._heap), _valid(self._expiries)

    def advance(self, now_s: float) -> None:
        """Leaves whose rank ends by then get their next one. O(log n) each; never goes back."""
        self.now_s = max(self.now_s, now_s)
        while self._expiries and self._expiries[0].until_s <= self.now_s:
            _, serial, node = heappop(self._expiries)
            if node.queued == serial:
                self.push(node)

    def push(self, node: RadixNode) -> None:
        """Queues a leaf under its present key, instead of an entry that it may have."""
        if node.queued == NOT_QUEUED:
            self._num_valid += 1
        self._serial += 1
        node.queued = self._serial
        keep, rank = current(node.keeps, self.now_s), 0
        most = 2 * self._num_valid + _SPARE_ENTRIES
        if keep is not None:
            rank = keep.rank
            heappush(self._expiries, Expiry(keep.until_s, self._serial, node))
            if len(self._expiries) > most:
                self._expiries = _valid(self._expiries)
                heapify(self._expiries)
        heappush(self._heap, Entry(rank, self._policy.key(node), self._serial, node))
        if len(self._heap) > most:
            self._heap = _valid(self._heap)
            heapify(self._heap)

    def discard(self, node: RadixNode) -> None:
        """Takes a node out, if it is in."""
        if node.queued != NOT_QUEUED:
            node.queued = NOT_QUEUED
            self._num_valid -= 1

    def first(self) -> RadixNode | None:
        """The leaf to evict next; it stays queued."""
        while self._heap:
            entry = self._heap[0]
            if entry.node.queued == entry.serial:
                return entry.node
            heappop(self._heap)
        return None


_Item = TypeVar("_Item", Entry, Expiry)


def _valid(items: list[_Item]) -> list[_Item]:
    return [item for item in items if item.node.queued == item.serial]
