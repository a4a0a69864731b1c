from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from radix_mla.cache.kv_layout import KVLayout
from radix_mla.cache.kv_pool import KVPool, slots_of
from radix_mla.errors import ConfigError


class Copy(NamedTuple):
    src_page: int
    dst_page: int
    num_rows: int


def make_pool(page_size: int = 4, kv_dtype: str = "fp32") -> KVPool:
    """Two layers of 6 pages; every row of every layer differs."""
    pool = KVPool(KVLayout.of(kv_dtype, latent=6, rope=2), 2, 6, page_size)
    for index in range(2):
        buffer = pool.layer(index)
        values = torch.arange(buffer.numel()).view(buffer.shape) % 251 + 1000 * index
        buffer.copy_(values)
    return pool


def test_row_bytes_are_those_of_the_latent_row_only() -> None:
    """M15: V3 in bf16 takes 61 · 576 · 2 bytes a token."""
    layout = KVLayout.of("bf16", latent=512, rope=64)
    assert (layout.row_bytes, KVLayout.of("fp32", latent=512, rope=64).row_bytes) == (1152, 2304)
    pool = KVPool(layout, 61, 2, 1)
    assert pool.token_bytes == 70_272
    assert pool.num_bytes == 3 * 70_272


def test_unknown_dtype() -> None:
    with pytest.raises(ConfigError, match="fp8_e4m3"):
        KVLayout.of("fp8_e4m3", latent=512, rope=64)


def test_rows_as_stored() -> None:
    rows = torch.randn(5, 8)
    exact, rounding = (KVLayout.of(name, latent=6, rope=2) for name in ("fp32", "bf16"))
    assert exact.as_stored(rows) is rows
    stored = rounding.as_stored(rows)
    assert stored.dtype == torch.float32
    assert torch.equal(stored, rows.bfloat16().float())
    assert not torch.equal(stored, rows)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
def test_what_is_written_is_read_as_stored(kv_dtype: str) -> None:
    pool = make_pool(kv_dtype=kv_dtype)
    rows, slots = torch.randn(5, 8), torch.tensor([21, 3, 0, 7, 8])
    pool.write(1, slots, rows)
    read = pool.gather(1, slots, torch.empty(5, 8))
    assert torch.equal(read, pool.layout.as_stored(rows))
    assert torch.equal(pool.layer(0), make_pool(kv_dtype=kv_dtype).layer(0))


@pytest.mark.parametrize("num_rows", [1, 33, 63, 64])
def test_a_copy_stays_inside_its_page(num_rows: int) -> None:
    """M15: guard rows around."""
    pool, before = make_pool(64), make_pool(64)
    pool.copy([Copy(4, 1, num_rows)])
    for index in range(2):
        want = before.layer(index).clone()
        want[64 : 64 + num_rows] = want[256 : 256 + num_rows]
        assert torch.equal(pool.layer(index), want)


def test_copies_run_in_order() -> None:
    """A page that was copied to may be the source of the next copy, or be written again."""
    pool, before = make_pool(), make_pool()
    copies = [Copy(0, 1, 3), Copy(1, 2, 4), Copy(5, 1, 2), Copy(3, 4, 1), Copy(0, 5, 4)]
    pool.copy(copies)
    for index in range(2):
        want = before.layer(index).clone()
        for src, dst, rows in copies:
            want[dst * 4 : dst * 4 + rows] = want[src * 4 : src * 4 + rows].clone()
        assert torch.equal(pool.layer(index), want)


def test_no_copies() -> None:
    pool = make_pool()
    pool.copy([])
    assert torch.equal(pool.layer(0), make_pool().layer(0))


def test_the_dummy_page_is_past_the_ids_of_the_cache() -> None:
    pool = make_pool()
    assert pool.dummy_page == pool.num_pages == 6
    assert len(pool.layer(0)) == 7 * 4


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots(page_size: int) -> None:
    table = np.random.default_rng(0).permutation(64).astype(np.int32)
    want = [int(table[r // page_size]) * page_size + r % page_size for r in range(60)]
    for start, stop in [(0, 60), (0, 0), (5, 5), (3, 17), (16, 32), (15, 49)]:
        slots = slots_of(table, start, stop, page_size)
        assert slots.dtype == np.int64
        assert slots.tolist() == want[start:stop]


def test_slots_do_not_overflow() -> None:
    table = np.array([1 << 30], dtype=np.int32)
    assert slots_of(table, 0, 1, 64).tolist() == [(1 << 30) * 64]
