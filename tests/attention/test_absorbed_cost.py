"""Which kernel a step's absorbed attention goes to: never one that is much slower than the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from radix_mla.attention.absorbed_cost import (
    FLASHMLA_MIXED,
    FLASHMLA_PLAIN,
    FLASHMLA_SHARED,
    TRITON_MIXED,
    TRITON_PLAIN,
    absorbed_us,
)
from radix_mla.attention.backend import MQAWork
from radix_mla.attention.metadata import cumulative
from radix_mla.attention.shared_prefix import SharedPrefixes, shared_in

HEADS = 16
# groups, members, rows they share, rows of each one's own, sequences of several queries, queries of
# these: microseconds of FlashMLA plain, mixed and shared and of Triton plain and mixed (None: it
# cannot), measured on an H200 by tests/bench/gpu/bench_sharing.py.
MEASURED: dict[tuple[int, int, int, int, int, int], tuple[float | None, ...]] = {
    (1, 1, 0, 1200, 0, 1): (16.9, 24.2, 30.7, 26.2, 34.8),
    (16, 1, 0, 4800, 0, 1): (39.6, 91.3, 51.6, 45.5, 60.5),
    (64, 1, 0, 1200, 0, 1): (40.0, 89.4, 54.6, 46.9, 63.3),
    (256, 1, 0, 1200, 0, 1): (109.9, None, 126.0, 122.1, 165.6),
    (1, 8, 131_072, 128, 0, 1): (316.4, 798.8, 112.1, 330.0, 142.7),
    (1, 8, 32_768, 128, 0, 1): (74.9, 223.4, 61.0, 97.4, 57.0),
    (1, 2, 131_072, 128, 0, 1): (106.6, 219.4, 105.8, 99.1, 83.6),
    (1, 32, 131_072, 512, 0, 1): (951.3, 3724.6, 292.7, 1306.8, 492.4),
    (8, 16, 4096, 320, 0, 1): (123.2, None, 81.7, 189.8, 115.6),
    (1, 64, 4096, 512, 0, 1): (70.3, 252.7, 69.7, 110.1, 72.9),
    (1, 256, 1024, 320, 0, 1): (95.3, None, 91.5, 128.2, 119.1),
    (1, 256, 4096, 320, 0, 1): (235.2, None, 127.7, 358.1, 186.9),
    (1, 256, 256, 1000, 0, 1): (107.6, None, 120.0, 122.9, 183.7),
    (32, 8, 1024, 512, 0, 1): (110.5, None, 109.3, 144.0, 144.3),
    (1, 4, 8192, 256, 0, 1): (26.9, 53.8, 45.8, 29.6, 39.3),
    (1, 8, 4096, 256, 0, 1): (23.7, 56.5, 41.9, 31.0, 40.3),
    (1, 2, 4096, 64, 0, 1): (22.6, 35.1, 45.1, 27.6, 35.8),
    (1, 64, 4096, 512, 1, 100): (None, 284.3, None, 242.9, 124.5),
    (64, 1, 0, 1200, 1, 100): (None, 113.0, None, 84.8, 78.9),
    (8, 1, 0, 4096, 1, 128): (None, 96.8, None, 187.0, 95.7),
    (4, 4, 8192, 300, 4, 16): (None, 148.8, None, 205.5, 96.7),
    (1, 200, 1024, 500, 2, 100): (None, None, None, 209.8, 150.9),
}


def work_like(
    groups: int, members: int, prefix: int, tail: int, extends: int, new: int, size: int = 64
) -> MQAWork:
    num_q = np.ones(groups * members, dtype=np.int64)
    num_q[:extends] = new
    pages, tables = iter(range(1 << 20)), []
    for group in range(groups):
        shared = [next(pages) for _ in range(prefix // size)]
        for member in range(members):
            rows = tail + int(num_q[group * members + member])
            own = [next(pages) for _ in range(-(-rows // size))]
            tables.append(np.array(shared + own, dtype=np.int32))
    return MQAWork(cumulative(num_q), num_q + prefix + tail, tuple(tables), size)


@pytest.mark.parametrize("kernels", [(0, 1, 2, 4), (3, 4)], ids=["FlashMLA and Triton", "Triton"])
@pytest.mark.parametrize("case", MEASURED)
def test_the_choice_is_near_the_best(
    case: tuple[int, int, int, int, int, int], kernels: tuple[int, ...]
) -> None:
    work = work_like(*case)
    estimates = (
        absorbed_us(work, FLASHMLA_PLAIN, HEADS),
        absorbed_us(work, FLASHMLA_MIXED, HEADS, 16),
        absorbed_us(work, FLASHMLA_SHARED, HEADS),
        absorbed_us(work, TRITON_PLAIN, HEADS),
        absorbed_us(work, TRITON_MIXED, HEADS, 4),
    )
    times = {i: us for i, us in enumerate(MEASURED[case]) if us is not None and i in kernels}
    chosen = min(times, key=lambda i: estimates[i])
    assert times[chosen] <= 1.1 * min(times.values()), estimates


def test_what_is_shared_is_looked_for_once() -> None:
    work = work_like(1, 8, 4096, 64, 0, 1)
    found = shared_in(work)
    assert [(len(p.members), p.last) for p in found.passes] == [(8, 64)]
    known = replace(work, shared=SharedPrefixes([], [0] * 8))
    assert shared_in(known) is known.shared
    assert absorbed_us(known, TRITON_MIXED, HEADS) > absorbed_us(work, TRITON_MIXED, HEADS)
