from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from radix_mla.attention.metadata import RaggedBatch
from radix_mla.engine.step import Chunk


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=6),
    st.sampled_from([1, 3, 16]),
)
def test_positions_and_slots(sequences: list[tuple[int, int]], page_size: int) -> None:
    rng = np.random.default_rng(0)
    chunks, positions, slots = [], [], []
    for new, start in sequences:
        pages = rng.integers(0, 1 << 30, -(-(start + new) // page_size)).astype(np.int32)
        chunks.append(Chunk(np.zeros(new, dtype=np.int32), start, pages, 0, is_decode=new == 1))
        for position in range(start, start + new):
            positions.append(position)
            slots.append(int(pages[position // page_size]) * page_size + position % page_size)
    batch = RaggedBatch.of(chunks, page_size)
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.slots.dtype == np.int64, "2^30 pages of 16 overflow int32"
    assert np.diff(batch.cu_q).tolist() == [new for new, _ in sequences]
    assert batch.is_decode.tolist() == [new == 1 for new, _ in sequences]
