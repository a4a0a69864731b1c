"""The invariants of the prefix cache, as code that raises AuditError. O(tree): tests and idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np

from radix_mla.cache.eviction import EvictionQueue
from radix_mla.cache.lease import Lease
from radix_mla.cache.radix_node import NOT_QUEUED, RadixNode, walk
from radix_mla.cache.radix_tree import RadixTree
from radix_mla.cache.retention import current, merged
from radix_mla.cache.token_run import NO_PAGES, Int32Array
from radix_mla.errors import AuditError

if TYPE_CHECKING:
    from radix_mla.cache.prefix_cache import CacheCounts


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise AuditError(what)


def audit_tree(tree: RadixTree, locks: Counter[RadixNode]) -> None:
    """Shape, counts and queue of the tree; `locks` says who holds how many locks on which node."""
    nodes = tree.nodes
    seen: set[RadixNode] = set()
    num_nodes = num_tokens = num_evictable = num_protected = num_queued = 0
    for root in tree.namespaces.roots():
        expect(root.num_tokens == 0 and root.parent is None, "a root with tokens or a parent")
        expect(bool(root.children) or root.lock_ref > 0, "an empty namespace is kept")
        for node in walk(root):
            _audit_node(node, locks.get(node, 0), tree.page_size)
            seen.add(node)
            num_queued += node.queued != NOT_QUEUED
            if node.lock_ref:
                num_protected += node.num_pages
            else:
                expect(not node.namespace.detached, "an unlocked node was left by a flush")
                num_evictable += node.num_pages
            if node is not root and not node.namespace.detached:
                num_nodes += 1
                num_tokens += node.num_tokens
    expect(locks.keys() <= seen, "a lock on a lost node")
    expect(num_nodes == nodes.num_nodes, f"{num_nodes} nodes, counted {nodes.num_nodes}")
    expect(num_tokens == nodes.num_tokens, f"{num_tokens} tokens, counted {nodes.num_tokens}")
    expect(num_evictable == nodes.num_evictable_pages, "evictable pages miscounted")
    expect(num_protected == nodes.num_protected_pages, "protected pages miscounted")
    expect(num_queued == len(nodes.queue), "queued leaves miscounted")
    _audit_queue(nodes.queue)


def _audit_queue(queue: EvictionQueue) -> None:
    """Each leaf is queued once, under its rank of now, which ends when it is noted to."""
    entries, expiries = queue.valid()
    expect(len({entry.node for entry in entries}) == len(entries) == len(queue), "entries differ")
    ends = {expiry.node: expiry.until_s for expiry in expiries}
    expect(len(ends) == len(expiries), "a rank that ends twice")
    for entry in entries:
        keep = current(entry.node.keeps, queue.now_s)
        rank, until_s = keep or (0, None)
        expect(entry.rank == rank, f"queued under rank {entry.rank}, has {rank}")
        expect(ends.get(entry.node) == until_s, "the end of a rank is not noted")


def _audit_node(node: RadixNode, num_locks: int, page_size: int) -> None:
    keys = node.children.keys
    expect(sorted(child.key for child in node.children) == keys, "children differ from their keys")
    num_locked = sum(child.lock_ref > 0 for child in node.children)
    expect(node.lock_ref == num_locks + num_locked, "lock count is not locks + locked children")
    expect(node.run.page_size == page_size, "page size differs")
    expect(merged(node.keeps, (), float("-inf")) == node.keeps, "keeps out of order")
    expect(all(keep.rank > 0 for keep in node.keeps), "a keep without a rank")
    for child in node.children:
        expect(child.parent is node and child.start == node.end, "child out of place")
        expect(child.num_tokens > 0, "empty node")
        expect(child.namespace is node.namespace, "child of another namespace")
        expect(node.children.get(child.key) is child, "child not found by its key")
        if child.num_tokens < page_size and not child.lock_ref:
            expect(not node.children.longer(child.key), "a redundant partial leaf is kept")
    if node.children:
        expect(node.num_tail_tokens == 0, "partial page above other nodes")
    if node.parent is None:
        return
    evictable = not node.children and not node.lock_ref
    expect((node.queued != NOT_QUEUED) == evictable, "queue and evictable leaves differ")
    expect(node.offset % page_size == 0, "node not at a page border of its run")
    stop = node.offset + node.num_tokens
    if node.next is None:
        expect(node.run.num_tokens == stop, "run goes on behind its last node")
        expect(len(node.run.tokens) <= 2 * stop + page_size, "run much larger than its tokens")
    else:
        follows = node.next.run is node.run and node.next.offset == stop
        expect(follows and node.next.parent is node, "next node is not the next of the run")


def audit_pages(
    tree: RadixTree, free: Int32Array, leases: Collection[Lease], counts: CacheCounts
) -> None:
    """Every page is free, in one node, or private to one lease; page tables follow their paths."""
    placed = [free]
    for root in tree.namespaces.roots():
        placed += [node.pages for node in walk(root)]
    num_private = 0
    for lease in leases:
        private = lease.page_table[lease.num_tree_pages :]
        num_private += len(private)
        placed.append(private)
        path = path_pages(lease.node)
        expect(np.array_equal(lease.page_table[: len(path)], path), "page table off its path")
        expect(len(path) == lease.num_tree_pages, "path and its number of pages differ")
    uses = np.bincount(np.concatenate(placed), minlength=counts.total)
    expect(len(uses) == counts.total, "page outside the pool")
    expect(bool((uses == 1).all()), f"pages in several places or in none: {np.where(uses != 1)[0]}")
    expect(num_private == counts.private, f"{num_private} private, counted {counts.private}")
    expect(sum(counts[1:]) == counts.total, f"counts do not add up: {counts}")


def path_pages(node: RadixNode) -> Int32Array:
    """Pages from the root to the end of `node`."""
    parts: list[Int32Array] = []
    current: RadixNode | None = node
    while current is not None:
        parts.append(current.pages)
        current = current.parent
    return np.concatenate(parts[::-1]) if parts else NO_PAGES
