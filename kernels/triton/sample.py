"""Choice of tokens without a host sync. N rows, V ids, S splits of a row.

Equal to `radix_mla.sampling`: the draws' uniform numbers, bit for bit; greedy choices, ties
included; the filters and their order; the inverse CDF in the order of ids. Not equal: the last bits
of exp and of sums (fp64 here and there, added in another order), so a draw differs where u, or a
filter's border, falls within such a rounding error of a border between two ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SPLIT = 8192  # logits that one program of the first launch looks at
_LIST = 8192  # candidates that are gathered; with more, every pass reads the row
_BLOCK = 4096  # ids a step of a pass over the row
_TRIED = 2048  # the same where each meets all levels
_LEVELS = 16  # thresholds tried in one pass
_GREEDY_BELOW = 1e-3


@triton.jit
def _top_kernel(logits, tops, ids, stride, size, BLOCK: tl.constexpr):
    """The greatest of a split and its id; NaN counts as the greatest, the first of equals wins."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = split * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + col, mask=col < size, other=float("-inf"))
    value = value.to(tl.float32)
    key = tl.where(value == value, value, float("inf"))
    top = tl.max(key, 0)
    first = tl.min(tl.where((key == top) & (col < size), col, size), 0)
    # A NaN is reported as one: the caller's check of finite logits must see it.
    broken = tl.max((value != value).to(tl.int32), 0)
    if broken > 0:
        first = tl.min(tl.where(value != value, col, size), 0)
    place = row * tl.num_programs(1) + split
    tl.store(tops + place, tl.where(broken > 0, float("nan"), top))
    tl.store(ids + place, first)


@triton.jit
def _row_top(tops, ids, row, splits, size, SPLITS: tl.constexpr):
    """(the greatest logit of the row, its id, whether there is a NaN)."""
    split = tl.arange(0, SPLITS)
    inside = split < splits
    value = tl.load(tops + row * splits + split, mask=inside, other=float("-inf"))
    first = tl.load(ids + row * splits + split, mask=inside, other=size)
    broken = tl.max((value != value).to(tl.int32), 0)
    key = tl.where(value == value, value, float("inf"))
    top = tl.max(key, 0)
    wanted = (value != value) if broken > 0 else (key == top)
    return top, tl.min(tl.where(wanted & inside, first, size), 0), broken


@triton.jit
def _greedy_kernel(tops, ids, tokens, finite, splits, size, SPLITS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    top, token, broken = _row_top(tops, ids, row, splits, size, SPLITS)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(finite + row, (broken == 0) & (tl.abs(top) < float("inf")))


@triton.jit
def _mix(value):
    """splitmix64's finaliser."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """`radix_mla.sampling.uniform.uniform`: fp64 in [0, 1); all three uint64."""
    stream = _mix(_mix(seed) + (choice + 1) * 0x9E3779B97F4A7C15)
    bits = _mix(stream + (position + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _uniform_kernel(out, seeds, choices, positions, num, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num
    seed = tl.load(seeds + index, mask=inside, other=0).to(tl.uint64, bitcast=True)
    choice = tl.load(choices + index, mask=inside, other=0).to(tl.uint64)
    position = tl.load(positions + index, mask=inside, other=0).to(tl.uint64)
    tl.store(out + index, _uniform(seed, choice, position), mask=inside)


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
def _draw_kernel(
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
    top, token, broken = _row_top(tops, top_ids, row, splits, size, SPLITS)
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
    u = _uniform(
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


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [N], finite bool [N]): the greatest logit of each row, of equals the first.

    logits fp32 or bf16 [N, V], last dim contiguous, any row stride (a slice leaves padding out). A
    row with a NaN gives its first NaN's id; `finite` tells whether the chosen logit is finite.
    """
    tops, ids = _tops(logits)
    tokens, finite = _results(logits)
    if len(logits):
        splits = tops.shape[1]
        _greedy_kernel[(len(logits),)](
            tops, ids, tokens, finite, splits, logits.shape[1],
            SPLITS=triton.next_power_of_2(splits), num_warps=1,
        )  # fmt: skip
    return tokens, finite


def sample(
    logits: torch.Tensor,
    *,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids int64 [N], finite bool [N]): greedy rows and keyed draws, in two launches.

    logits as for `greedy`. All others [N], on the device: temperature fp32 (below 1e-3: greedy),
    top_k int32 (0: off), top_p fp64 (>= 1: off), min_p fp32 (0: off), and what keys the draw, as
    `radix_mla.sampling.uniform` takes it: seeds int64 (the 64 bits of the seed), choices and
    positions int64. A row whose greatest logit is not finite gets `greedy`'s answer.
    """
    expected = {
        torch.float32: (temperature, min_p),
        torch.float64: (top_p,),
        torch.int32: (top_k,),
        torch.int64: (seeds, choices, positions),
    }
    for dtype, tensors in expected.items():
        for tensor in tensors:
            assert tensor.shape == (len(logits),), tensor.shape
            assert tensor.dtype == dtype, (tensor.dtype, dtype)
            assert tensor.is_contiguous()
    tops, ids = _tops(logits)
    tokens, finite = _results(logits)
    num_rows, size = logits.shape
    found_weights = torch.empty(num_rows, _LIST, dtype=torch.float32, device=logits.device)
    found_ids = torch.empty(num_rows, _LIST, dtype=torch.int32, device=logits.device)
    if num_rows:
        splits = tops.shape[1]
        _draw_kernel[(num_rows,)](
            logits, tops, ids, tokens, finite, found_weights, found_ids,
            temperature, top_k, top_p, min_p, seeds, choices, positions,
            logits.stride(0), size, splits,
            SPLITS=triton.next_power_of_2(splits), BLOCK=_BLOCK, TRIED=_TRIED, LIST=_LIST,
            LEVELS=_LEVELS,
            GREEDY_BELOW=_GREEDY_BELOW, num_warps=16,
        )  # fmt: skip
    return tokens, finite


def uniform(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp64 [N] in [0, 1) of int64 [N]: `radix_mla.sampling.uniform.uniform`, bit for bit."""
    out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    if len(seeds):
        _uniform_kernel[(triton.cdiv(len(seeds), 128),)](
            out, seeds, choices, positions, len(seeds), BLOCK=128
        )
    return out


def _tops(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, size = logits.shape
    assert logits.stride(1) == 1, logits.stride()
    assert size > 0, "no ids"
    splits = triton.cdiv(size, _SPLIT)
    tops = torch.empty(num_rows, splits, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, splits, dtype=torch.int32, device=logits.device)
    if num_rows:
        _top_kernel[(num_rows, splits)](
            logits, tops, ids, logits.stride(0), size, BLOCK=_SPLIT, num_warps=8
        )
    return tops, ids


def _results(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return tokens, torch.empty(len(logits), dtype=torch.bool, device=logits.device)
