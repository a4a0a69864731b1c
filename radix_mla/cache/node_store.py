"""NodeStore: the nodes of all namespaces; what they hold in all, who locks them, which goes next.

Every change to a node that a count or the eviction queue depends on is made here; what to change is
the tree's affair. Pure: numpy only, logical clock, no knowledge of free pages.
"""

from __future__ import annotations

from typing import NamedTuple

from radix_mla.cache.eviction import EvictionPolicy, EvictionQueue
from radix_mla.cache.namespace import Namespaces
from radix_mla.cache.radix_node import NOT_QUEUED, RadixNode, walk
from radix_mla.cache.retention import NO_KEEPS, Keeps, merged
from radix_mla.cache.token_run import NO_PAGES, Int32Array, joined
from radix_mla.errors import LeaseError


class Detached(NamedTuple):
    """What a flush took out of the index, and the pages among it that nobody has locked."""

    num_tokens: int
    pages: Int32Array


class NodeStore:
    """Counts are O(1) to read; each method says what it costs where that is not O(1) too."""

    def __init__(self, page_size: int, policy: EvictionPolicy, namespaces: Namespaces) -> None:
        self.page_size = page_size
        self.num_nodes = 0  # in the index, roots not counted
        self.num_tokens = 0  # in the index
        self.num_evictable_pages = 0
        self.num_protected_pages = 0  # detached but locked ones included
        self.queue = EvictionQueue(policy)
        self.clock = 0  # ticks once an access
        self._namespaces = namespaces

    # -- accesses and locks

    def touch(self, node: RadixNode, keeps: Keeps = NO_KEEPS) -> None:
        """An access that ends at `node`."""
        self.clock += 1
        node.last_access = self.clock
        if keeps:
            node.keeps = merged(node.keeps, keeps, self.queue.now_s)
        if node.queued != NOT_QUEUED:
            self.queue.push(node)

    def keep(self, node: RadixNode, keeps: Keeps) -> None:
        """What a node that is gone leaves to the one that has its tokens too."""
        if keeps:
            node.keeps = merged(node.keeps, keeps, self.queue.now_s)
            if node.queued != NOT_QUEUED:
                self.queue.push(node)

    def lock(self, node: RadixNode) -> None:
        """Protects the path, `node` included. Stops at the first ancestor that is locked."""
        self.queue.discard(node)  # nodes above it are no leaves
        page, num_pages = self.page_size, 0
        current: RadixNode | None = node
        while current is not None:
            current.lock_ref += 1
            if current.lock_ref > 1:
                break
            num_pages += -(-current.num_tokens // page)
            current = current.parent
        self.num_evictable_pages -= num_pages
        self.num_protected_pages += num_pages

    def unlock(self, node: RadixNode, keeps: Keeps = NO_KEEPS) -> Int32Array:
        """Takes one lock back; counts as an access, which leaves `keeps` on the path.

        Returns pages that nobody needs any more: of a flushed namespace, or of a partial leaf
        whose tokens a sibling holds too.
        """
        if node.lock_ref <= 0:
            raise LeaseError("unlock of a node that is not locked")
        self.touch(node, keeps)
        page, num_pages = self.page_size, 0
        current: RadixNode | None = node
        while current is not None:
            current.lock_ref -= 1
            if current.lock_ref:
                break
            num_pages += -(-current.num_tokens // page)
            current = current.parent
        self.num_protected_pages -= num_pages
        self.num_evictable_pages += num_pages
        return self._settle(node)

    def _settle(self, node: RadixNode) -> Int32Array:
        """Finds a node just unlocked its place: the queue, or out, if nobody needs it any more."""
        if node.parent is None:
            self._namespaces.close_if_empty(node.namespace)
            return NO_PAGES
        if node.lock_ref or node.children:
            return NO_PAGES
        if not node.namespace.detached:
            longer = self._made_redundant_by(node)
            if longer is None:
                self.queue.push(node)
                return NO_PAGES
            self.keep(longer, node.keeps)
        dropped = [self.remove(node)]
        while (parent := node.parent) is not None and parent.namespace.detached:
            node = parent
            if node.lock_ref or node.children or node.parent is None:
                break
            dropped.append(self.remove(node))
        return joined(dropped)

    def _made_redundant_by(self, node: RadixNode) -> RadixNode | None:
        if node.num_tokens >= self.page_size or node.parent is None:
            return None
        return node.parent.children.longer(node.key)

    # -- growing

    def add(self, leaf: RadixNode) -> None:
        """Puts a new leaf below its parent."""
        parent = leaf.parent
        assert parent is not None
        self.queue.discard(parent)
        parent.children.add(leaf.key, leaf)
        self.num_nodes += 1
        self.num_tokens += leaf.num_tokens
        self.num_evictable_pages += leaf.num_pages
        self.queue.push(leaf)

    def extend(self, leaf: RadixNode, tokens: Int32Array, pages: Int32Array) -> None:
        """Grows a leaf at its end; `pages` are those that the new tokens begin."""
        leaf.run.append(tokens, pages)
        leaf.num_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self.touch(leaf)
        if leaf.lock_ref:
            self.num_protected_pages += len(pages)
        else:
            self.num_evictable_pages += len(pages)
            self.queue.push(leaf)

    def split(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """Cuts at a page border; the new node is the upper part, `node` stays the lower one."""
        self.num_nodes += 1
        return node.cut(num_tokens)

    # -- removing

    def evict(self, num_pages: int) -> Int32Array:
        """Takes up to `num_pages` out of unlocked leaves, by rank, then in the policy's order.

        The last leaf is trimmed from its end to what is still needed. O(log leaves) a victim.
        """
        evicted: list[Int32Array] = []
        while num_pages > 0:
            node = self.queue.first()
            if node is None:
                break
            surplus = node.num_pages - num_pages
            evicted.append(self._trim(node, surplus) if surplus > 0 else self.remove(node))
            num_pages -= len(evicted[-1])
        return joined(evicted)

    def _trim(self, node: RadixNode, num_pages: int) -> Int32Array:
        """Shortens an unlocked leaf to `num_pages` > 0 full pages; its place in the queue stays."""
        pages = node.pages[num_pages:].copy()
        num_tokens = num_pages * self.page_size
        self.num_tokens -= node.num_tokens - num_tokens
        self.num_evictable_pages -= len(pages)
        node.num_tokens = num_tokens
        node.run.truncate(node.offset + num_tokens)
        return pages

    def remove(self, node: RadixNode, *, keep_parent: bool = False) -> Int32Array:
        """Takes an unlocked leaf out and gives its pages away. Its parent may become evictable.

        `keep_parent`: it is to have another child at once.
        """
        parent, pages = node.parent, node.pages
        assert parent is not None
        self.queue.discard(node)
        parent.children.remove(node.key)
        parent.inherit(node, self.queue.now_s)
        if parent.next is node:
            parent.next = None
        if node.offset:  # else the run goes with its only node
            pages = pages.copy()
            node.run.truncate(node.offset)
        self.num_evictable_pages -= len(pages)
        if not node.namespace.detached:
            self.num_nodes -= 1
            self.num_tokens -= node.num_tokens
        if not parent.children and not parent.lock_ref and not keep_parent:
            if parent.parent is None:
                self._namespaces.close_if_empty(parent.namespace)
            else:
                self.queue.push(parent)
        return pages

    def detach(self, namespace: str) -> Detached:
        """Takes a namespace out of the index at once, locked nodes included. O(its nodes)."""
        space = self._namespaces.find(namespace)
        if space is None:
            return Detached(0, NO_PAGES)
        nodes = list(walk(space.root))[1:]
        num_tokens = sum(node.num_tokens for node in nodes)
        self._namespaces.detach(space)
        self.num_nodes -= len(nodes)
        self.num_tokens -= num_tokens
        pages = [self.remove(node) for node in reversed(nodes) if not node.lock_ref]
        self._namespaces.close_if_empty(space)
        return Detached(num_tokens, joined(pages))
