"""The model's kernels against their oracles, and the routing entries of peer-bugs.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference_model as oracle
from kernels.fp8 import dequantize_blocks
from kernels.moe import run_experts
from kernels.moe_gate import choose_experts
from kernels.rmsnorm import rms_norm
from kernels.rope import apply_rope
from kernels.silu_mul import silu_mul


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def by_id(weights: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, order = ids.sort(dim=-1)
    return weights.gather(1, order), ids


@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (5, 64), (3, 4, 8), (7, 2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    angle = torch.randn(shape[0], shape[-1] // 2)
    got = apply_rope(x, angle.cos(), angle.sin())
    assert got.is_contiguous()
    assert got.dtype == dtype
    torch.testing.assert_close(got, oracle.apply_rope(x, angle.cos(), angle.sin()))


def test_rope_of_a_strided_slice_leaves_the_input_alone() -> None:
    wide = torch.randn(6, 4, 192)
    before = wide.clone()
    angle = torch.randn(6, 32)
    got = apply_rope(wide[..., 128:], angle.cos(), angle.sin())
    torch.testing.assert_close(
        got, oracle.apply_rope(before[..., 128:].contiguous(), angle.cos(), angle.sin())
    )
    assert torch.equal(wide, before)


@pytest.mark.parametrize("shape", [(0, 8), (8,), (1, 384), (1, 1, 8), (5, 34), (2, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-20, 1e-4, 1.0, 1e4])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> None:
    x = (torch.randn(shape) * scale).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    before = x.clone()
    got = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(got, oracle.rms_norm(x, weight, 1e-6))
    assert torch.equal(x, before)


@pytest.mark.parametrize("rows", [1, 4])
def test_rms_norm_of_a_strided_slice(rows: int) -> None:
    x = torch.randn(rows, 576)[:, :512]
    weight = torch.randn(512)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), oracle.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 3])
def test_rms_norm_passes_damage_on(value: float, rows: int) -> None:
    x = torch.randn(rows, 16)
    x[0, 3] = value
    got = rms_norm(x, torch.ones(16), 1e-6)
    assert not bool(got[0].isfinite().all())
    assert bool(got[1:].isfinite().all())


@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 34), (2, 3, 6)])
def test_silu_mul(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * 4
    torch.testing.assert_close(silu_mul(x), oracle.silu_mul(x))


GATES: list[dict[str, Any]] = [
    {"scoring": "softmax"},
    {"scoring": "sigmoid"},
    {"scoring": "softmax", "n_group": 4, "topk_group": 2},
    {"scoring": "sigmoid", "n_group": 4, "topk_group": 1, "group_score": "top2_sum"},
    {"scoring": "sigmoid", "n_group": 12, "topk_group": 5, "group_score": "top2_sum"},
    {"scoring": "sigmoid", "n_group": 1, "topk_group": 1, "group_score": "top2_sum"},
]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_gate(gate: dict[str, Any], with_bias: bool, renormalize: bool) -> None:
    logits = torch.randn(40, 12) * 2
    # Negative biases make every biased score negative: 0 is then no mask.
    bias = torch.randn(12) - 3.0 if with_bias else None
    words = gate | {"top_k": 3, "renormalize": renormalize, "scale": 2.5, "bias": bias}
    got, want = by_id(*choose_experts(logits, **words)), oracle.choose_experts(logits, **words)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got[0], want[0])


def test_masked_groups_lose_against_negative_scores() -> None:
    bias = torch.full((8,), -5.0)
    _, ids = choose_experts(
        torch.zeros(1, 8) + torch.arange(8) * 0.1,
        top_k=4,
        scoring="sigmoid",
        bias=bias,
        n_group=2,
        topk_group=1,
        group_score="top2_sum",
        renormalize=True,
        scale=1.0,
    )
    assert sorted(ids[0].tolist()) == [4, 5, 6, 7]


def test_m11_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 100.0, 100.0])  # turns the choice over
    weights, ids = choose_experts(
        logits, top_k=2, scoring="sigmoid", bias=bias, renormalize=True, scale=2.5
    )
    assert sorted(ids[0].tolist()) == [2, 3]
    scores = logits.sigmoid()[0, ids[0]]
    torch.testing.assert_close(weights[0], scores / scores.sum() * 2.5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_m13_scaling_is_independent_of_normalisation(renormalize: bool, scale: float) -> None:
    logits = torch.randn(5, 8)
    weights, ids = choose_experts(
        logits, top_k=2, scoring="softmax", renormalize=renormalize, scale=scale
    )
    scores = logits.softmax(-1).gather(1, ids)
    want = scores / scores.sum(-1, keepdim=True) if renormalize else scores
    torch.testing.assert_close(weights, want * scale)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 17, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(num_tokens: int, dtype: torch.dtype) -> None:
    matrices = (torch.randn(6, 10, 10) / 4).to(dtype)
    x = torch.randn(num_tokens, 10).to(dtype)
    ids = torch.stack([torch.randperm(5)[:3] for _ in range(num_tokens)])  # expert 5: never hit
    weights = torch.rand(num_tokens, 3)
    calls: list[int] = []

    def mlp(expert: int, rows: torch.Tensor) -> torch.Tensor:
        calls.append(expert)
        return rows @ matrices[expert]

    got = run_experts(x, ids, weights, num_experts=6, mlp=mlp)
    hit = sorted(set(ids.flatten().tolist()))
    assert calls == hit  # once each, in order, and never for nothing
    want = oracle.run_experts(x, ids, weights, num_experts=6, mlp=lambda e, r: r @ matrices[e])
    tolerance = (
        {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, **tolerance)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    matrices = torch.randn(4, 16, 16)
    x = torch.randn(64, 16)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(64)])
    weights = torch.rand(64, 2)

    def run(part: slice) -> torch.Tensor:
        return run_experts(
            x[part],
            ids[part],
            weights[part],
            num_experts=4,
            mlp=lambda e, rows: (rows[:, None, :] * matrices[e]).sum(-1),
        )

    full = run(slice(None))
    torch.testing.assert_close(run(slice(5, 6)), full[5:6], rtol=1e-6, atol=1e-6)
    assert torch.equal(run(slice(5, 9)), full[5:9])


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (129, 127), (300, 260), (64, 512)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_with_ragged_ends(shape: tuple[int, int], scale_dtype: torch.dtype) -> None:
    codes = (torch.randn(shape) * 100).to(torch.float8_e4m3fn)
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.rand(blocks).to(scale_dtype)
    got = dequantize_blocks(codes, scale, block=128)
    assert got.dtype == torch.float32
    assert torch.equal(got, oracle.dequantize_blocks(codes, scale, block=128))
