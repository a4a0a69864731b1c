from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radix_mla.attention.backends.row_pieces import Piece, row_pieces
from radix_mla.cache.kv_pool import slots_of


def slots_in(pieces: list[Piece]) -> list[int]:
    slots: list[int] = []
    for piece in pieces:
        own = range(piece.first, piece.first + piece.num_rows)
        slots += own if piece.slots is None else piece.slots.tolist()
        assert piece.slots is None or len(piece.slots) == piece.num_rows > 0
    return slots


@given(
    runs=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 12)), min_size=1, max_size=90),
    page_size=st.sampled_from([1, 16, 64]),
    short=st.integers(0, 63),
)
def test_pieces_are_the_sequence_in_order(
    runs: list[tuple[int, int]], page_size: int, short: int
) -> None:
    pages = np.concatenate([np.arange(first, first + n) for first, n in runs]).astype(np.int32)
    num_rows = len(pages) * page_size - short % page_size
    pieces = row_pieces(pages, num_rows, page_size, "cpu")
    assert slots_in(pieces) == slots_of(pages, 0, num_rows, page_size).tolist()


def test_one_run_is_read_in_place() -> None:
    pages = np.arange(7, 40, dtype=np.int32)
    assert row_pieces(pages, 500, 16, "cpu") == [Piece(500, 112, None)]


def test_long_runs_are_read_in_place_and_the_rest_gathered() -> None:
    pages = np.array([*range(10, 20), 3, 50, *range(30, 40)], dtype=np.int32)
    kinds = [(p.num_rows, p.slots is None) for p in row_pieces(pages, 340, 16, "cpu")]
    assert kinds == [(160, True), (32, False), (148, True)]


def test_many_runs_are_gathered_at_once() -> None:
    pages = np.arange(0, 400, 2, dtype=np.int32)
    assert [p.num_rows for p in row_pieces(pages, 12_800, 64, "cpu")] == [12_800]


def test_page_table_longer_than_the_sequence() -> None:
    pages = np.array([4, 5, 90, 91], dtype=np.int32)
    assert row_pieces(pages, 32, 16, "cpu") == [Piece(32, 64, None)]
