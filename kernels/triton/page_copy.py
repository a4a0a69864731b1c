"""Copy of KV rows inside the paged pools of all layers, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 8


def pool_table(pools: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [layers] on the pools' device: their addresses. Make it once, it costs a copy."""
    first = pools[0]
    layout = first.shape, first.stride(), first.dtype
    assert first.stride(1) == 1, "rows have unit stride"
    for pool in pools:
        assert (pool.shape, pool.stride(), pool.dtype) == layout, "pools differ"
        assert pool.data_ptr() % 16 == 0, "a pool is not aligned to 16 bytes"
    addresses = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64)
    return addresses.to(first.device)


def page_copy(
    pools: torch.Tensor | Sequence[torch.Tensor],
    src: torch.Tensor,
    dst: torch.Tensor,
    *,
    table: torch.Tensor | None = None,
) -> None:
    """pool[dst[i]] = pool[src[i]] in every pool, in place.

    pools: one [S, W], or the layers' of equal shape and strides, with `table` = pool_table(pools).
    src, dst int64 [N] slots: none in both, none twice in dst (the order of the copies is free).
    """
    layers = [pools] if isinstance(pools, torch.Tensor) else pools
    assert src.dtype == dst.dtype == torch.int64, "slots are int64"
    assert src.shape == dst.shape, f"{tuple(src.shape)} rows to {tuple(dst.shape)} slots"
    assert src.stride(0) == dst.stride(0) == 1 or src.shape[0] <= 1
    if src.shape[0] == 0:
        return
    like = layers[0]
    table = pool_table(layers) if table is None else table
    assert table.shape == (len(layers),), f"a table of {tuple(table.shape)} for {len(layers)} pools"
    width = like.shape[1]
    _page_copy[(triton.cdiv(src.shape[0], _ROWS), len(layers))](
        like,
        table,
        src,
        dst,
        src.shape[0],
        like.stride(0),
        WIDTH=width,
        BLOCK=_column_block(width),
        ROWS=_ROWS,
        ALIGNED=like.stride(0) * like.element_size() % 16 == 0,
        num_warps=4,
    )


def _column_block(width: int) -> int:
    """Columns a load: what divides the width without a rest, if that is wide enough (576: 64)."""
    exact = min(width & -width, 512)
    return exact if exact >= 64 else triton.next_power_of_2(min(width, 512))


@triton.jit
def _page_copy(
    like,
    table,
    src,
    dst,
    num_rows,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """`like` gives the pointer type only."""
    pool = tl.load(table + tl.program_id(1)).to(like.dtype)
    if ALIGNED:
        pool = tl.multiple_of(pool, 16)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    source = pool + tl.load(src + row, mask=there, other=0)[:, None] * stride
    target = pool + tl.load(dst + row, mask=there, other=0)[:, None] * stride
    for first in tl.static_range(0, WIDTH, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = there[:, None] & (col < WIDTH)[None, :]
        tl.store(target + col[None, :], tl.load(source + col[None, :], mask=mask), mask=mask)
