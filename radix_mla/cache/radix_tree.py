"""RadixTree: which pages hold the rows of which token prefixes.

Edges hold runs of tokens and their pages. Nodes are cut at page borders only, so siblings may share
up to page - 1 first tokens, and only a leaf's last page may be partial:

    page 4          root
                     |  0 1 2 3 | 4 5 6 7          two full pages, shared by both below
               +-----+-----+
        8 9 10 11 | 12     8 9 99                  one first token shared; two partial last pages

A partial last page may be in the writing: the one path lock on such a leaf belongs to the request
that appends to the page. Everybody else locks it as the source of a copy at most, and inserts its
own page beside it. Locks, accesses and removal are the `NodeStore`'s. Pure: numpy only, logical
clock, no knowledge of free pages.
"""

from __future__ import annotations

from typing import NamedTuple

from radix_mla.cache.eviction import EvictionPolicy
from radix_mla.cache.match import Match, descend, longest_match
from radix_mla.cache.namespace import Namespaces
from radix_mla.cache.node_store import NodeStore
from radix_mla.cache.radix_node import RadixNode
from radix_mla.cache.retention import NO_KEEPS, Keeps, merged
from radix_mla.cache.token_run import NO_PAGES, Int32Array, TokenRun, common_prefix, joined


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


class RadixTree:
    """Prefix index over namespaces; see the module for the shape, each method for what it costs."""

    def __init__(self, page_size: int, policy: EvictionPolicy) -> None:
        self.page_size = page_size
        self.namespaces = Namespaces(page_size)
        self.nodes = NodeStore(page_size, policy, self.namespaces)

    # -- finding

    def match(self, tokens: Int32Array, namespace: str = "") -> Match:
        """Longest cached prefix. Pure read; one compare for each run of nodes on the path."""
        space = self.namespaces.find(namespace)
        if space is None:
            return Match(0, NO_PAGES, None, None, 0)
        return longest_match(space.root, tokens)

    def pin(self, match: Match, namespace: str = "") -> Pinned:
        """Locks what `match` found, at once after it, and not a page more: cuts nodes to that end.

        Counts as one access of the path, and of the partial page.
        """
        node = match.node or self.namespaces.open(namespace).root
        if match.num_node_tokens < node.num_tokens:
            node = self.nodes.split(node, match.num_node_tokens)
        self.nodes.lock(node)
        self.nodes.touch(node)
        node.num_hits += 1
        if match.partial is None:
            return Pinned(node, None)
        source = match.partial.node
        if source.num_tokens > self.page_size:
            source = self.nodes.split(source, self.page_size)
        self.nodes.lock(source)
        source.last_access = self.nodes.clock
        source.num_hits += 1
        return Pinned(node, source)

    # -- inserting

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
            self.nodes.extend(node, tokens[num_tail:], pages[1:])
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
        self.nodes.extend(node, tokens[num_tail:], pages[1:])
        self.nodes.keep(node, kept)
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
                node = self.nodes.split(node, num_inside)
            stop = node.offset + num_inside
            matched.append(run.pages[first // page : stop // page])
            pos += stop - first
        self.nodes.touch(node)
        matched_pages, num_pages = joined(matched), pos // page
        key = tokens[pos : pos + page].tobytes()
        known = node.children.continuation(key) if key else None
        if known is not None:
            self.nodes.touch(known, keeps)
        if known is not None or not key:
            return Insert(len(tokens), node, matched_pages, num_pages, NO_PAGES)
        dropped, kept = self._supersede(node, key)
        node = self._add(node, tokens[pos:], pages[num_pages:], held=held, keeps=keeps)
        self.nodes.keep(node, kept)
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
            exclusive = exclusive and merged(node.keeps, keeps, self.nodes.queue.now_s) == keeps
        if node.parent is not None and not node.children and exclusive:
            self.nodes.extend(node, tokens, pages)
            return node
        if node.parent is not None and node.next is None:
            run, offset = node.run, node.run.num_tokens
            run.append(tokens, pages)
        else:
            run, offset = TokenRun(self.page_size, tokens, pages), 0
        child = RadixNode(node, run, offset, len(tokens), created=self.nodes.clock)
        if offset:
            node.next = child
        self.nodes.add(child)
        return child

    def _supersede(self, parent: RadixNode, key: bytes) -> tuple[Int32Array, Keeps]:
        """Removes the unlocked partial leaf that `key` is about to make redundant.

        Its pages, and what the new leaf takes over.
        """
        shorter = parent.children.beginning(key)
        if shorter is None or shorter.lock_ref:
            return NO_PAGES, NO_KEEPS
        return self.nodes.remove(shorter, keep_parent=True), shorter.keeps
