"""Where a sequence's rows lie in the pool: long runs to be read in place, the rest to be gathered.

Reading 2,000 rows of 576 fp32 values in place takes half the time of gathering them first.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from radix_mla.cache.kv_pool import slots_of

_MIN_RUN = 64  # rows; a shorter run costs more in calls than its gather costs in bytes
_MAX_RUNS = 64


class Piece(NamedTuple):
    """Consecutive rows of a sequence: at slots [first, first + num_rows), or at `slots`."""

    num_rows: int
    first: int
    slots: torch.Tensor | None


def row_pieces(
    page_table: np.ndarray,
    num_rows: int,
    page_size: int,
    device: torch.device | str,
    *,
    gather: bool = False,
) -> list[Piece]:
    """The rows [0, num_rows) of a sequence in order; page_table int32, num_rows > 0.

    `gather`: one piece, also where that moves long runs.
    """
    pages = page_table[: -(-num_rows // page_size)]
    starts = np.flatnonzero(np.diff(pages) != 1) + 1
    if len(starts) == 0:
        return [Piece(num_rows, int(pages[0]) * page_size, None)]
    if gather or len(starts) >= _MAX_RUNS:
        return [_gathered(page_table, 0, num_rows, page_size, device)]
    bounds = [0, *(starts * page_size).tolist(), num_rows]
    pieces: list[Piece] = []
    pending = 0  # first row not yet in a piece
    for start, stop in pairwise(bounds):
        if stop - start < _MIN_RUN:
            continue
        if pending < start:
            pieces.append(_gathered(page_table, pending, start, page_size, device))
        pieces.append(Piece(stop - start, int(pages[start // page_size]) * page_size, None))
        pending = stop
    if pending < num_rows:
        pieces.append(_gathered(page_table, pending, num_rows, page_size, device))
    return pieces


def _gathered(
    page_table: np.ndarray, start: int, stop: int, page_size: int, device: torch.device | str
) -> Piece:
    slots = slots_of(page_table, start, stop, page_size)
    return Piece(stop - start, -1, torch.from_numpy(slots).to(device))
