"""Lease: what one request holds of the prefix cache."""

from __future__ import annotations

import numpy as np

from radix_mla.cache.ghost import Trace
from radix_mla.cache.radix_node import RadixNode
from radix_mla.cache.retention import NO_RETENTION, Retention
from radix_mla.cache.token_run import Int32Array


class Lease:
    """A locked path, the pages behind it, and how far the request's rows are in the tree.

    Only PrefixCache changes one; it is spent by one release.

        tokens:  |-------- num_committed --------|-- computed or to come --|
        pages:   |  num_tree_pages: the tree's   |  private to this lease  |

    The last page before num_committed may be private: its tokens are in the tree in another
    request's page while this one goes on writing its own.
    """

    __slots__ = (
        "copy_pending",
        "namespace",
        "node",
        "num_cached",
        "num_committed",
        "num_pages",
        "num_partial",
        "released",
        "retention",
        "source",
        "source_page",
        "table",
        "trace",
    )

    def __init__(
        self,
        namespace: str,
        node: RadixNode,
        *,
        table: Int32Array,
        num_pages: int,
        num_cached: int,
        retention: Retention = NO_RETENTION,
    ) -> None:
        self.namespace = namespace
        self.node = node
        self.table = table
        self.num_pages = num_pages
        self.num_cached = num_cached
        self.num_committed = num_cached
        self.num_partial = 0
        self.retention = retention
        self.source: RadixNode | None = None
        self.source_page = -1
        self.copy_pending = False
        self.trace = Trace()
        self.released = False

    @property
    def page_table(self) -> Int32Array:
        """[num_pages] view; ask again after each call that takes the lease."""
        return self.table[: self.num_pages]

    @property
    def num_tree_pages(self) -> int:
        """Leading pages that the tree owns."""
        return -(-self.node.end // self.node.run.page_size)

    def append_pages(self, pages: Int32Array) -> None:
        """Adds private pages at the end. Amortised O(new)."""
        first, self.num_pages = self.num_pages, self.num_pages + len(pages)
        if self.num_pages > len(self.table):
            table = np.empty(self.num_pages + self.num_pages // 2, dtype=np.int32)
            table[:first] = self.table[:first]
            self.table = table
        self.table[first : self.num_pages] = pages
