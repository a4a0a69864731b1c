"""Draws from filtered logits: one program a row. N rows, V ids, S splits of a row."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.top import row_top


@triton.jit
def _mix(value):
    """splitmix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def keyed_uniform(seed, choice, position):
    """`radix_mla.sampling.uniform.uniform`: fp64 in [0, 1); all three uint64."""
    stream = _mix(_mix(seed) + (choice + 1) * 0x9E3779B97F4A7C15)
    bits = _mix(stream + (position + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _weights_at(logits, found_weights, index, count, listed, top, temperature):
    """fp32 weights of the row's candidates at `index`: from the list, or from the logits."""
    inside = index < count
    from_list = index * 0 + listed > 0  # of index's shape: the interpreter has no scalar masks
    kept = tl.load(found_weights + index, mask=inside & from_list, other=0.0)
    score = tl.load(logits + index, mask=inside & ~from_list, other=float("-inf"))
    score = score.to(tl.float32)
    return tl.where(from_list, kept, tl.exp((score - top) / temperature))


@triton.jit
def _border(
    logits, found_weights, count, listed, top, temperature, target,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """(the greatest t such that those of weight >= t reach `target`, what those above t reach).

    "Reach" is their number, or their summed weight. Weights lie in [0, 1], where the order of fp32
    is that of their bits: 30 bits, 4 a pass.
    """
    low = tl.full([], 0, tl.int32)
    above = tl.full([], 0.0, tl.float64)
    width = tl.full([], 1 << 26, tl.int32)
    for _ in range(8):
        level = low + tl.arange(0, LEVELS) * width
        sums = tl.zeros([LEVELS], tl.float64)
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            weight = _weights_at(logits, found_weights, index, count, listed, top, temperature)
            bits = weight.to(tl.int32, bitcast=True)
            over = (bits[:, None] >= level[None, :]) & (index < count)[:, None]
            if BY_WEIGHT:
                sums += tl.sum(tl.where(over, weight[:, None], 0.0), 0).to(tl.float64)
            else:
                sums += tl.sum(over.to(tl.int32), 0).to(tl.float64)
        reached = sums >= target  # monotonic: true for the low levels
        best = tl.maximum(tl.sum(reached.to(tl.int32), 0) - 1, 0)
        nearest = tl.sum(tl.where(tl.arange(0, LEVELS) == best + 1, sums, 0.0), 0)
        above = tl.where(best + 1 < LEVELS, nearest, above)
        low += best * width
        width = tl.maximum(width >> 4, 1)
    return low.to(tl.float32, bitcast=True), above


@triton.jit
def draw_kernel(
    logits, tops, top_ids, tokens, finite, found_weights, found_ids,
    temperatures, top_ks, top_ps, min_ps, seeds, choices, positions,
    stride, size, splits,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, TRIED: tl.constexpr, LIST: tl.constexpr,
    LEVELS: tl.constexpr,
    GREEDY_BELOW: tl.constexpr,
):  # fmt: skip
    """One row a program.

    All filters keep a front part of one order, (weight descending, id ascending). So what is kept
    is: all above a border weight, and the first `equals` ids at it.
    """
    row = tl.program_id(0).to(tl.int64)
    top, token, broken = row_top(tops, top_ids, row, splits, size, SPLITS)
    good = (broken == 0) & (tl.abs(top) < float("inf"))
    tl.store(finite + row, good)
    temperature = tl.load(temperatures + row)
    tl.store(tokens + row, token.to(tl.int64))
    if (temperature < GREEDY_BELOW) | (good == 0):
        return
    logits += row * stride
    found_weights += row * LIST
    found_ids += row * LIST
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.minimum(tl.load(min_ps + row), 1.0)
    top_k = tl.where((top_k <= 0) | (top_k >= size), size, top_k)
    filtered = (top_k < size) | (top_p < 1.0) | (min_p > 0.0)

    # 1. Weights of exp(-8) of the top's and more are gathered, and what min_p leaves is added up.
    floor = tl.maximum(min_p, 0.00033546262790251185)
    count = tl.full([], 0, tl.int32)
    passing = tl.full([], 0, tl.int32)  # of weight >= min_p
    weight_found = tl.full([], 0.0, tl.float64)
    weight_passing = tl.full([], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        score = tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32)
        weight = tl.exp((score - top) / temperature)
        passes = (weight >= min_p) & inside
        passing += tl.sum(passes.to(tl.int32), 0)
        weight_passing += tl.sum(tl.where(passes, weight, 0.0).to(tl.float64), 0)
        found = (weight >= floor) & inside
        hits = found.to(tl.int32)
        place = count + tl.cumsum(hits, 0) - hits
        tl.store(found_weights + place, weight, mask=found & (place < LIST))
        tl.store(found_ids + place, index, mask=found & (place < LIST))
        count += tl.sum(hits, 0)
        weight_found += tl.sum(tl.where(found, weight, 0.0).to(tl.float64), 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    by_rank = top_k < passing
    enough = (min_p >= floor) | (by_rank & (count >= top_k))
    enough = enough | ((by_rank == 0) & (top_p < 1.0) & (weight_found >= top_p * weight_passing))
    listed = tl.where(filtered & enough & (count <= LIST), 1, 0)
    count = tl.where(listed > 0, count, size)

    # 2. The border of the first `top_k`, then of the nucleus inside them.
    border = min_p
    equals = tl.full([], 1 << 30, tl.int32)  # how many of those at the border stay
    total = weight_passing
    if by_rank:
        border, above = _border(
            logits, found_weights, count, listed, top, temperature, top_k.to(tl.float64),
            False, TRIED, LEVELS,
        )  # fmt: skip
        equals = top_k - above.to(tl.int32)
        # The weight above the border: one pass.
        total = equals.to(tl.float64) * border.to(tl.float64)
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            weight = _weights_at(logits, found_weights, index, count, listed, top, temperature)
            heavy = (weight > border) & (index < count)
            total += tl.sum(tl.where(heavy, weight, 0.0).to(tl.float64), 0)
    if top_p < 1.0:
        target = top_p * total
        inner, above = _border(
            logits, found_weights, count, listed, top, temperature, target, True, TRIED, LEVELS
        )
        if inner >= border:
            more = tl.ceil((target - above) / tl.maximum(inner, 1e-45).to(tl.float64))
            more = tl.minimum(tl.maximum(more, 1.0), 1e9).to(tl.int32)
            equals = tl.where(inner > border, more, tl.minimum(more, equals))
            border = inner

    # 3. Inverse CDF in the order of ids, twice: for the whole weight, then for the place in it.
    u = keyed_uniform(
        tl.load(seeds + row).to(tl.uint64, bitcast=True),
        tl.load(choices + row).to(tl.uint64),
        tl.load(positions + row).to(tl.uint64),
    )
    whole = tl.where(filtered, 0.0, weight_passing)
    seen = tl.full([], 0, tl.int32)
    for start in range(0, tl.where(filtered, count, 0), BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight = _weights_at(logits, found_weights, index, count, listed, top, temperature)
        level = ((weight == border) & (index < count)).to(tl.int32)
        rank = seen + tl.cumsum(level, 0) - level
        keep = ((weight > border) & (index < count)) | ((level > 0) & (rank < equals))
        whole += tl.sum(tl.where(keep, weight, 0.0).to(tl.float64), 0)
        seen += tl.sum(level, 0)
    target = u * whole
    passed = tl.full([], 0.0, tl.float64)
    seen = tl.full([], 0, tl.int32)
    picked = tl.full([], 2147483647, tl.int32)
    last = tl.full([], 0, tl.int32)  # the last of weight: where rounding leaves the target beyond
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight = _weights_at(logits, found_weights, index, count, listed, top, temperature)
        level = ((weight == border) & (index < count)).to(tl.int32)
        rank = seen + tl.cumsum(level, 0) - level
        keep = ((weight > border) & (index < count)) | ((level > 0) & (rank < equals))
        keep = keep & (weight > 0.0)
        own = tl.where(keep, weight, 0.0).to(tl.float64)
        here = keep & (passed + tl.cumsum(own, 0) > target)
        picked = tl.minimum(picked, tl.min(tl.where(here, index, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(keep, index, 0), 0))
        passed += tl.sum(own, 0)
        seen += tl.sum(level, 0)
    picked = tl.minimum(picked, last)
    drawn = tl.load(found_ids + picked, mask=listed > 0, other=0)
    tl.store(tokens + row, tl.where(listed > 0, drawn, picked).to(tl.int64))
