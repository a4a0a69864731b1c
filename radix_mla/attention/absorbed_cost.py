"""How long a kernel takes for a step's absorbed attention: which of several is the fastest.

A kernel works on tiles of up to 64 query rows (tokens · heads) over KV rows. Without sharing every
sequence meets all its rows; a shared pass meets its rows once, with the queries of all its members
together, and what is left to a sequence is its tail. Rows that several sequences read one after the
other come from L2 as long as they fit there, so reading them once saves less than it seems to:

    us = call_us + tiles · tile_us + (query tile, KV row) pairs / tile_rows_per_us
                 + rows from memory / rows_per_us
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from radix_mla.attention.shared_prefix import shared_in

if TYPE_CHECKING:
    from radix_mla.attention.backend import MQAWork

TILE_ROWS = 64
_L2_ROWS = 24_000  # bf16 rows of 1,152 bytes that an H200's L2 holds beside all else


@dataclass(frozen=True, slots=True)
class KernelRates:
    """Of one kernel. `call_us`: all its launches of a layer. `shares`: it reads shared prefixes
    once, `pass_tiles` tiles of queries at a time at least.
    """

    call_us: float
    tile_us: float
    tile_rows_per_us: float
    rows_per_us: float
    shares: bool = False
    pass_tiles: int = 1


# Fitted by hand to 32 steps of 1 to 256 sequences on an H200 (tests/bench/gpu/bench_sharing.py).
FLASHMLA_PLAIN = KernelRates(16.0, 0.0, 5600.0, 9500.0)
FLASHMLA_MIXED = KernelRates(45.0, 0.0, 5200.0, 9500.0)
FLASHMLA_SHARED = KernelRates(42.0, 0.0, 4400.0, 9500.0, shares=True, pass_tiles=2)
TRITON_PLAIN = KernelRates(25.0, 0.0, 3400.0, 100_000.0)
TRITON_MIXED = KernelRates(32.0, 0.05, 2500.0, 38_000.0, shares=True)


def absorbed_us(work: MQAWork, rates: KernelRates, num_heads: int, run_tokens: int = 1) -> float:
    """Microseconds of one layer. `run_tokens`: a sequence's queries are taken that many at a time,
    and a run that is not full costs as much.
    """
    size, num_q = work.page_size, np.diff(work.cu_q)
    shared, is_decode = shared_in(work), work.num_queries == len(work.kv_lens)
    tails, from_memory, tiles, tile_rows = work.kv_lens, int(work.kv_lens.sum()), 0, 0
    for members, first, last in shared.passes:
        rows = (last - first) * size
        if rates.shares:
            tokens = len(members) if is_decode else int(num_q[list(members)].sum())
            runs = -(-tokens * num_heads // (TILE_ROWS * rates.pass_tiles))
            tiles += runs * rates.pass_tiles
            tile_rows += runs * rates.pass_tiles * rows
        if rates.shares or rows <= _L2_ROWS:
            from_memory -= (len(members) - 1) * rows
    if rates.shares:
        tails = tails - np.array(shared.tails, dtype=np.int64) * size
    tiles_of = -(-num_q // run_tokens) * -(-run_tokens * num_heads // TILE_ROWS)  # tiles, [B]
    tiles += int(tiles_of.sum())
    tile_rows += int((tiles_of * tails).sum())
    return (
        rates.call_us
        + tiles * rates.tile_us
        + tile_rows / rates.tile_rows_per_us
        + from_memory / rates.rows_per_us
    )
