"""PageAllocator: the free pages."""

from __future__ import annotations

import numpy as np

from radix_mla.cache.token_run import Int32Array
from radix_mla.errors import AuditError, NoSpace


class PageAllocator:
    """A stack of free page ids: O(n) a call, last freed first used, double frees are found."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._rank = np.zeros(num_pages, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def free_pages(self) -> Int32Array:
        """A view of the free pages, for audits."""
        return self._stack[: self._num_free]

    def allocate(self, num_pages: int) -> Int32Array:
        """Takes pages away from the free ones. Raises NoSpace with nothing taken."""
        if num_pages > self._num_free:
            raise NoSpace(num_pages, self._num_free)
        bottom = self._num_free - num_pages
        pages = self._stack[bottom : self._num_free][::-1].copy()
        self._is_free[pages] = False
        self._num_free = bottom
        return pages

    def free(self, pages: Int32Array) -> None:
        """Gives pages back. Raises AuditError with nothing changed if one of them is free."""
        count = len(pages)
        if not count:
            return
        try:
            twice = self._is_free[pages.view(np.uint32)].any() or self._has_duplicates(pages)
        except IndexError:  # negative ones are large as unsigned
            raise AuditError(f"pages outside [0, {self.num_pages}) freed") from None
        if twice:
            raise AuditError(f"double free among {count} pages")
        self._stack[self._num_free : self._num_free + count] = pages[::-1]
        self._is_free[pages] = True
        self._num_free += count

    def _has_duplicates(self, pages: Int32Array) -> bool:
        if (pages[1:] > pages[:-1]).all():
            return False
        order = np.arange(len(pages), dtype=np.int32)
        self._rank[pages] = order
        return not np.array_equal(self._rank[pages], order)

    def audit(self) -> None:
        """Raises AuditError unless stack and marks agree."""
        if int(self._is_free.sum()) != self._num_free or not self._is_free[self.free_pages].all():
            raise AuditError("free stack and free marks differ")
