from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_mla.attention.chunk_plan import ContextChunk, pack_whole, plan_chunks


def check(lengths: list[int], max_rows: int) -> list[ContextChunk]:
    """Every row once and in order, chunks full but the last, offsets without gaps."""
    chunks = plan_chunks(lengths, max_rows)
    covered = [0] * len(lengths)
    for chunk in chunks:
        offset = 0
        for segment in chunk.segments:
            assert segment.start == covered[segment.request]
            assert segment.offset == offset
            assert segment.length > 0
            covered[segment.request] += segment.length
            offset += segment.length
        assert chunk.num_rows == offset <= max_rows
    assert covered == lengths
    assert len(chunks) == -(-sum(lengths) // max_rows)
    assert all(chunk.num_rows == max_rows for chunk in chunks[:-1])
    return chunks


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_any_lengths(lengths: list[int], max_rows: int) -> None:
    check(lengths, max_rows)


def test_long_context_beside_short_ones_takes_one_chunk() -> None:
    """M04: an even split over the batch needs 30."""
    assert len(check([60_000] + 31 * [16], 65_536)) == 1


def test_zero_lengths_take_no_segment() -> None:
    chunks = check([0, 0, 5], 4)
    assert [s.request for chunk in chunks for s in chunk.segments] == [2, 2]
    assert check([0, 0], 4) == []
    assert check([], 4) == []


def test_many_single_rows() -> None:
    assert len(check([1] * 200, 64)) == 4


def test_lengths_above_and_equal_to_the_workspace() -> None:
    assert [c.num_rows for c in check([100], 32)] == [32, 32, 32, 4]
    assert [c.num_rows for c in check([32, 64], 32)] == [32, 32, 32]


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(9, 30))
def test_whole_requests_are_packed_in_order(lengths: list[int], max_rows: int) -> None:
    groups = pack_whole(lengths, max_rows)
    assert [i for group in groups for i in group] == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in group) for group in groups]
    assert all(0 < size <= max_rows for size in sizes)
    for size, group in zip(sizes[:-1], groups[1:], strict=True):
        assert size + lengths[group[0]] > max_rows, "a group was closed too early"


def test_a_request_that_does_not_fit_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="do not fit"):
        pack_whole([3, 40], 32)
