"""Packing of context rows into chunks that fit a workspace.

    requests   |---- A: 9 rows ----|- B: 3 -|-- C: 5 --|        W = 7
    chunks     |   A 0..7  |  A 7..9, B 0..3, C 0..2  |C 2..5|  3 = ceil(17 / 7)

Greedy and in order: rows of different requests share a chunk and a request may be cut over chunks,
so the number of chunks is ceil(sum / W) whatever the lengths are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """Rows [start, start + length) of a request, at workspace rows [offset, offset + length)."""

    request: int
    start: int
    length: int
    offset: int


class ContextChunk(NamedTuple):
    """One filling of the workspace; its requests are consecutive ones that have rows."""

    segments: tuple[Segment, ...]
    num_rows: int


def plan_chunks(lengths: Sequence[int], max_rows: int) -> list[ContextChunk]:
    """Covers every row of every request once, in order; `lengths` [B], zeros allowed."""
    assert max_rows > 0, f"a workspace of {max_rows} rows"
    chunks: list[ContextChunk] = []
    segments: list[Segment] = []
    used = 0
    for request, length in enumerate(lengths):
        start = 0
        while start < length:
            take = min(length - start, max_rows - used)
            segments.append(Segment(request, start, take, used))
            start += take
            used += take
            if used == max_rows:
                chunks.append(ContextChunk(tuple(segments), used))
                segments, used = [], 0
    if segments:
        chunks.append(ContextChunk(tuple(segments), used))
    return chunks


def pack_whole(lengths: Sequence[int], max_rows: int) -> list[list[int]]:
    """Groups consecutive requests whose rows fit the workspace together; none is cut.

    Every length must be in [1, max_rows].
    """
    groups: list[list[int]] = []
    used = max_rows
    for request, length in enumerate(lengths):
        assert 0 < length <= max_rows, f"{length} rows do not fit a workspace of {max_rows}"
        if used + length > max_rows:
            groups.append([])
            used = 0
        groups[-1].append(request)
        used += length
    return groups
