from __future__ import annotations

import pytest
import torch
from support.assert_close import assert_within_plain

from kernels import reference_attention as reference
from kernels.merge_lse import combine_lse, merge_lse_

INF = float("inf")


def partial(num: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(num, 3, 20).to(dtype), torch.randn(num, 3) * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num", [1, 63, 500])
def test_merge_matches_the_oracle(num: int, dtype: torch.dtype) -> None:
    (o_a, lse_a), (o_b, lse_b) = partial(num, dtype), partial(num, dtype)
    exact, lse = reference.merge_lse(o_a.double(), lse_a.double(), o_b.double(), lse_b.double())
    merge_lse_(o_a, lse_a, o_b, lse_b)
    assert_within_plain(o_a, exact.to(dtype), exact)
    torch.testing.assert_close(lse_a, lse.float())


def test_merged_lse_serves_the_next_merge() -> None:
    parts = [partial(60) for _ in range(4)]
    o, lse = parts[0][0].clone(), parts[0][1].clone()
    for o_next, lse_next in parts[1:]:
        merge_lse_(o, lse, o_next, lse_next)
    stacked = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    exact, exact_lse = reference.combine_lse(stacked[0].double(), stacked[1].double())
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(lse, exact_lse.float())
    o, lse = combine_lse(*stacked)
    torch.testing.assert_close(o, exact.float())
    torch.testing.assert_close(lse, exact_lse.float())


@pytest.mark.parametrize("behind", [0.0, float("nan"), INF])
@pytest.mark.parametrize("side", ["a", "b", "both"])
def test_m01_empty_side_is_selected_away(side: str, behind: float) -> None:
    (o_a, lse_a), (o_b, lse_b) = partial(7), partial(7)
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
        assert torch.equal(out[2:5], want)
        torch.testing.assert_close(lse[2:5], want_lse)
        assert torch.isfinite(out).all()


def test_each_input_has_its_own_strides() -> None:
    (o_a, lse_a), (o_b, lse_b) = partial(33), partial(33)
    exact, lse = reference.merge_lse(o_a, lse_a, o_b, lse_b)
    padded = torch.full((33, 3, 32), float("nan"))
    padded[..., :20] = o_a
    heads_first = o_b.transpose(0, 1).contiguous().transpose(0, 1)
    lse_columns = torch.stack((lse_a, torch.full_like(lse_a, INF)), dim=-1)[..., 0]
    merge_lse_(padded[..., :20], lse_columns, heads_first, lse_b.t().contiguous().t())
    torch.testing.assert_close(padded[..., :20], exact)
    torch.testing.assert_close(lse_columns, lse)
    assert padded[..., 20:].isnan().all(), "wrote outside its view"


def test_rows_outside_the_merged_range_stay() -> None:
    (o, lse), (o_b, lse_b) = partial(10), partial(4)
    before, before_lse = o.clone(), lse.clone()
    merge_lse_(o[3:7], lse[3:7], o_b, lse_b)
    for rows in (slice(0, 3), slice(7, 10)):
        assert torch.equal(o[rows], before[rows])
        assert torch.equal(lse[rows], before_lse[rows])
    assert not torch.equal(o[3:7], before[3:7])


def test_extreme_lse_does_not_overflow() -> None:
    o_a, o_b = torch.ones(1, 1, 4), torch.full((1, 1, 4), 3.0)
    lse_a, lse_b = torch.tensor([[3e4]]), torch.tensor([[-3e4]])
    merge_lse_(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o_a, torch.ones(1, 1, 4))
    assert lse_a.item() == 3e4


def test_zero_rows() -> None:
    o, lse = partial(0)
    merge_lse_(o, lse, *partial(0))
    assert o.shape == (0, 3, 20)
