"""The work list itself: every (token, key) pair once, even stretches, sizes within the capacity."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.triton.mqa_plan import ITEM, MQACapacity, MQAPlan, SharedPass, plan_mqa


def capacity_of(heads: int = 16, *, shared: int = 0, programs: int = 7) -> MQACapacity:
    return MQACapacity(heads, 64, 16, programs, 40, 12, shared)


def pairs_of(plan: MQAPlan, capacity: MQACapacity) -> np.ndarray:
    """How often each (token, table row's key) is attended to: [max_tokens, keys]; and checks that
    each answer is written once, by one piece or as a unit of all its parts."""
    at, buffer = capacity.at, plan.buffer
    items = buffer[at.items :][: plan.num_pieces * ITEM].reshape(-1, ITEM)
    cuts = buffer[at.cuts : at.cuts + capacity.num_cuts + 1]
    assert cuts[0] == 0
    assert cuts[-1] == plan.num_pieces
    assert (np.diff(cuts) >= 0).all()
    seen = np.zeros((capacity.max_tokens, 4096), dtype=np.int64)
    written = np.zeros(capacity.max_tokens, dtype=np.int64)
    part_of: dict[int, int] = {}
    for token_at, num, _, begin, end, limit, step, part in items.tolist():
        assert 1 <= num <= capacity.tile_tokens
        for j in range(num):
            token = int(buffer[at.tokens + token_at + j])
            seen[token, begin : max(begin, min(end, limit + j * step))] += 1
            if part < 0:
                written[token] += 1
            else:
                assert part + j not in part_of
                part_of[part + j] = token
    first = buffer[at.unit_parts :]
    for unit in range(plan.num_units):
        token = int(buffer[at.units + unit])
        parts = buffer[at.parts + first[unit] : at.parts + first[unit + 1]].tolist()
        assert len(parts) > 1 or parts
        assert all(part_of.pop(part) == token for part in parts)
        written[token] += 1
    assert not part_of, "parts that nobody combines"
    assert (written <= 1).all()
    seen[:, -1] = written
    return seen


def expected(cu_q: np.ndarray, kv_lens: np.ndarray, max_tokens: int) -> np.ndarray:
    want = np.zeros((max_tokens, 4096), dtype=np.int64)
    for i, length in enumerate(kv_lens.tolist()):
        num_q = int(cu_q[i + 1] - cu_q[i])
        for j in range(num_q):
            want[cu_q[i] + j, : max(0, length - num_q + j + 1)] = 1
            want[cu_q[i] + j, -1] = 1
    return want


CASES = {
    "decode": ([1] * 5, [3, 500, 17, 1, 64]),
    "one long": ([1], [4000]),
    "ragged": ([1, 7, 1, 13], [900, 7, 2, 333]),
    "padding": ([1, 0, 3, 0], [40, 0, 3, 0]),
    "no keys": ([2, 1, 4], [0, 30, 2]),
    "nothing": ([0, 0], [0, 5]),
}


@pytest.mark.parametrize("heads", [8, 16, 20, 64, 128])
@pytest.mark.parametrize("case", CASES)
def test_every_pair_once(case: str, heads: int) -> None:
    num_q, kv_lens = (np.array(x) for x in CASES[case])
    cu_q = np.concatenate(([0], np.cumsum(num_q)))
    capacity = capacity_of(heads)
    plan = plan_mqa(capacity, cu_q, kv_lens)
    want = expected(cu_q, kv_lens, capacity.max_tokens)
    assert np.array_equal(pairs_of(plan, capacity), want)


NESTED = [SharedPass((0, 1, 2, 4), 0, 512), SharedPass((1, 4), 512, 800)]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("shared", "num_passes"), [(100, 2), (16, 1), (9, 0), (0, 0)], ids=["all", "one", "few", "none"]
)
def test_shared_passes(shared: int, num_passes: int, heads: int) -> None:
    num_q, kv_lens = np.array([1, 5, 1, 1, 1]), np.array([600, 1000, 513, 700, 801])
    cu_q = np.concatenate(([0], np.cumsum(num_q)))
    capacity = capacity_of(heads, shared=shared)
    plan = plan_mqa(capacity, cu_q, kv_lens, NESTED)
    assert np.array_equal(pairs_of(plan, capacity), expected(cu_q, kv_lens, capacity.max_tokens))
    items = plan.buffer[capacity.at.items :][: plan.num_pieces * ITEM].reshape(-1, ITEM)
    rows = items[:, 4] - items[:, 3]
    reads_of_pass = [rows[(items[:, 6] == 0) & (items[:, 5] == end)].sum() for end in (512, 800)]
    tiles = [-(-8 // capacity.tile_tokens), -(-6 // capacity.tile_tokens)]
    assert reads_of_pass[:num_passes] == [512 * tiles[0], 288 * tiles[1]][:num_passes]
    assert not any(reads_of_pass[num_passes:])


def test_random_batches_fit_their_capacity() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        capacity = capacity_of(int(rng.choice([4, 16, 24, 128])), programs=int(rng.integers(1, 30)))
        num_q = rng.integers(0, 4, size=rng.integers(1, 13))
        kv_lens = num_q + rng.integers(0, 3000, size=len(num_q)) * rng.integers(0, 2)
        cu_q = np.concatenate(([0], np.cumsum(num_q)))
        plan = plan_mqa(capacity, cu_q, kv_lens)
        want = expected(cu_q, kv_lens, capacity.max_tokens)
        assert np.array_equal(pairs_of(plan, capacity), want)


def test_stretches_are_even() -> None:
    capacity = MQACapacity(16, 64, 64, 132, 256, 256)
    for kv_lens in ([8192] * 32, [131072], [100] * 200 + [60000], list(range(1, 256 * 40, 40))):
        cu_q = np.arange(len(kv_lens) + 1)
        plan = plan_mqa(capacity, cu_q, np.array(kv_lens))
        items = plan.buffer[capacity.at.items :][: plan.num_pieces * ITEM].reshape(-1, ITEM)
        blocks = -(-(items[:, 4] - items[:, 3]) // 64) + 2
        load = np.add.reduceat(
            np.append(blocks, 0),
            plan.buffer[capacity.at.cuts :][: capacity.num_cuts].clip(max=plan.num_pieces),
        )
        assert load.max() <= blocks.sum() / capacity.num_cuts * 1.1 + 4


def test_a_buffer_is_used_again() -> None:
    capacity = capacity_of()
    buffer = np.full(capacity.at.end, 77, dtype=np.int32)
    for num_q, kv_lens in CASES.values():
        cu_q = np.concatenate(([0], np.cumsum(num_q)))
        plan = plan_mqa(capacity, cu_q, np.array(kv_lens), buffer=buffer)
        assert plan.buffer is buffer
        want = expected(cu_q, np.array(kv_lens), capacity.max_tokens)
        assert np.array_equal(pairs_of(plan, capacity), want)


def test_too_much_is_refused() -> None:
    with pytest.raises(AssertionError, match="41 tokens > 40"):
        plan_mqa(capacity_of(), np.array([0, 41]), np.array([41]))
    with pytest.raises(AssertionError, match="13 sequences > 12"):
        plan_mqa(capacity_of(), np.arange(14), np.ones(13))
