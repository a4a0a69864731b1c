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
    absorbed_us,
)
from radix_mla.attention.backend import MQAWork
from radix_mla.attention.metadata import cumulative
from radix_mla.attention.shared_prefix import SharedPrefixes, shared_in

HEADS = 16
# groups, members, rows they share, rows of each one's own, sequences of several queries, queries of
# these: microseconds of FlashMLA plain, mixed and shared and of Triton (None: it cannot), measured
# on an H200 by tests/bench/gpu/bench_sharing.py.
MEASURED: dict[tuple[int, int, int, int, int, int], tuple[float | None, ...]] = {
    (1, 8, 131_072, 128, 0, 1): (318.8, 832.9, 100.5, 140.9),
    (1, 8, 32_768, 128, 0, 1): (73.9, 227.3, 61.4, 56.7),
    (1, 2, 131_072, 128, 0, 1): (106.2, 221.3, 104.8, 83.7),
    (1, 32, 131_072, 512, 0, 1): (952.3, 3765.9, 306.3, 464.8),
    (8, 16, 4096, 320, 0, 1): (120.0, None, 80.0, 114.1),
    (1, 64, 4096, 512, 0, 1): (69.0, 251.9, 69.8, 73.1),
    (1, 256, 1024, 320, 0, 1): (94.3, None, 92.2, 117.9),
    (1, 256, 4096, 320, 0, 1): (232.2, None, 128.3, 185.6),
    (1, 256, 256, 1000, 0, 1): (108.1, None, 120.0, 182.4),
    (32, 8, 1024, 512, 0, 1): (110.9, None, 108.3, 144.7),
    (1, 4, 8192, 256, 0, 1): (27.4, 54.3, 46.1, 39.4),
    (1, 8, 4096, 256, 0, 1): (23.9, 57.1, 42.6, 40.4),
    (1, 2, 4096, 64, 0, 1): (22.6, 34.9, 44.4, 36.2),
    (1, 64, 4096, 512, 1, 100): (None, 288.3, None, 124.2),
    (64, 1, 0, 1200, 1, 100): (None, 113.3, None, 79.2),
    (8, 1, 0, 4096, 1, 128): (None, 96.5, None, 95.8),
    (4, 4, 8192, 300, 4, 16): (None, 151.1, None, 96.2),
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


@pytest.mark.parametrize("case", MEASURED)
def test_the_choice_is_near_the_best(case: tuple[int, int, int, int, int, int]) -> None:
    work = work_like(*case)
    estimates = (
        absorbed_us(work, FLASHMLA_PLAIN, HEADS),
        absorbed_us(work, FLASHMLA_MIXED, HEADS, 16),
        absorbed_us(work, FLASHMLA_SHARED, HEADS),
        absorbed_us(work, TRITON_MIXED, HEADS, 4),
    )
    times = MEASURED[case]
    chosen = min((i for i in range(4) if times[i] is not None), key=lambda i: estimates[i])
    best = min(time for time in times if time is not None)
    assert times[chosen] <= 1.1 * best, estimates  # type: ignore[operator]


def test_what_is_shared_is_looked_for_once() -> None:
    work = work_like(1, 8, 4096, 64, 0, 1)
    found = shared_in(work)
    assert [(len(p.members), p.last) for p in found.passes] == [(8, 64)]
    known = replace(work, shared=SharedPrefixes([], [0] * 8))
    assert shared_in(known) is known.shared
    assert absorbed_us(known, TRITON_MIXED, HEADS) > absorbed_us(work, TRITON_MIXED, HEADS)
