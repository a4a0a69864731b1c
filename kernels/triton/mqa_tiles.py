"""Runs of query tokens cut to tiles, and tiles to pieces: the geometry of `mqa_plan.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from kernels.triton.mqa_plan import MQACapacity, SharedPass

_OVERHEAD = 2  # what starting and ending a piece costs, in blocks of KV rows
_MIN_STRETCH = 4  # blocks: shorter pieces cost more than they spread


class Runs(NamedTuple):
    """Tokens that read one range of rows: arrays [runs]. `limit`: keys that the first token sees;
    each next one sees `step` more. `token` indexes the token list."""

    token: np.ndarray
    num_tokens: np.ndarray
    table_row: np.ndarray
    begin: np.ndarray
    limit: np.ndarray
    step: np.ndarray
    shared: np.ndarray  # whether these tokens have keys elsewhere too


class Tiles(NamedTuple):
    """`Runs` cut to what one program holds, with their blocks of KV rows."""

    token: np.ndarray
    num_tokens: np.ndarray
    table_row: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    limit: np.ndarray
    step: np.ndarray
    shared: np.ndarray
    blocks: np.ndarray


class Pieces(NamedTuple):
    tile: np.ndarray  # [pieces]
    first: np.ndarray  # blocks of the tile, [first, last)
    last: np.ndarray
    cuts: np.ndarray  # [num_cuts + 1]


def find_runs(
    capacity: MQACapacity, cu_q: np.ndarray, kv_lens: np.ndarray, shared: Sequence[SharedPass]
) -> tuple[Runs, np.ndarray]:
    """The passes, then the tails of all sequences; and the token list that they point into."""
    num_q = np.diff(cu_q)
    tail = np.zeros(len(kv_lens), dtype=np.int64)  # first row outside shared passes
    lists = [np.arange(capacity.max_tokens, dtype=np.int64)]
    passes: list[tuple[int, int, int, int, int]] = []
    used, listed = 0, capacity.max_tokens
    for members, first, last in shared:
        who = np.asarray(members, dtype=np.int64)
        counts = num_q[who]
        total = int(counts.sum())
        entering = total if first == 0 else 0  # their tails become partial answers too
        if used + total + entering > capacity.max_shared_tokens or (tail[who] != first).any():
            continue  # too much, or inside a pass that was
        assert (kv_lens[who] - counts >= last).all(), "a shared pass over rows of this step"
        used += total + entering
        tail[who] = last
        ends = np.cumsum(counts)
        lists.append(np.arange(total) + np.repeat(cu_q[who] - (ends - counts), counts))
        passes.append((listed, total, int(who[0]), first, last))
        listed += total
    of_pass = np.array(passes, dtype=np.int64).reshape(-1, 5)
    seqs = np.flatnonzero(num_q)
    no_step = np.zeros(len(passes), dtype=np.int64)
    runs = Runs(
        token=np.concatenate((of_pass[:, 0], cu_q[seqs])),
        num_tokens=np.concatenate((of_pass[:, 1], num_q[seqs])),
        table_row=np.concatenate((of_pass[:, 2], seqs)),
        begin=np.concatenate((of_pass[:, 3], tail[seqs])),
        limit=np.concatenate((of_pass[:, 4], (kv_lens - num_q)[seqs] + 1)),
        step=np.concatenate((no_step, np.ones_like(seqs))),
        shared=np.concatenate((no_step == 0, tail[seqs] > 0)),
    )
    return runs, np.concatenate(lists)


def make_tiles(runs: Runs, tile_tokens: int, block_n: int) -> Tiles:
    counts = -(-runs.num_tokens // tile_tokens)
    run = np.repeat(np.arange(len(counts)), counts)
    skipped = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    num_tokens = np.minimum(runs.num_tokens[run] - skipped, tile_tokens)
    step, begin = runs.step[run], runs.begin[run]
    limit = runs.limit[run] + step * skipped
    end = np.maximum(limit + step * (num_tokens - 1), begin)
    return Tiles(
        token=runs.token[run] + skipped,
        num_tokens=num_tokens,
        table_row=runs.table_row[run],
        begin=begin,
        end=end,
        limit=limit,
        step=step,
        shared=runs.shared[run],
        blocks=-(-(end - begin) // block_n),
    )


def cut(tiles: Tiles, num_cuts: int) -> Pieces:
    """Equal stretches: a position is a key (tile, block of it)."""
    num_tiles = len(tiles.blocks)
    ends = np.cumsum(tiles.blocks + _OVERHEAD)
    total = int(ends[-1]) if num_tiles else 0
    # Each program ends a foreign tile on average: that overhead is the same for all of them.
    stretch = max(-(-total // num_cuts), _MIN_STRETCH)
    mark = np.arange(1, num_cuts) * stretch
    mark = mark[mark < total]
    tile = np.searchsorted(ends, mark, side="right")
    blocks = tiles.blocks[tile]
    block = np.clip(mark - (ends[tile] - blocks), 0, blocks)
    sliver = min(_OVERHEAD, stretch // 8)  # a piece so short is not worth a partial answer
    block = np.where(block <= sliver, 0, block)
    whole = (blocks - block <= sliver) & (block > 0)
    tile, block = tile + whole, np.where(whole, 0, block)

    scale = np.int64(1 << 32)
    cut_key = tile * scale + block
    key = np.unique(np.concatenate((np.arange(num_tiles, dtype=np.int64) * scale, cut_key)))
    key = key[key < num_tiles * scale]
    tile, first = key // scale, key % scale
    goes_on = np.append(tile[1:] == tile[:-1], False) if len(tile) else np.zeros(0, dtype=bool)
    last = np.where(goes_on, np.append(first[1:], 0)[: len(first)], tiles.blocks[tile])
    cuts = np.full(num_cuts + 1, len(key), dtype=np.int64)
    cuts[0] = 0
    cuts[1 : len(cut_key) + 1] = np.searchsorted(key, cut_key)
    return Pieces(tile, first, last, cuts)
