from __future__ import annotations

import pytest
import torch

from kernels import reference_attention as reference
from kernels.kv_gather import kv_gather
from kernels.latent_write import latent_write
from kernels.page_copy import page_copy

SLOTS = torch.randperm(63, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("num", [0, 1, 17, 60])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather(num: int, stored: torch.dtype, out_dtype: torch.dtype) -> None:
    pool = torch.randn(63, 24).to(stored)
    out = torch.full((num, 24), float("nan"), dtype=out_dtype)
    assert kv_gather(pool, SLOTS[:num], out) is out
    assert torch.equal(out, reference.kv_gather(pool, SLOTS[:num]).to(out_dtype))


def test_gather_repeats_and_strided_out() -> None:
    pool = torch.randn(8, 6)
    wide = torch.zeros(5, 9)
    slots = torch.tensor([3, 3, 0, 7, 3])
    kv_gather(pool, slots, wide[:, :6])
    assert torch.equal(wide[:, :6], pool[slots])
    assert (wide[:, 6:] == 0).all()


@pytest.mark.parametrize("num", [0, 1, 17, 60])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_write_rounds_to_the_pool_and_leaves_other_rows(num: int, stored: torch.dtype) -> None:
    pool = torch.randn(63, 24).to(stored)
    rows = torch.randn(num, 30)[:, :24]
    want = reference.latent_write(pool, SLOTS[:num], rows)
    latent_write(pool, SLOTS[:num], rows)
    assert torch.equal(pool, want)


def test_copy() -> None:
    pool = torch.randn(63, 24)
    src, dst = SLOTS[:20], SLOTS[20:40]
    want = reference.page_copy(pool, src, dst)
    page_copy(pool, src, dst)
    assert torch.equal(pool, want)


def test_slots_must_be_int64() -> None:
    pool, slots = torch.zeros(4, 2), torch.tensor([1], dtype=torch.int32)
    with pytest.raises(AssertionError, match="int64"):
        kv_gather(pool, slots, torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="int64"):
        latent_write(pool, slots, torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="int64"):
        page_copy(pool, slots, slots)
