"""Copy of KV rows inside paged pools: the matched rows of a partial page into an own page."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pool_table(pools: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `page_copy` wants to know of its pools on a GPU (their addresses); made once."""
    if not pools[0].is_cuda:
        return None
    from kernels.triton import page_copy as gpu  # Triton is imported where there is a GPU only

    return gpu.pool_table(pools)


def page_copy(
    pools: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
) -> None:
    """pool[dst[i]] = pool[src[i]] in every pool, in place; one launch on a GPU.

    pools: one layer's rows [S, W], or those of all layers, with their `pool_table`; src, dst int64
    [N] slots. No slot may be in both src and dst, or twice in dst: the order of the copies is free.
    """
    assert src.dtype == dst.dtype == torch.int64, "slots are int64"
    assert src.shape == dst.shape, f"{tuple(src.shape)} rows to {tuple(dst.shape)} slots"
    layers = [pools] if isinstance(pools, torch.Tensor) else pools
    if layers[0].is_cuda:
        from kernels.triton import page_copy as gpu

        gpu.page_copy(layers, src, dst, table=table)
        return
    for pool in layers:
        pool.index_copy_(0, dst, pool.index_select(0, src))
