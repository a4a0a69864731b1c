"""Block shapes of the expert GEMMs: a table of measured ones, and a rule for the rest.

Filled by tests/bench/gpu/tune_moe.py on an H200. N pairs, E experts, D hidden, I inner.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.triton.gemv import Lanes
from kernels.triton.grouped_gemm import Shape


class Direct(NamedTuple):
    """Two launches, each pair on its own: for few tokens, where experts rarely meet twice."""

    gate_up: Lanes
    down: Lanes


class Sorted(NamedTuple):
    """Sort, two grouped GEMMs, weighted sum."""

    block_m: int
    gate_up: Shape
    down: Shape


def _swap(block_f: int, block_k: int, num_warps: int, num_stages: int) -> Shape:
    return Shape(block_f, block_k, num_warps, num_stages, swap=True)


# (E, I, D, FP8) → by number of tokens, the first bound that holds; None: no bound.
_TABLE: dict[tuple[int, int, int, bool], list[tuple[int | None, Direct | Sorted]]] = {
    (66, 1408, 2048, False): [  # DeepSeek-V2-Lite
        (1, Direct(Lanes(2, 1024, 4), Lanes(2, 2048, 4))),
        (4, Direct(Lanes(2, 1024, 4), Lanes(2, 2048, 2))),
        (48, Sorted(16, _swap(64, 128, 4, 4), _swap(128, 128, 8, 3))),
        (96, Sorted(16, _swap(128, 128, 4, 3), _swap(128, 128, 8, 3))),
        (320, Sorted(32, _swap(128, 64, 4, 4), _swap(128, 64, 4, 4))),
        (1024, Sorted(64, Shape(128, 64, 4, 4), Shape(256, 64, 8, 4))),
        (None, Sorted(128, Shape(128, 64, 8, 4, group_m=2), Shape(256, 64, 8, 4, group_m=2))),
    ],
    (257, 2048, 7168, True): [  # DeepSeek-V3, R1
        (8, Sorted(16, _swap(128, 128, 8, 3), _swap(128, 128, 8, 3))),
        (96, Sorted(16, _swap(64, 128, 4, 5), _swap(128, 128, 8, 3))),
        (320, Sorted(16, _swap(64, 128, 4, 5), _swap(128, 128, 4, 4))),
        (1024, Sorted(32, _swap(64, 128, 4, 5), _swap(128, 128, 8, 3))),
        (3072, Sorted(64, Shape(128, 128, 4, 4), Shape(128, 128, 8, 4))),
        (None, Sorted(128, Shape(128, 128, 8, 3), Shape(128, 128, 8, 4))),
    ],
}


def choose(
    num_tokens: int, top_k: int, num_experts: int, inner: int, hidden: int, dtype: torch.dtype
) -> Direct | Sorted:
    """The plan of one layer, by the dtype of its weights; a pure function of shapes."""
    if dtype == torch.float32:  # twice the bytes a tile; for tests
        first, second = _block_k(hidden, 32), _block_k(inner, 32)
        return Sorted(16, Shape(64, first, 4, 2), Shape(64, second, 4, 2))
    fp8 = dtype == torch.float8_e4m3fn
    for bound, plan in _TABLE.get((num_experts, inner, hidden, fp8), []):
        if bound is None or num_tokens <= bound:
            return plan
    return (
        _fp8_rule(num_tokens, top_k, num_experts)
        if fp8
        else _rule(num_tokens, top_k, num_experts, inner, hidden)
    )


def _rule(
    num_tokens: int, top_k: int, num_experts: int, inner: int, hidden: int
) -> Direct | Sorted:
    """bf16: what the table says of V2-Lite, by rows an expert."""
    if num_tokens <= 4:
        return Direct(Lanes(2, 1024, 4), Lanes(2, 2048, 2))
    per_expert = num_tokens * top_k / num_experts
    first, second = _block_k(hidden, 128), _block_k(inner, 128)
    if per_expert <= 10:
        return Sorted(16, _swap(64, first, 4, 4), _swap(128, second, 8, 3))
    first, second = min(first, 64), min(second, 64)
    if per_expert <= 40:
        return Sorted(32, _swap(128, first, 4, 4), _swap(128, second, 4, 4))
    if per_expert <= 128:
        return Sorted(64, Shape(128, first, 4, 4), Shape(256, second, 8, 4))
    return Sorted(128, Shape(128, first, 8, 4, group_m=2), Shape(256, second, 8, 4, group_m=2))


def _fp8_rule(num_tokens: int, top_k: int, num_experts: int) -> Sorted:
    """What the table says of V3, by rows an expert; K goes by groups of 128."""
    per_expert = num_tokens * top_k / num_experts
    if per_expert <= 10:
        return Sorted(16, _swap(128, 128, 8, 3), _swap(128, 128, 8, 3))
    if per_expert <= 36:
        return Sorted(32, _swap(64, 128, 4, 5), _swap(128, 128, 8, 3))
    if per_expert <= 108:
        return Sorted(64, Shape(128, 128, 4, 4), Shape(128, 128, 8, 4))
    return Sorted(128, Shape(128, 128, 8, 3), Shape(128, 128, 8, 4))


def _block_k(width: int, most: int) -> int:
    """The largest power of two up to `most` that divides `width`."""
    return min(most, width & -width)
