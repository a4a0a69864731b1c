"""Sort of (token, expert) pairs by expert, padded to tiles. N pairs, E experts, M rows a tile."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_FEW_PAIRS = 2048  # up to these each program counts all pairs: cheaper than launches


class Tiles(NamedTuple):
    """Pairs in tiles of `block_m`, each of one expert. Shapes depend on N, E and block_m only."""

    pairs: torch.Tensor  # int32 [max_tiles · block_m]: index into ids, N where a tile is padded
    expert: torch.Tensor  # int32 [max_tiles]; beyond num_tiles undefined, like `pairs` there
    num_tiles: torch.Tensor  # int32 [1], on the device
    block_m: int


@triton.jit
def _count_kernel(ids, counts, num_pairs, E_BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """counts[chunk] = the chunk's pairs by expert."""
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(ids + index, mask=index < num_pairs, other=E_BLOCK - 1)
    place = tl.program_id(0) * E_BLOCK + tl.arange(0, E_BLOCK)
    tl.store(counts + place, tl.histogram(own, E_BLOCK))


@triton.jit
def _scan_kernel(
    counts, totals, chunks, E_BLOCK: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr
):
    """counts[chunk] becomes the sum over the chunks before it; totals the sum over all."""
    bins = tl.program_id(0) * BINS + tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, chunks, ROWS):
        row = first + tl.arange(0, ROWS)
        place = counts + row[:, None] * E_BLOCK + bins[None, :]
        count = tl.load(place, mask=(row < chunks)[:, None], other=0)
        before = tl.cumsum(count, 0) - count + total[None, :]
        tl.store(place, before, mask=(row < chunks)[:, None])
        total += tl.sum(count, 0)
    tl.store(totals + bins, total)


@triton.jit
def _place_kernel(
    ids, counts, totals, pairs, tile_expert, num_tiles, num_pairs,
    E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
    READ: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """A program places CHUNK pairs. COUNTED: the two kernels above ran; else it counts itself."""
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    bins = tl.arange(0, E_BLOCK)
    if COUNTED:
        total = tl.load(totals + bins)
        before = tl.load(counts + chunk * E_BLOCK + bins)  # pairs in the chunks before this one
    else:
        total = tl.zeros([E_BLOCK], tl.int32)
        before = tl.zeros([E_BLOCK], tl.int32)
        # Bin E_BLOCK - 1 is no expert: it takes what lies beyond the last pair.
        mine_first = chunk * CHUNK
        for first in range(0, num_pairs, READ):
            read = first + tl.arange(0, READ)
            all_ids = tl.load(ids + read, mask=read < num_pairs, other=E_BLOCK - 1)
            count = tl.histogram(all_ids, E_BLOCK)
            total += count
            before += tl.where(first + READ <= mine_first, count, 0)
        near = mine_first // READ * READ + tl.arange(0, READ)
        earlier = tl.load(ids + near, mask=near < mine_first, other=E_BLOCK - 1)
        before += tl.histogram(earlier, E_BLOCK)
    total = tl.where(bins < E_BLOCK - 1, total, 0)
    tiles = (total + BLOCK_M - 1) // BLOCK_M
    start = (tl.cumsum(tiles, 0) - tiles) * BLOCK_M  # row where the expert's tiles begin

    offset = tl.arange(0, CHUNK)
    index = chunk * CHUNK + offset
    mine = tl.load(ids + index, mask=index < num_pairs, other=E_BLOCK - 1)
    rank = tl.zeros([CHUNK], tl.int32)  # among the chunk's pairs of the same expert
    for first in range(0, CHUNK, STEP):
        peer = first + tl.arange(0, STEP)
        peer_index = chunk * CHUNK + peer
        peers = tl.load(ids + peer_index, mask=peer_index < num_pairs, other=E_BLOCK - 1)
        same = (mine[:, None] == peers[None, :]) & (peer[None, :] < offset[:, None])
        rank += tl.sum(same.to(tl.int32), 1)
    row = tl.gather(start + before, mine, 0) + rank
    tl.store(pairs + row, index, mask=index < num_pairs)
    tl.store(tile_expert + row // BLOCK_M, mine, mask=(index < num_pairs) & (row % BLOCK_M == 0))

    for pad in range(chunk, BLOCK_M, chunks):
        empty = total + pad
        tl.store(pairs + start + empty, num_pairs, mask=empty < tiles * BLOCK_M)
    if chunk == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles that any choice of experts can fill."""
    return num_pairs // block_m + min(num_pairs, num_experts)


def align(ids: torch.Tensor, num_experts: int, block_m: int) -> Tiles:
    """Tiles of the pairs of ids [T, k] int32, contiguous, each in [0, E); pairs in stable order.

    As `kernels.moe_align.align`. One launch, or three for many pairs; no sync, no atomics.
    """
    assert ids.dtype == torch.int32, ids.dtype
    assert ids.is_contiguous(), ids.stride()
    num_pairs = ids.numel()
    capacity = max_tiles(num_pairs, num_experts, block_m)
    pairs = ids.new_empty(capacity * block_m)
    expert = ids.new_empty(capacity)
    num_tiles = ids.new_zeros(1) if num_pairs == 0 else ids.new_empty(1)
    if num_pairs == 0:
        return Tiles(pairs, expert, num_tiles, block_m)
    bins = max(32, triton.next_power_of_2(num_experts + 1))
    counted = num_pairs > _FEW_PAIRS
    chunk = 128 if counted else 64
    chunks = triton.cdiv(num_pairs, chunk)
    counts = totals = None
    if counted:
        counts, totals = ids.new_empty(chunks, bins), ids.new_empty(bins)
        _count_kernel[(chunks,)](ids, counts, num_pairs, E_BLOCK=bins, CHUNK=chunk, num_warps=4)
        _scan_kernel[(bins // 16,)](
            counts, totals, chunks, E_BLOCK=bins, BINS=16, ROWS=128, num_warps=4
        )
    _place_kernel[(chunks,)](
        ids, counts, totals, pairs, expert, num_tiles, num_pairs,
        E_BLOCK=bins, BLOCK_M=block_m, CHUNK=chunk, STEP=32 if counted else 64,
        READ=min(1024, max(32, triton.next_power_of_2(num_pairs))), COUNTED=counted, num_warps=4,
    )  # fmt: skip
    return Tiles(pairs, expert, num_tiles, block_m)
