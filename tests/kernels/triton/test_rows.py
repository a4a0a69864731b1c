"""Row kernels (write, gather, copy, merge) against the torch functions of the same names."""

from __future__ import annotations

import pytest
import torch
from support.assert_close import assert_within_plain
from support.mqa_case import quantise

from kernels import reference_attention as reference
from kernels.rmsnorm import rms_norm
from kernels.rope import apply_rope
from kernels.triton.kv_gather import kv_gather, kv_gather_fp8
from kernels.triton.latent_write import norm_rope_write_
from kernels.triton.merge_lse import combine_lse, merge_lse_
from kernels.triton.page_copy import page_copy, pool_table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BIG = pytest.param(3000, 512, 64, 16, marks=pytest.mark.gpu, id="full")
SMALL = pytest.param(5, 40, 8, 3, id="small")
INF = float("inf")
FACTOR = 2.0 if DEVICE == "cuda" else 4.0  # the interpreter cuts fp32 to bf16, it does not round


def check_write(
    num: int, latent: int, rope: int, heads: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    wide = torch.randn(num, 24 + latent + rope).to(DEVICE, dtype)  # a fused projection
    kv = wide[:, 24:]
    q = torch.randn(num, heads, 16 + rope).to(DEVICE, dtype)
    q_pe = q[..., 16:]
    weight = torch.rand(latent).to(DEVICE, dtype)
    angle = torch.rand(num, rope // 2, device=DEVICE) * 6
    cos, sin = angle.cos(), angle.sin()
    pool = torch.randn(num + 9, latent + rope).to(DEVICE, stored)
    slots = torch.randperm(num + 9, device=DEVICE)[:num]
    before = wide.clone(), q.clone(), pool.clone()

    def answer(kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        latents = rms_norm(
            before[0][:, 24 : 24 + latent].cpu().to(kind), weight.cpu().to(kind), 1e-6
        )
        turns = cos.cpu(), sin.cpu()
        k_pe = apply_rope(before[0][:, 24 + latent :].cpu().to(kind), *turns)
        return torch.cat((latents, k_pe), dim=1), apply_rope(q_pe.cpu().to(kind), *turns)

    (exact, exact_q), (plain, plain_q) = answer(torch.float32), answer(dtype)
    norm_rope_write_(kv, q_pe, weight, 1e-6, cos, sin, pool, slots)
    bound = 2e-5 if dtype == stored == torch.float32 else 1e-3  # plain fp32 does not round
    assert_within_plain(kv.cpu(), plain.to(stored), exact, factor=FACTOR, atol=bound)
    assert_within_plain(q_pe.cpu(), plain_q, exact_q, factor=FACTOR, atol=2e-5)
    assert torch.equal(pool[slots].to(dtype), kv), "kv is not what the pool holds"
    rest = torch.ones(num + 9, dtype=torch.bool, device=DEVICE)
    rest[slots] = False
    assert torch.equal(pool[rest], before[2][rest])
    assert torch.equal(wide[:, :24], before[0][:, :24])
    assert torch.equal(q[..., :16], before[1][..., :16])


@pytest.mark.parametrize(("num", "latent", "rope", "heads"), [SMALL, BIG, (1, 32, 16, 40)])
@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
def test_write(
    num: int, latent: int, rope: int, heads: int, dtype: torch.dtype, stored: torch.dtype
) -> None:
    check_write(num, latent, rope, heads, dtype, stored)


@pytest.mark.gpu
def test_write_128_heads() -> None:
    check_write(700, 512, 64, 128, torch.bfloat16, torch.bfloat16)


def test_write_nothing() -> None:
    pool = torch.ones(3, 24, device=DEVICE)
    empty = torch.zeros(0, 24, device=DEVICE)
    angle = torch.zeros(0, 4, device=DEVICE)
    slots = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    weight = torch.ones(16, device=DEVICE)
    norm_rope_write_(empty, empty.view(0, 3, 8), weight, 1e-6, angle, angle, pool, slots)
    assert (pool == 1).all()


@pytest.mark.parametrize("num", [0, 1, 17, pytest.param(30_000, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("width", [24, 64, 576])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather(num: int, width: int, stored: torch.dtype, out_dtype: torch.dtype) -> None:
    pool = torch.randn(num + 40, width).bfloat16().to(DEVICE, stored)
    slots = torch.randint(0, num + 40, (num,), device=DEVICE)
    wide = torch.full((num, width + 8), 7.0, dtype=out_dtype, device=DEVICE)
    out = wide[:, :width]
    assert kv_gather(pool, slots, out) is out
    assert torch.equal(out, pool[slots].to(out_dtype))
    assert (wide[:, width:] == 7).all()


@pytest.mark.parametrize(
    ("num", "latent"), [(0, 128), (17, 256), pytest.param(9000, 512, marks=pytest.mark.gpu)]
)
def test_gather_of_fp8_rows(num: int, latent: int) -> None:
    stored, said = quantise(torch.randn(num + 40, latent + 64).to(DEVICE), latent)
    slots = torch.randint(0, num + 40, (num,), device=DEVICE)
    out = torch.full((num, latent + 64), 7.0, device=DEVICE)
    assert kv_gather_fp8(stored, slots, out) is out
    torch.testing.assert_close(out, said[slots], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num", [0, 1, 13])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_copy_in_all_layers(num: int, dtype: torch.dtype) -> None:
    pools = [torch.randn(63, 24).to(DEVICE, dtype) for _ in range(3)]
    slots = torch.randperm(63, device=DEVICE)
    src, dst = slots[:num].contiguous(), slots[num : 2 * num].contiguous()
    want = [reference.page_copy(pool, src, dst) for pool in pools]
    table = pool_table(pools)
    page_copy(pools, src, dst, table=table)
    assert all(torch.equal(*pair) for pair in zip(pools, want, strict=True))
    page_copy(pools[0], dst, src)
    assert torch.equal(pools[0], reference.page_copy(want[0], dst, src))


def partial(
    num: int, heads: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num, heads, width).to(DEVICE, dtype), torch.randn(num, heads, device=DEVICE)


SHAPES = [(1, 3, 20), (33, 2, 128), pytest.param(3001, 16, 128, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num", "heads", "width"), SHAPES)
def test_merge(num: int, heads: int, width: int, dtype: torch.dtype) -> None:
    (o_a, lse_a), (o_b, lse_b) = (partial(num, heads, width, dtype) for _ in range(2))
    exact, lse = reference.merge_lse(*(x.double() for x in (o_a, lse_a, o_b, lse_b)))
    merge_lse_(o_a, lse_a, o_b, lse_b)
    assert_within_plain(o_a, exact.to(dtype), exact, factor=FACTOR)
    torch.testing.assert_close(lse_a, lse.float())


@pytest.mark.parametrize("behind", [0.0, float("nan"), INF])
@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_empty_side_is_selected_away(side: str, behind: float) -> None:
    (o_a, lse_a), (o_b, lse_b) = (partial(7, 3, 20) for _ in range(2))
    for name, o, lse in (("a", o_a, lse_a), ("b", o_b, lse_b)):
        if side in (name, "both"):
            o[2:5], lse[2:5] = behind, -INF
    kept, kept_lse = (o_b, lse_b) if side == "a" else (o_a, lse_a)
    if side == "both":
        kept, kept_lse = torch.zeros_like(o_a), torch.full_like(lse_a, -INF)
    want, want_lse = kept[2:5].clone(), kept_lse[2:5].clone()
    stacked = combine_lse(torch.stack((o_a, o_b)), torch.stack((lse_a, lse_b)))
    merge_lse_(o_a, lse_a, o_b, lse_b)
    for out, lse in ((o_a, lse_a), stacked):
        torch.testing.assert_close(out[2:5], want)
        torch.testing.assert_close(lse[2:5], want_lse)
        assert torch.isfinite(out).all()


def test_merge_of_strided_sides() -> None:
    (o_a, lse_a), (o_b, lse_b) = (partial(33, 3, 20) for _ in range(2))
    exact, lse = reference.merge_lse(o_a, lse_a, o_b, lse_b)
    padded = torch.full((33, 3, 32), float("nan"), device=DEVICE)
    padded[..., :20] = o_a
    heads_first = o_b.transpose(0, 1).contiguous().transpose(0, 1)
    lse_columns = torch.stack((lse_a, torch.full_like(lse_a, INF)), dim=-1)[..., 0]
    merge_lse_(padded[..., :20], lse_columns, heads_first, lse_b.t().contiguous().t())
    torch.testing.assert_close(padded[..., :20], exact)
    torch.testing.assert_close(lse_columns, lse)
    assert padded[..., 20:].isnan().all(), "wrote outside its view"


def test_extreme_lse_does_not_overflow() -> None:
    o_a, o_b = torch.ones(1, 1, 4, device=DEVICE), torch.full((1, 1, 4), 3.0, device=DEVICE)
    lse_a, lse_b = (torch.full((1, 1), x, device=DEVICE) for x in (3e4, -3e4))
    merge_lse_(o_a, lse_a, o_b, lse_b)
    assert (o_a == 1).all()
    assert lse_a.item() == 3e4


def test_merge_of_no_rows() -> None:
    (o_a, lse_a), (o_b, lse_b) = (partial(0, 3, 20) for _ in range(2))
    merge_lse_(o_a, lse_a, o_b, lse_b)
    assert combine_lse(o_a[None], lse_a[None])[0].shape == (0, 3, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("parts", [1, 2, 4, 5])
def test_combine(parts: int, dtype: torch.dtype) -> None:
    o = torch.randn(parts, 9, 3, 20).to(DEVICE, dtype)
    lse = torch.randn(parts, 9, 3, device=DEVICE) * 5
    lse[0, 4] = -INF
    exact, exact_lse = reference.combine_lse(o.double(), lse.double())
    out, out_lse = combine_lse(o, lse)
    assert out.dtype == dtype
    assert_within_plain(out, exact.to(dtype), exact, factor=FACTOR)
    torch.testing.assert_close(out_lse, exact_lse.float())
