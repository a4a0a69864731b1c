"""One draw from the filtered softmax of one row of scores, by inverse CDF in the order of ids.

Filters in order: temperature, min_p, top_k, top_p (each over what the former left). Nothing sorts
the vocabulary: what is far below the top is left out first, and only the border of the nucleus is
sorted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from radix_mla.request import SamplingParams

Weights: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.intp]

_BLOCK = 1024
# Weights of exp(-8) of the top's and more belong to a few hundred ids of a trained model.
_FLOORS = (math.exp(-8.0), math.exp(-16.0))
_MAX_SORTED = 4096
_LEVELS_PER_NAT = 16


def draw(scores: Weights, params: SamplingParams, u: float) -> int:
    """An id. scores: fp32 [num_sampleable], finite maximum; u in [0, 1); temperature > 0."""
    weights = _weights(scores, params.temperature)
    ids: Ids | None = None  # kept so far, ascending; None: all
    if params.min_p > 0.0:
        ids = np.flatnonzero(weights >= np.float32(min(params.min_p, 1.0)))
    if 0 < params.top_k < len(scores):
        ids = _top_k(weights, ids, params.top_k)
    if params.top_p < 1.0:
        ids = _nucleus(weights, ids, params.top_p)
    if ids is None:
        return _draw_any(weights, u)
    return int(ids[_pick(np.cumsum(weights[ids], dtype=np.float64), u)])


def _weights(scores: Weights, temperature: float) -> Weights:
    """exp of the scaled distance to the top: in [0, 1], the top has 1."""
    weights: Weights = scores - scores.max()
    weights /= np.float32(temperature)
    np.exp(weights, out=weights)
    return weights


def _top_k(weights: Weights, ids: Ids | None, k: int) -> Ids:
    """The k heaviest; of equal ones at the border the lowest ids."""
    pool = _heaviest(weights, ids, lambda found: len(found) >= k)
    if len(pool) <= k:
        return pool
    values = weights[pool]
    border = np.partition(values, len(values) - k)[len(values) - k]
    keep = values > border
    equal = np.flatnonzero(values == border)
    keep[equal[: k - np.count_nonzero(keep)]] = True
    kept: Ids = pool[keep]
    return kept


def _nucleus(weights: Weights, ids: Ids | None, top_p: float) -> Ids:
    """The smallest set of the heaviest that holds `top_p` of the weight; one at least."""
    total = _sum(weights if ids is None else weights[ids])
    pool = _heaviest(weights, ids, lambda found: _sum(weights[found]) >= top_p * total)
    values = weights[pool]
    below = np.zeros(len(pool), dtype=bool)  # surely inside
    rest, missing = np.arange(len(pool)), top_p * total
    if len(pool) > _MAX_SORTED:
        below, rest, missing = _split_by_level(values, missing)
    rest = rest[np.argsort(-values[rest], kind="stable")]
    cumulative = np.cumsum(values[rest], dtype=np.float64)
    below[rest[: int(np.searchsorted(cumulative, missing, side="left")) + 1]] = True
    kept: Ids = pool[below]
    return kept


def _split_by_level(
    values: Weights, target: float
) -> tuple[NDArray[np.bool_], NDArray[np.intp], float]:
    """(those of the levels that `target` takes whole, the indices of the next level, its share)."""
    with np.errstate(divide="ignore"):
        nats = np.minimum(-np.log(values), 200.0)
    level = (nats * _LEVELS_PER_NAT).astype(np.int64)
    cumulative = np.cumsum(np.bincount(level, weights=values))
    border = min(int(np.searchsorted(cumulative, target, side="left")), len(cumulative) - 1)
    taken = float(cumulative[border - 1]) if border else 0.0
    return level < border, np.flatnonzero(level == border), target - taken


def _heaviest(weights: Weights, ids: Ids | None, is_enough: Callable[[Ids], bool]) -> Ids:
    """Those above the highest floor that leaves enough; at worst all."""
    for floor in _FLOORS:
        pool = _at_least(weights, ids, floor)
        if is_enough(pool):
            return pool
    return _at_least(weights, ids, 0.0)


def _sum(weights: Weights) -> float:
    return float(weights.sum(dtype=np.float64))


def _at_least(weights: Weights, ids: Ids | None, floor: float) -> Ids:
    if ids is None:
        return np.flatnonzero(weights >= np.float32(floor))
    kept: Ids = ids[weights[ids] >= np.float32(floor)]
    return kept


def _pick(cumulative: NDArray[np.float64], u: float) -> int:
    """The first index whose cumulative weight is above u of the whole: never a weight of zero."""
    total = float(cumulative[-1])
    target = min(u * total, math.nextafter(total, 0.0))
    return int(np.searchsorted(cumulative, target, side="right"))


def _draw_any(weights: Weights, u: float) -> int:
    """In two levels: a cumulative sum of blocks, then one inside a block."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK), dtype=np.float64)
    cumulative = np.cumsum(sums)
    block = _pick(cumulative, u)
    before = float(cumulative[block - 1]) if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    share = (u * float(cumulative[-1]) - before) / float(sums[block])
    return block * _BLOCK + _pick(inside, min(1.0, max(0.0, share)))
