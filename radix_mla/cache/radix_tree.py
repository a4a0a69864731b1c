"""RadixTree: which pages hold the rows of which token prefixes.

Edges hold runs of tokens and their pages. Nodes are cut at page borders only, so siblings may share
up to page - 1 first tokens, and only a leaf's last page may be partial:

    page 4          root
                     |  0 1 2 3 | 4 5 6 7          two full pages, shared by both below
               +-----+-----+
        8 9 10 11 | 12     8 9 99                  one first token shared; two partial last pages

A partial last page may be in the writing: the one path lock on such a leaf belongs to the request
that appends to the page. Everybody else locks it as the source of a copy at most, and inserts its
own page beside it. Pure: numpy only, logical clock, no knowledge of free pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from radix_mla.cache.eviction import EvictionPolicy, EvictionQueue
from radix_mla.cache.match import Match, descend, longest_match
from radix_mla.cache.namespace import Namespaces
from radix_mla.cache.radix_node import NOT_QUEUED, RadixNode
from radix_mla.cache.retention import NO_KEEPS, Keeps, merged
from radix_mla.cache.token_run import NO_PAGES, Int32Array, TokenRun, common_prefix, joined
from radix_mla.errors import LeaseError


class Insert(NamedTuple):
    """What an insert found and did; pages count from the first one given."""

    num_matched: int  # tokens that were in the tree already
    node: RadixNode  # deepest node on the path: lock this one
    matched_pages: Int32Array  # the tree's pages in place of the first given ones
    num_owned: int  # given or matched pages that the tree owns now; the rest stays the caller's
    dropped: Int32Array  # pages of shorter partial leaves that this insert made redundant


class Pinned(NamedTuple):
    """The nodes that `pin` locked: the end of the path, and the partial page alone."""

    node: RadixNode
    source: RadixNode | None


class Detached(NamedTuple):
    """What a flush took out of the index, and the pages among it that nobody has locked."""

    num_tokens: int
    pages: Int32Array


class RadixTree:
    """Prefix index over namespaces; see the module for the shape, each method for what it costs."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.num_nodes = 0  # in the index, roots not counted
        self.num_tokens = 0  # in the index
        self.num_evictable_pages = 0
        self.num_protected_pages = 0  # detached but locked ones included
        self.queue = EvictionQueue(policy)
        self._clock = 0
        self.namespaces = Namespaces(page_size)

    # -- reading

    def match(self, tokens: Int32Array, namespace: str = "") -> Match:
        """Longest cached prefix. Pure read; one compare for each run of nodes on the path."""
        space = self.namespaces.find(namespace)
        if space is None:
            return Match(0, NO_PAGES, None, None, 0)
        return longest_match(space.root, tokens)

    # -- locking

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
        self._touch(node, keeps)
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
            self.namespaces.close_if_empty(node.namespace)
            return NO_PAGES
        if node.lock_ref or node.children:
            return NO_PAGES
        if not node.namespace.detached:
            longer = self._made_redundant_by(node)
            if longer is None:
                self.queue.push(node)
                return NO_PAGES
            self._keep(longer, node.keeps)
        dropped = [self._remove(node)]
        while (parent := node.parent) is not None and parent.namespace.detached:
            node = parent
            if node.lock_ref or node.children or node.parent is None:
                break
            dropped.append(self._remove(node))
        return joined(dropped)

    def pin(self, match: Match, namespace: str = "") -> Pinned:
        """Locks what `match` found, at once after it, and not a page more: cuts nodes to that end.

        Counts as one access of the path, and of the partial page.
        """
        node = match.node or self.namespaces.open(namespace).root
        if match.num_node_tokens < node.num_tokens:
            node = self._split(node, match.num_node_tokens)
        self.lock(node)
        self._touch(node)
        node.num_hits += 1
        if match.partial is None:
            return Pinned(node, None)
        source = match.partial.node
        if source.num_tokens > self.page_size:
            source = self._split(source, self.page_size)
        self.lock(source)
        source.last_access = self._clock
        source.num_hits += 1
        return Pinned(node, source)

    # -- writing

    def insert(self, tokens: Int32Array, pages: Int32Array, namespace: str = "") -> Insert:
        """Inserts a whole sequence. Locks nothing; nothing inserted leaves no namespace behind."""
        root = self.namespaces.open(namespace).root
        result = self._insert(root, tokens, pages, held=None)
        self.namespaces.close_if_empty(result.node.namespace)
        return result

    def insert_after(
        self, node: RadixNode, tokens: Int32Array, pages: Int32Array, keeps: Keeps = NO_KEEPS
    ) -> Insert:
        """Inserts what follows a `node` on which the caller holds its one lock.

        `tokens` and `pages` begin at node.end, or at the border before it where node ends in a
        partial page: then node is the caller's own, and grows in place. O(new tokens).
        `keeps`: what the caller's unlock will leave.
        """
        num_tail = node.num_tail_tokens
        if num_tail == 0:
            return self._insert(node, tokens, pages, held=node, keeps=keeps)
        if node.num_tokens > num_tail:
            self._append(node, tokens[num_tail:], pages[1:])
            return Insert(num_tail, node, NO_PAGES, len(pages), NO_PAGES)
        return self._insert_over_partial(node, tokens, pages, keeps)

    def _insert_over_partial(
        self, node: RadixNode, tokens: Int32Array, pages: Int32Array, keeps: Keeps
    ) -> Insert:
        """As `insert_after` for an own leaf of less than a page, which may have siblings.

        Where a sibling holds the tokens already, the leaf stays as it is: it is redundant, and
        goes when its last lock goes.
        """
        parent, num_tail, old_key = node.parent, node.num_tokens, node.key
        assert parent is not None
        key = tokens[: self.page_size].tobytes()
        if len(tokens) >= self.page_size and parent.children.get(key) is not None:
            return self._insert(parent, tokens, pages, held=None, keeps=keeps)
        if parent.children.continuation(key) is not None:
            return Insert(len(tokens), node, NO_PAGES, 1, NO_PAGES)
        parent.children.remove(old_key)
        dropped, kept = self._supersede(parent, key)
        parent.children.add(key, node)
        self._append(node, tokens[num_tail:], pages[1:])
        self._keep(node, kept)
        return Insert(num_tail, node, NO_PAGES, len(pages), dropped)

    def _insert(
        self,
        node: RadixNode,
        tokens: Int32Array,
        pages: Int32Array,
        *,
        held: RadixNode | None,
        keeps: Keeps = NO_KEEPS,
    ) -> Insert:
        """Walks down from the end of `node`, cutting edges where needed, and adds what is new."""
        page, pos = self.page_size, 0
        matched: list[Int32Array] = []
        while len(tokens) - pos >= page:
            child = node.children.get(tokens[pos : pos + page].tobytes())
            if child is None:
                break
            run, first = child.run, child.offset
            common = common_prefix(run.tokens[first : run.num_tokens], tokens[pos:])
            node, num_matched = descend(child, common)
            num_inside = num_matched - num_matched % page
            if num_inside < node.num_tokens:
                node = self._split(node, num_inside)
            stop = node.offset + num_inside
            matched.append(run.pages[first // page : stop // page])
            pos += stop - first
        self._touch(node)
        matched_pages, num_pages = joined(matched), pos // page
        key = tokens[pos : pos + page].tobytes()
        known = node.children.continuation(key) if key else None
        if known is not None:
            self._touch(known, keeps)
        if known is not None or not key:
            return Insert(len(tokens), node, matched_pages, num_pages, NO_PAGES)
        dropped, kept = self._supersede(node, key)
        node = self._add(node, tokens[pos:], pages[num_pages:], held=held, keeps=keeps)
        self._keep(node, kept)
        return Insert(pos, node, matched_pages, len(pages), dropped)

    def _add(
        self,
        node: RadixNode,
        tokens: Int32Array,
        pages: Int32Array,
        *,
        held: RadixNode | None,
        keeps: Keeps,
    ) -> RadixNode:
        """New tokens below a full `node`: into it if it is a leaf that nobody else has locked.

        And that nobody else wants kept: what is new shall not have a rank that it was not given.
        """
        exclusive = node.lock_ref == (1 if node is held else 0)
        if node.keeps:
            exclusive = exclusive and merged(node.keeps, keeps, self.queue.now_s) == keeps
        if node.parent is not None and not node.children and exclusive:
            self._append(node, tokens, pages)
            return node
        if node.parent is not None and node.next is None:
            run, offset = node.run, node.run.num_tokens
            run.append(tokens, pages)
        else:
            run, offset = TokenRun(self.page_size, tokens, pages), 0
        child = RadixNode(node, run, offset, len(tokens), created=self._clock)
        if offset:
            node.next = child
        self.queue.discard(node)
        node.children.add(child.key, child)
        self.num_nodes += 1
        self.num_tokens += len(tokens)
        self.num_evictable_pages += len(pages)
        self.queue.push(child)
        return child

    def _append(self, node: RadixNode, tokens: Int32Array, pages: Int32Array) -> None:
        """Grows a leaf at its end; `pages` are those that the new tokens begin."""
        node.run.append(tokens, pages)
        node.num_tokens += len(tokens)
        self.num_tokens += len(tokens)
        self._touch(node)
        if node.lock_ref:
            self.num_protected_pages += len(pages)
        else:
            self.num_evictable_pages += len(pages)
            self.queue.push(node)

    def _supersede(self, parent: RadixNode, key: bytes) -> tuple[Int32Array, Keeps]:
        """Removes the unlocked partial leaf that `key` is about to make redundant.

        Its pages, and what the new leaf takes over.
        """
        shorter = parent.children.beginning(key)
        if shorter is None or shorter.lock_ref:
            return NO_PAGES, NO_KEEPS
        return self._remove(shorter, keep_parent=True), shorter.keeps

    def _split(self, node: RadixNode, num_tokens: int) -> RadixNode:
        """Cuts at a page border; the new node is the upper part, `node` stays the lower one."""
        parent, key = node.parent, node.key
        assert parent is not None
        upper = RadixNode(parent, node.run, node.offset, num_tokens, created=node.created)
        upper.last_access = node.last_access
        upper.keeps = node.keeps
        upper.lock_ref = 1 if node.lock_ref else 0
        upper.next = node
        upper.children.add(node.key_at(num_tokens), node)
        parent.children.replace(key, upper)
        if parent.next is node:
            parent.next = upper
        node.parent = upper
        node.start += num_tokens
        node.offset += num_tokens
        node.num_tokens -= num_tokens
        self.num_nodes += 1
        return upper

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
            evicted.append(self._trim(node, surplus) if surplus > 0 else self._remove(node))
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

    def _remove(self, node: RadixNode, *, keep_parent: bool = False) -> Int32Array:
        """Takes an unlocked leaf out and gives its pages away. Its parent may become evictable."""
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
                self.namespaces.close_if_empty(parent.namespace)
            else:
                self.queue.push(parent)
        return pages

    def _made_redundant_by(self, node: RadixNode) -> RadixNode | None:
        if node.num_tokens >= self.page_size or node.parent is None:
            return None
        return node.parent.children.longer(node.key)

    def detach(self, namespace: str) -> Detached:
        """Takes a namespace out of the index at once, locked nodes included. O(its nodes)."""
        space = self.namespaces.find(namespace)
        if space is None:
            return Detached(0, NO_PAGES)
        nodes = list(walk(space.root))[1:]
        num_tokens = sum(node.num_tokens for node in nodes)
        self.namespaces.detach(space)
        self.num_nodes -= len(nodes)
        self.num_tokens -= num_tokens
        pages = [self._remove(node) for node in reversed(nodes) if not node.lock_ref]
        self.namespaces.close_if_empty(space)
        return Detached(num_tokens, joined(pages))

    def _touch(self, node: RadixNode, keeps: Keeps = NO_KEEPS) -> None:
        self._clock += 1
        node.last_access = self._clock
        if keeps:
            node.keeps = merged(node.keeps, keeps, self.queue.now_s)
        if node.queued != NOT_QUEUED:
            self.queue.push(node)

    def _keep(self, node: RadixNode, keeps: Keeps) -> None:
        """What a node that is gone leaves to the one that has its tokens too."""
        if keeps:
            node.keeps = merged(node.keeps, keeps, self.queue.now_s)
            if node.queued != NOT_QUEUED:
                self.queue.push(node)


def walk(root: RadixNode) -> Iterator[RadixNode]:
    """All nodes below and including `root`, parents before children."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)
