"""Device page tables: what is sent, and that rows hold what was asked for, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_mla.attention.page_tables import DevicePageTables


def table(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def held(tables: DevicePageTables, row: int, num_pages: int) -> list[int]:
    pages: list[int] = tables.tensor[row, :num_pages].tolist()
    return pages


def update(tables: DevicePageTables, *wanted: np.ndarray) -> tuple[list[int], int]:
    """(rows, entries sent); checks what the rows hold."""
    before = tables.num_sent
    rows = tables.update(wanted).tolist()
    assert len(set(rows)) == len(rows)
    for row, pages in zip(rows, wanted, strict=True):
        assert held(tables, row, len(pages)) == pages.tolist()
    return rows, tables.num_sent - before


def test_a_table_that_grew_sends_its_tail() -> None:
    tables = DevicePageTables(4, 8, "cpu")
    rows, sent = update(tables, table(7, 8, 40), table(7, 8, 41, 42))
    assert sent == 7
    assert update(tables, table(7, 8, 40), table(7, 8, 41, 42)) == (rows, 0)
    assert update(tables, table(7, 8, 40, 50), table(7, 8, 41, 42)) == (rows, 1)
    assert update(tables, table(7, 8, 40, 50, 51, 52), table(7, 8, 41, 42)) == (rows, 2)


def test_sequences_keep_their_rows_in_any_order() -> None:
    tables = DevicePageTables(4, 8, "cpu")
    (a, b, c), _ = update(tables, table(1, 2), table(1, 3), table(1, 4))
    assert update(tables, table(1, 4), table(1, 3, 9)) == ([c, b], 1)
    assert update(tables, table(1, 3, 9), table(1, 2, 5), table(1, 4)) == ([b, a, c], 1)


def test_dedupe_rewrites_from_the_first_page_that_changed() -> None:
    tables = DevicePageTables(2, 8, "cpu")
    rows, _ = update(tables, table(1, 2, 3, 4, 5))
    assert update(tables, table(1, 2, 30, 40, 5)) == (rows, 3)
    assert update(tables, table(1, 2, 30, 41, 5, 6)) == (rows, 3)


def test_the_row_unused_longest_is_taken() -> None:
    tables = DevicePageTables(3, 4, "cpu")
    (a,), _ = update(tables, table(1))
    (b,), _ = update(tables, table(2))
    (c,), _ = update(tables, table(3))
    assert len({a, b, c}) == 3
    assert update(tables, table(2), table(9)) == ([b, a], 1)


def test_a_page_that_changed_hands_does_not_confuse_rows() -> None:
    """The last page of a sequence that ended is now in the middle, or at the end, of another."""
    tables = DevicePageTables(2, 8, "cpu")
    update(tables, table(1, 2, 3))
    update(tables, table(8, 3), table(9))
    update(tables, table(9, 3), table(8, 3, 4))


def test_a_table_that_shrank() -> None:
    tables = DevicePageTables(2, 8, "cpu")
    rows, _ = update(tables, table(1, 2, 3))
    assert update(tables, table(1, 2))[1] <= 2
    update(tables, table(1, 2, 9))
    assert rows


def test_the_padding_row_stays() -> None:
    tables = DevicePageTables(2, 4, "cpu")
    tables.set_padding(77)
    update(tables, table(1, 2), table(3))
    assert held(tables, tables.padding_row, 4) == [77] * 4


def test_limits_are_ours_to_keep() -> None:
    tables = DevicePageTables(1, 2, "cpu")
    with pytest.raises(AssertionError, match="2 of 1 sequences"):
        tables.update([table(1), table(2)])
    with pytest.raises(AssertionError, match="3 of 2 pages"):
        tables.update([table(1, 2, 3)])


@given(
    st.lists(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=4), max_size=12)
)
def test_rows_always_hold_what_was_asked_for(steps: list[list[list[int]]]) -> None:
    """Also for tables that no scheduler would make."""
    tables = DevicePageTables(4, 6, "cpu")
    for step in steps:
        update(tables, *(table(*pages) for pages in step))
