from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.assert_close import assert_within_plain
from support.mla_case import ODD, MLACase, make_case

from radix_mla.attention import shared_prefix
from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.metadata import RaggedBatch, cumulative
from radix_mla.attention.shared_prefix import find_shared
from radix_mla.cache.kv_pool import slots_of
from radix_mla.engine.step import Chunk


@pytest.fixture(autouse=True)
def _share_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_MIN_SAVED_ROWS", 8)


def tables(*pages: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array(p, dtype=np.int32) for p in pages)


def test_nested_prefixes() -> None:
    found = find_shared(
        tables([1, 2, 3, 4, 5, 90], [1, 2, 3, 4, 5, 91], [1, 2, 7, 8], [6, 5]),
        np.array([21, 22, 15, 6]),
        4,
    )
    assert found.passes == [((0, 1, 2), 0, 2), ((0, 1), 2, 5)]
    assert found.tails == [5, 5, 2, 0]


def test_a_page_that_is_not_full_is_not_shared() -> None:
    """Its later rows belong to one sequence, or are the step's own new row."""
    found = find_shared(tables([1, 2, 3], [1, 2, 3]), np.array([11, 12]), 4)
    assert found.passes == [((0, 1), 0, 2)]
    assert found.tails == [2, 2]


def test_short_prefixes_are_not_worth_a_pass() -> None:
    found = find_shared(tables([1, 2], [1, 3]), np.array([7, 7]), 4)
    assert found.passes == []
    assert found.tails == [0, 0]


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=6),
    st.integers(0, 3),
)
def test_passes_and_tails_cover_each_sequence_once(paths: list[list[int]], short: int) -> None:
    """Page ids spell the path, so equal pages mean equal prefixes, as in the tree."""
    ids: dict[tuple[int, ...], int] = {}
    pages = [[ids.setdefault(tuple(p[: i + 1]), len(ids)) for i in range(len(p))] for p in paths]
    page_tables = tables(*pages)
    context = np.array([len(p) * 8 - min(short, 7) for p in paths])
    found = find_shared(page_tables, context, 8)
    for i, table in enumerate(page_tables):
        own = sorted((s.first, s.last) for s in found.passes if i in s.members)
        covered = [page for first, last in own for page in range(first, last)]
        assert covered == list(range(found.tails[i]))
        assert found.tails[i] * 8 <= context[i]
        for members, first, last in found.passes:
            if i in members:
                assert (table[first:last] == page_tables[members[0]][first:last]).all()


def shared_case(page_size: int) -> MLACase:
    """Decodes and an extend on two nested prefixes, and a stranger; new rows in own pages."""
    base = make_case([(6, 600)], page_size=page_size)
    table = base.batch.page_tables[0]
    free = iter(range(len(table), 4 * len(table)))
    chunks = []
    for new, context, common in [
        (1, 200, 192),
        (1, 100, 96),
        (3, 230, 192),
        (1, 50, 0),
        (2, 96, 96),
    ]:
        total = -(-(new + context) // page_size)
        own = [next(free) for _ in range(total - common // page_size)]
        pages = np.array([*range(common // page_size), *own], dtype=np.int32)
        chunks.append(Chunk(np.zeros(new, dtype=np.int32), context, pages, 0, is_decode=new == 1))
    batch = RaggedBatch.of(chunks, page_size)
    tokens = int(batch.cu_q[-1])
    pool = type(base.pool)(base.pool.layout, 1, 4 * len(table), page_size)
    pool.layer(0).fill_(float("nan"))
    for chunk in chunks:
        slots = torch.from_numpy(slots_of(chunk.page_table, 0, chunk.start, page_size))
        unwritten = slots[pool.layer(0)[slots, 0].isnan()]
        pool.write(0, unwritten, torch.randn(len(unwritten), ODD.row))
    return MLACase(
        dims=ODD,
        batch=batch,
        pool=pool,
        weights=base.weights,
        q=torch.randn(tokens, ODD.num_heads, ODD.qk),
        rows=torch.randn(tokens, ODD.row),
        scale=base.scale,
    )


@pytest.mark.parametrize("page_size", [1, 16, 32])
@pytest.mark.parametrize("workspace_rows", [40, 4096])
def test_shared_passes_change_nothing(page_size: int, workspace_rows: int) -> None:
    case = shared_case(page_size)
    backend = TorchBackend("cpu")
    out, plan = case.run("absorbed", workspace_rows=workspace_rows, backend=backend)
    assert len(backend._shared) == 2
    assert plan.absorbed is not None
    assert plan.absorbed.work.cu_q.tolist() == cumulative(case.batch.num_new).tolist()
    assert_within_plain(out, case.answer(torch.float32), case.answer(), atol=5e-6)
