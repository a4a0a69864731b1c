"""RadixNode: one edge of the tree, a slice of a TokenRun, with its place and its statistics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from radix_mla.cache.child_index import ChildIndex
from radix_mla.cache.retention import NO_KEEPS, Keeps, merged
from radix_mla.cache.token_run import NO_PAGES, Int32Array, TokenRun

if TYPE_CHECKING:
    from radix_mla.cache.namespace import Namespace

NOT_QUEUED = -1


class RadixNode:
    """Tokens [start, end) of every sequence that runs through it; `start` is a page border.

    `lock_ref` is the number of locks on this node itself plus the number of its locked children, so
    a path is locked by one count a node and a lock stops at the first ancestor that has one.
    `next` is the child that continues this node in the same run. `last_access`, `num_hits` and
    `keeps` cover accesses that ended here and those of children that are gone: exact once the node
    is a leaf.
    """

    __slots__ = (
        "children",
        "created",
        "keeps",
        "last_access",
        "lock_ref",
        "namespace",
        "next",
        "num_hits",
        "num_tokens",
        "offset",
        "parent",
        "queued",
        "run",
        "start",
    )

    def __init__(
        self, parent: RadixNode | None, run: TokenRun, offset: int, num_tokens: int, *, created: int
    ) -> None:
        self.parent = parent
        self.run = run
        self.offset = offset
        self.num_tokens = num_tokens
        self.start = parent.end if parent is not None else 0
        self.children = ChildIndex()
        self.next: RadixNode | None = None
        self.lock_ref = 0
        self.created = created
        self.last_access = created
        self.num_hits = 0
        self.keeps: Keeps = NO_KEEPS
        self.queued = NOT_QUEUED
        if parent is not None:
            self.namespace: Namespace = parent.namespace

    @classmethod
    def root_of(cls, namespace: Namespace, page_size: int) -> RadixNode:
        """The empty node above all first tokens of a namespace."""
        root = cls(None, TokenRun(page_size, NO_PAGES, NO_PAGES), 0, 0, created=0)
        root.namespace = namespace
        return root

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.run.page_size)

    @property
    def num_tail_tokens(self) -> int:
        """Tokens in a partial last page; more than 0 only in a leaf."""
        return self.num_tokens % self.run.page_size

    @property
    def pages(self) -> Int32Array:
        """A view, good until the run changes."""
        first = self.offset // self.run.page_size
        return self.run.pages[first : first + self.num_pages]

    @property
    def key(self) -> bytes:
        """What its parent's index knows it by."""
        return self.key_at(0)

    def key_at(self, offset: int) -> bytes:
        """The key that a node beginning `offset` tokens into this one has."""
        stop = min(offset + self.run.page_size, self.num_tokens)
        return self.run.tokens[self.offset + offset : self.offset + stop].tobytes()

    def cut(self, num_tokens: int) -> RadixNode:
        """Cuts at a page border: returns a new node for the upper part, stays the lower one."""
        parent, key = self.parent, self.key
        assert parent is not None
        upper = RadixNode(parent, self.run, self.offset, num_tokens, created=self.created)
        upper.last_access = self.last_access
        upper.keeps = self.keeps
        upper.lock_ref = 1 if self.lock_ref else 0
        upper.next = self
        upper.children.add(self.key_at(num_tokens), self)
        parent.children.replace(key, upper)
        if parent.next is self:
            parent.next = upper
        self.parent = upper
        self.start += num_tokens
        self.offset += num_tokens
        self.num_tokens -= num_tokens
        return upper

    def inherit(self, child: RadixNode, now_s: float) -> None:
        """Takes over the accesses of a child that is being removed."""
        self.last_access = max(self.last_access, child.last_access)
        self.num_hits += child.num_hits
        if child.keeps:
            self.keeps = merged(self.keeps, child.keeps, now_s)


def walk(root: RadixNode) -> Iterator[RadixNode]:
    """All nodes below and including `root`, parents before children."""
    pending = [root]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)
