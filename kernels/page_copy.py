"""Copy of KV rows inside a paged pool: the matched rows of a partial page into an own page."""

from __future__ import annotations

import torch


def page_copy(pool: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    """pool[dst[i]] = pool[src[i]], in place.

    pool [S, W] one layer's rows; src, dst int64 [N] slots. No slot may be in both src and dst, or
    twice in dst: the order of the copies is free.
    """
    assert src.dtype == dst.dtype == torch.int64, "slots are int64"
    assert src.shape == dst.shape, f"{tuple(src.shape)} rows to {tuple(dst.shape)} slots"
    pool.index_copy_(0, dst, pool.index_select(0, src))
