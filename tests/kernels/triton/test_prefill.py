"""Ragged prefill attention: small under Triton's interpreter, full size on a GPU."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from support.assert_close import assert_within_plain

from kernels.reference_attention import mha_varlen
from kernels.triton.prefill import mha_prefill

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALE = 0.11


def check(
    pairs: list[tuple[int, int]],
    *,
    heads: int,
    width: int,
    value: int,
    dtype: torch.dtype,
    causal: bool,
    blocks: tuple[int, int, int, int] | None = None,
) -> None:
    """`pairs`: (queries, keys) of each sequence. Rows that nobody owns are NaN."""
    cu_q = [0, *accumulate(p[0] for p in pairs)]
    cu_k = [0, *accumulate(p[1] for p in pairs)]
    q = torch.randn(cu_q[-1], heads, width + 8).to(DEVICE, dtype)[..., :width]
    k = torch.randn(heads, cu_k[-1] + 5, width).to(DEVICE, dtype)
    v = torch.randn(heads, cu_k[-1] + 5, value).to(DEVICE, dtype)
    k[:, cu_k[-1] :], v[:, cu_k[-1] :] = float("nan"), float("nan")
    out, lse = mha_prefill(
        q,
        k,
        v,
        torch.tensor(cu_q, dtype=torch.int32, device=DEVICE),
        torch.tensor(cu_k, dtype=torch.int32, device=DEVICE),
        max_q=max(p[0] for p in pairs),
        scale=SCALE,
        causal=causal,
        blocks=blocks,
    )
    assert out.shape == (cu_q[-1], heads, value)
    answers = [
        mha_varlen(
            q.to(kind),
            k.to(kind).transpose(0, 1),
            v.to(kind).transpose(0, 1),
            cu_q,
            cu_k,
            scale=SCALE,
            causal=causal,
        )
        for kind in (torch.float64, dtype)
    ]
    (exact, exact_lse), (plain, plain_lse) = answers
    assert_within_plain(out, plain, exact, atol=2e-6)
    assert_within_plain(lse, plain_lse, exact_lse, atol=1e-5)


RAGGED = {
    "new": [(17, 17), (1, 1), (32, 32)],
    "context": [(5, 40), (1, 33), (9, 9)],
    "no keys": [(3, 0), (20, 31)],
    "more queries": [(30, 7), (2, 2)],
    "no queries": [(0, 12), (4, 20)],
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", RAGGED.values(), ids=RAGGED)
def test_ragged(pairs: list[tuple[int, int]], causal: bool) -> None:
    check(
        pairs,
        heads=2,
        width=48,
        value=32,
        dtype=torch.float32,
        causal=causal,
        blocks=(16, 16, 4, 1),
    )


@pytest.mark.parametrize(("width", "value"), [(24, 20), (64, 64), (8, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_widths(width: int, value: int, dtype: torch.dtype) -> None:
    check(
        [(12, 20)],
        heads=2,
        width=width,
        value=value,
        dtype=dtype,
        causal=True,
        blocks=(16, 16, 4, 2),
    )


def test_no_queries_at_all() -> None:
    q, k = torch.zeros(0, 2, 16, device=DEVICE), torch.zeros(2, 4, 16, device=DEVICE)
    cu_q = torch.tensor([0, 0], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 4], dtype=torch.int32, device=DEVICE)
    out, lse = mha_prefill(q, k, k, cu_q, cu_k, max_q=0, scale=1.0, causal=True)
    assert out.shape == (0, 2, 16)
    assert lse.shape == (0, 2)


FULL = {
    "new": [(700, 700), (1, 1), (129, 129)],
    "context": [(100, 2000), (1, 333), (300, 300)],
    "mixed": [(3, 0), (200, 1301), (130, 70), (0, 64)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("pairs", FULL.values(), ids=FULL)
@pytest.mark.parametrize(("width", "value"), [(192, 128), (256, 256), (192, 192)])
def test_full_size(width: int, value: int, pairs: list[tuple[int, int]], causal: bool) -> None:
    check(pairs, heads=4, width=width, value=value, dtype=torch.bfloat16, causal=causal)


@pytest.mark.gpu
def test_full_size_fp32() -> None:
    check(FULL["context"], heads=2, width=192, value=128, dtype=torch.float32, causal=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "blocks", [(128, 128, 8, 2), (128, 64, 8, 2), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3)]
)
def test_every_block(blocks: tuple[int, int, int, int]) -> None:
    pairs = FULL["context"]
    check(pairs, heads=2, width=192, value=128, dtype=torch.bfloat16, causal=True, blocks=blocks)
