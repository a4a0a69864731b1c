"""TokenRun: the contiguous tokens and pages of one chain of tree nodes.

A run is filled at its end only and holds exactly one chain of parent and child, so a match compares
a whole chain in one call and a removed leaf always shortens the run from its end:

    tokens:  |-- node A --|---- node B (child of A) ----|-- node C --|  spare  |
    pages:   |    |    |  |    |    |    |    |    |    |    |    |  |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array: TypeAlias = NDArray[np.int32]
TokensLike: TypeAlias = Sequence[int] | NDArray[np.integer]

NO_PAGES: Int32Array = np.empty(0, dtype=np.int32)
NO_PAGES.flags.writeable = False

_FIRST_CHUNK = 4096
_CHUNK_GROWTH = 4


def as_tokens(tokens: TokensLike) -> Int32Array:
    """`tokens` as a contiguous int32 array; no copy where it is one already."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def common_prefix(left: Int32Array, right: Int32Array) -> int:
    """Length of the common prefix; a mismatch near the start is found without a full compare."""
    end = min(len(left), len(right))
    start, size = 0, _FIRST_CHUNK
    while start < end:
        stop = min(end, start + size)
        differs = left[start:stop] != right[start:stop]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = stop, size * _CHUNK_GROWTH
    return end


def joined(parts: list[Int32Array]) -> Int32Array:
    """The parts as one array; a single part is not copied."""
    if not parts:
        return NO_PAGES
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class TokenRun:
    """Growable arrays of tokens and of the pages that hold their rows.

    Nodes address it by offset, so it may reallocate: by half when it must grow, and to size when
    less than half of it is live.
    """

    __slots__ = ("num_tokens", "page_size", "pages", "tokens")

    def __init__(self, page_size: int, tokens: Int32Array, pages: Int32Array) -> None:
        self.page_size = page_size
        self.tokens = tokens.copy()
        self.pages = pages.copy()
        self.num_tokens = len(tokens)

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // self.page_size)

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.pages.nbytes

    def append(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Adds tokens behind the last one and the pages that they begin. Amortised O(new)."""
        first_token, first_page = self.num_tokens, self.num_pages
        self.num_tokens += len(tokens)
        if self.num_tokens > len(self.tokens):
            self._resize(self.num_tokens + self.num_tokens // 2)
        self.tokens[first_token : self.num_tokens] = tokens
        self.pages[first_page : first_page + len(pages)] = pages

    def truncate(self, num_tokens: int) -> None:
        """Drops everything behind `num_tokens`."""
        self.num_tokens = num_tokens
        if 2 * num_tokens < len(self.tokens):
            self._resize(num_tokens)

    def _resize(self, capacity: int) -> None:
        live = min(self.num_tokens, len(self.tokens))
        tokens = np.empty(capacity, dtype=np.int32)
        tokens[:live] = self.tokens[:live]
        pages = np.empty(-(-capacity // self.page_size), dtype=np.int32)
        live = min(self.num_pages, len(self.pages), len(pages))
        pages[:live] = self.pages[:live]
        self.tokens, self.pages = tokens, pages
