"""ChildIndex: the children of one tree node, by their first page of tokens."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from radix_mla.cache.token_run import common_prefix

if TYPE_CHECKING:
    from radix_mla.cache.radix_node import RadixNode


class ChildIndex:
    """Finds a child by its whole first page in O(1), and the longest partial match in O(log n).

    A key is the int32 bytes of a child's first page, shorter for a leaf of less than a page. Keys
    are also kept sorted: whatever shares most with a query is one of its two neighbours there, and
    whatever continues a key follows it at once.
    """

    __slots__ = ("keys", "nodes")

    def __init__(self) -> None:
        self.nodes: dict[bytes, RadixNode] = {}
        self.keys: list[bytes] = []  # sorted

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self.nodes.values())

    def get(self, key: bytes) -> RadixNode | None:
        return self.nodes.get(key)

    def add(self, key: bytes, node: RadixNode) -> None:
        """`key` must be new."""
        self.nodes[key] = node
        insort(self.keys, key)

    def replace(self, key: bytes, node: RadixNode) -> None:
        """Another node under a `key` that is there."""
        self.nodes[key] = node

    def remove(self, key: bytes) -> None:
        del self.nodes[key]
        del self.keys[bisect_left(self.keys, key)]

    def longest_match(self, key: bytes) -> tuple[RadixNode, int] | None:
        """The child that shares most first tokens with `key`, and their number (> 0)."""
        at = bisect_left(self.keys, key)
        tokens = np.frombuffer(key, dtype=np.int32)
        best, found = 0, b""
        for neighbour in self.keys[max(0, at - 1) : at + 1]:
            shared = common_prefix(tokens, np.frombuffer(neighbour, dtype=np.int32))
            if shared > best:
                best, found = shared, neighbour
        return (self.nodes[found], best) if best else None

    def continuation(self, key: bytes) -> RadixNode | None:
        """A child whose first page begins with `key` and is longer or equal; one, if several."""
        at = bisect_left(self.keys, key)
        if at < len(self.keys) and self.keys[at].startswith(key):
            return self.nodes[self.keys[at]]
        return None

    def longer(self, key: bytes) -> RadixNode | None:
        """A child other than the one of `key` that begins with `key`; one, if several."""
        at = bisect_left(self.keys, key) + 1
        if at < len(self.keys) and self.keys[at].startswith(key):
            return self.nodes[self.keys[at]]
        return None

    def beginning(self, key: bytes) -> RadixNode | None:
        """The child before `key` in order, if its whole first page is a proper prefix of `key`.

        Among children none of which begins another one, this is the only such child.
        """
        at = bisect_left(self.keys, key)
        if at and key.startswith(self.keys[at - 1]):
            return self.nodes[self.keys[at - 1]]
        return None
