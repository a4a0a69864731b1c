"""The work list of absorbed attention, planned on the host in numpy and packed into one buffer.

A *tile* is a few query tokens that read the same range of one page table row: tokens of a sequence
(its *tail*), or of several sequences that share a prefix (a *shared pass*). Tiles are laid end to
end, each as long as its blocks of KV rows plus a fixed overhead, and the whole is cut into equal
stretches, one a program (stream-K). A cut inside a tile makes two *pieces* of it:

    tiles     |==== 0 ====|== 1 ==|=========== 2 ===========|= 3 =|
    programs  |---- 0 ----|---- 1 ----|---- 2 ----|---- 3 ----|
    pieces    |==== 0 ====|== 1 ==|=2=|==== 3 ====|= 4 =|= 5 =|

A tile in one piece that holds all its tokens' keys writes the answer; every other piece writes a
partial answer with its LSE, and a second kernel combines each token's parts. With more heads than a
program's rows, `lanes` programs take the same stretch, each its own heads: they read the same rows
at the same time, through L2.

All sizes follow from `MQACapacity`, so the buffer is an input of a CUDA graph: one copy updates it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kernels.triton.mqa_tiles import Pieces, Tiles, cut, find_runs, make_tiles

ITEM = 8  # ints of a piece: see `_pack_pieces`


@dataclass(frozen=True)
class MQACapacity:
    """What a plan buffer can hold, and the block shapes that it is made for.

    block_m query rows (tokens × heads) and block_n KV rows a step of a program, num_programs the
    fixed grid. max_shared_tokens bounds the tokens that take part in shared passes: each once for
    each of its passes and once for its tail. What does not fit is planned without sharing.
    """

    num_heads: int
    block_m: int
    block_n: int
    num_programs: int
    max_tokens: int
    max_seqs: int
    max_shared_tokens: int = 0

    @property
    def lanes(self) -> int:
        return -(-self.num_heads // self.block_m)

    @property
    def head_block(self) -> int:
        """Heads of a token in one program."""
        return min(self.num_heads, self.block_m)

    @property
    def tile_tokens(self) -> int:
        return self.block_m // self.head_block

    @property
    def num_cuts(self) -> int:
        return max(1, self.num_programs // self.lanes)

    @property
    def max_pieces(self) -> int:
        return self.max_tokens + self.max_shared_tokens + self.num_cuts

    @property
    def max_parts(self) -> int:
        """Tokens of partial answers: the tiles at the cuts, and whatever takes part in sharing."""
        return self.max_shared_tokens + 2 * self.num_cuts * self.tile_tokens

    @cached_property
    def at(self) -> Offsets:
        sizes = (
            1,
            self.num_cuts + 1,
            self.max_pieces * ITEM,
            self.max_tokens + self.max_shared_tokens,
            self.max_tokens,
            self.max_tokens + 1,
            self.max_parts,
        )
        ends = np.cumsum(
            [-(-size // 16) * 16 for size in sizes]
        ).tolist()  # kernels see 16 | offset
        return Offsets(0, *ends)


class Offsets(NamedTuple):
    """Where the parts of a plan buffer begin (ints); `end` is its length."""

    num_units: int  # tokens whose answer the second kernel combines
    cuts: int  # [num_cuts + 1] first piece of each stretch
    items: int  # [max_pieces, ITEM]
    tokens: int  # token ids that the pieces point into; the first max_tokens are 0, 1, 2, ...
    units: int  # token id of each unit
    unit_parts: int  # [num_units + 1] CSR into parts
    parts: int  # partial answers (in tokens) of the units
    end: int


class SharedPass(NamedTuple):
    """Rows [first, last) of the members' sequences lie on the same pages: read once for them all.

    Outer passes come before inner ones; a member's first pass begins at 0, the next where that
    ended. Only rows that exist before the step: every query of a member sees all of them.
    """

    members: Sequence[int]
    first: int
    last: int


class MQAPlan(NamedTuple):
    """`buffer` int32 [capacity.at.end], host. No units: the second kernel has nothing to do."""

    buffer: np.ndarray
    num_units: int
    num_pieces: int


def plan_mqa(
    capacity: MQACapacity,
    cu_q: np.ndarray,
    kv_lens: np.ndarray,
    shared: Sequence[SharedPass] = (),
    *,
    buffer: np.ndarray | None = None,
) -> MQAPlan:
    """Plans a step: sequence i has queries cu_q[i:i+2], its last tokens, and kv_lens[i] rows in row
    i of the page table. A sequence may have no queries; a query may have no keys (answer 0, -inf).

    cu_q, kv_lens: host ints [B + 1], [B]. `buffer` int32 [capacity.at.end] is filled if given
    (pinned, say). O(tokens + pieces) without a Python loop, but one over the shared passes.
    """
    at = capacity.at
    if buffer is None:
        buffer = np.zeros(at.end, dtype=np.int32)
    assert buffer.shape == (at.end,), f"a buffer of {buffer.shape} for {at.end} ints"
    assert buffer.dtype == np.int32, f"buffer is {buffer.dtype}"
    cu_q, kv_lens = np.asarray(cu_q, dtype=np.int64), np.asarray(kv_lens, dtype=np.int64)
    assert len(kv_lens) <= capacity.max_seqs, f"{len(kv_lens)} sequences > {capacity.max_seqs}"
    assert cu_q[-1] <= capacity.max_tokens, f"{cu_q[-1]} tokens > {capacity.max_tokens}"
    runs, tokens = find_runs(capacity, cu_q, kv_lens, shared)
    tiles = make_tiles(runs, capacity.tile_tokens, capacity.block_n)
    pieces = cut(tiles, capacity.num_cuts)
    whole = np.bincount(pieces.tile, minlength=len(tiles.blocks)) == 1
    partial = (tiles.shared | ~whole)[pieces.tile]
    num_tokens = tiles.num_tokens[pieces.tile]
    part_end = np.cumsum(np.where(partial, num_tokens, 0))
    part = np.where(partial, part_end - num_tokens, -1)

    buffer[at.cuts : at.cuts + capacity.num_cuts + 1] = pieces.cuts
    _pack_pieces(buffer[at.items :], tiles, pieces, part, capacity.block_n)
    buffer[at.tokens : at.tokens + len(tokens)] = tokens
    num_units = _pack_units(buffer, capacity, tokens, tiles.token[pieces.tile], num_tokens, part)
    buffer[at.num_units] = num_units
    return MQAPlan(buffer, num_units, len(part))


def _pack_pieces(
    items: np.ndarray, tiles: Tiles, pieces: Pieces, part: np.ndarray, block_n: int
) -> None:
    """A piece: token, num_tokens, table_row, begin, end, limit, step, part (-1: writes the answer).

    Its rows are [begin, end); token j (an index into the token list, from `token`) sees the keys
    below limit + j · step.
    """
    tile, num = pieces.tile, len(pieces.tile)
    begin = tiles.begin[tile] + pieces.first * block_n
    end = np.minimum(tiles.begin[tile] + pieces.last * block_n, tiles.end[tile])
    out = items[: num * ITEM].reshape(num, ITEM)
    for column, values in enumerate(
        (
            tiles.token[tile],
            tiles.num_tokens[tile],
            tiles.table_row[tile],
            begin,
            end,
            tiles.limit[tile],
            tiles.step[tile],
            part,
        )
    ):
        out[:, column] = values


def _pack_units(
    buffer: np.ndarray,
    capacity: MQACapacity,
    tokens: np.ndarray,
    token_at: np.ndarray,
    num_tokens: np.ndarray,
    part: np.ndarray,
) -> int:
    """Which partial answers belong to which token; returns num_units."""
    at = capacity.at
    some = np.flatnonzero(part >= 0)
    counts = num_tokens[some]
    total = int(counts.sum())
    assert total <= capacity.max_parts, f"{total} partial answers > {capacity.max_parts}"
    local = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    token = tokens[np.repeat(token_at[some], counts) + local]
    order = np.argsort(token, kind="stable")
    units, first = np.unique(token[order], return_index=True)
    buffer[at.units : at.units + len(units)] = units
    buffer[at.unit_parts : at.unit_parts + len(units)] = first
    buffer[at.unit_parts + len(units)] = total
    # Parts are numbered in the order of the pieces, so a part's number is its place in `local`.
    buffer[at.parts : at.parts + total] = order
    return len(units)
