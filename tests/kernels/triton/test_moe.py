"""Gate, sort and experts against their oracles; small under the interpreter, real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.assert_close import assert_within_plain

from kernels import reference_model as oracle
from kernels.fp8 import dequantize_blocks
from kernels.moe_align import align as align_reference
from kernels.triton import grouped_gemm, moe, moe_align, moe_gate
from kernels.triton.fp8_gemm import quantize_groups
from kernels.triton.gemv import Lanes
from kernels.triton.grouped_gemm import Shape
from kernels.triton.moe_shapes import Direct, Sorted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter cuts fp32 off to bf16 where the GPU rounds: twice the error.
FACTOR = 2.0 if DEVICE == "cuda" else 4.0

GATES: list[dict[str, Any]] = [
    {"scoring": "softmax"},
    {"scoring": "sigmoid"},
    {"scoring": "softmax", "n_group": 4, "topk_group": 2},
    {"scoring": "sigmoid", "n_group": 4, "topk_group": 1, "group_score": "top2_sum"},
    {"scoring": "sigmoid", "n_group": 12, "topk_group": 5, "group_score": "top2_sum"},
    {"scoring": "sigmoid", "n_group": 1, "topk_group": 1, "group_score": "top2_sum"},
]


def check(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, atol: float = 1e-6) -> None:
    assert_within_plain(got, plain, exact, factor=FACTOR, atol=atol)


def check_gate(logits: torch.Tensor, bias: torch.Tensor | None, **words: Any) -> None:
    got = moe_gate.choose_experts(logits, bias=bias, **words)
    cpu_bias = None if bias is None else bias.cpu()
    want = oracle.choose_experts(logits.cpu(), bias=cpu_bias, **words)
    ids, order = got[1].cpu().long().sort(dim=-1)
    assert got[1].dtype == torch.int32
    assert torch.equal(ids, want[1])
    torch.testing.assert_close(got[0].cpu().gather(1, order), want[0])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("with_bias", "renormalize"), [(False, False), (True, True)])
def test_gate(gate: dict[str, Any], with_bias: bool, renormalize: bool) -> None:
    logits = torch.randn(6, 12, device=DEVICE) * 2
    # Negative biases make every biased score negative: 0 is then no mask.
    bias = torch.randn(12, device=DEVICE) - 3.0 if with_bias else None
    check_gate(logits, bias, **gate, top_k=3, renormalize=renormalize, scale=2.5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "gate"),
    [
        (64, {"scoring": "softmax", "top_k": 6}),
        (160, {"scoring": "softmax", "n_group": 8, "topk_group": 3, "top_k": 6}),
        (
            256,
            {
                "scoring": "sigmoid",
                "n_group": 8,
                "topk_group": 4,
                "group_score": "top2_sum",
                "top_k": 8,
            },
        ),
        (384, {"scoring": "sigmoid", "top_k": 8}),
    ],
)
def test_gate_of_real_sizes(experts: int, gate: dict[str, Any]) -> None:
    bias = torch.randn(experts, device=DEVICE) * 0.1 if gate["scoring"] == "sigmoid" else None
    check_gate(torch.randn(300, experts, device=DEVICE), bias, **gate, renormalize=True, scale=2.5)


def test_equal_scores_choose_the_lowest_ids_and_shared_experts_follow() -> None:
    weights, ids = moe_gate.choose_experts(
        torch.zeros(2, 12, device=DEVICE),
        top_k=3,
        scoring="softmax",
        renormalize=True,
        scale=3.0,
        num_shared=2,
    )
    assert ids.tolist() == [[0, 1, 2, 12, 13]] * 2
    torch.testing.assert_close(weights.cpu(), torch.ones(2, 5))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_of_nan_choose_valid_ids() -> None:
    logits = torch.randn(3, 8, device=DEVICE)
    logits[1] = float("nan")
    for words in GATES[:3]:
        weights, ids = moe_gate.choose_experts(
            logits, **words, top_k=2, renormalize=True, scale=1.0
        )
        assert bool(((ids >= 0) & (ids < 8)).all())
        assert len(set(ids[1].tolist())) == 2
        assert weights.isnan().any(dim=1).tolist() == [False, True, False]


def check_align(ids: torch.Tensor, experts: int, block_m: int) -> None:
    got = moe_align.align(ids, experts, block_m)
    pairs, expert, count = align_reference(ids.cpu(), experts, block_m)
    tiles = int(count)
    assert got.num_tiles.tolist() == [tiles]
    assert tiles <= len(got.expert) == len(got.pairs) // block_m
    assert torch.equal(got.expert[:tiles].cpu(), expert)
    assert torch.equal(got.pairs[: tiles * block_m].cpu(), pairs)


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block_m"),
    [
        (0, 2, 4, 16),
        (1, 1, 1, 16),
        (3, 2, 5, 16),
        (40, 3, 8, 16),
        (150, 4, 33, 64),
        (700, 3, 6, 16),
    ],
)
def test_align(tokens: int, top_k: int, experts: int, block_m: int) -> None:
    ids = torch.randint(0, experts, (tokens, top_k), dtype=torch.int32, device=DEVICE)
    check_align(ids, experts, block_m)


def test_align_when_all_tokens_choose_one_expert() -> None:
    check_align(torch.full((300, 1), 3, dtype=torch.int32, device=DEVICE), 5, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 300, 2048, 8000])
@pytest.mark.parametrize(("experts", "top_k"), [(66, 8), (257, 9)])
@pytest.mark.parametrize("block_m", [16, 128])
def test_align_of_real_sizes(tokens: int, experts: int, top_k: int, block_m: int) -> None:
    ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices.int()
    check_align(ids, experts, block_m)


def make_choice(tokens: int, top_k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.rand(tokens, experts, device=DEVICE)
    return scores.topk(top_k).indices.int(), torch.rand(tokens, top_k, device=DEVICE)


def experts_exact(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The sum over experts in `dtype`; fp64 is the oracle, bf16 what plain torch gives."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].to(dtype) @ gate_up[expert].to(dtype).T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ down[expert].to(dtype).T
        total.index_add_(0, token, rows.double() * weights[token, choice, None].double())
    return total


def check_experts(
    tokens: int, top_k: int, experts: int, inner: int, hidden: int,
    dtype: torch.dtype, plan: Direct | Sorted | None,
) -> None:  # fmt: skip
    x = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=DEVICE) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device=DEVICE) * inner**-0.5).to(dtype)
    ids, weights = make_choice(tokens, top_k, experts)
    start = torch.randn(tokens, hidden, device=DEVICE).to(dtype)
    out = start.clone()
    moe.run_experts_(out, x, gate_up, down, ids, weights, plan=plan)
    exact = experts_exact(x, gate_up, down, ids, weights, torch.float64) + start.double()
    plain = (experts_exact(x, gate_up, down, ids, weights, dtype) + start.double()).to(dtype)
    check(out, plain, exact, atol=1e-5)


PLANS = [
    None,
    Direct(Lanes(16, 64, 1), Lanes(32, 32, 1)),
    Sorted(16, Shape(16, 16, 4, 2), Shape(16, 16, 4, 2)),
    Sorted(16, Shape(32, 16, 4, 2, swap=True), Shape(16, 16, 4, 2, group_m=1)),
]


@pytest.mark.parametrize(
    ("plan", "tokens"),
    [(plan, n) for plan in PLANS for n in (1, 3, 21) if n < 21 or isinstance(plan, Sorted)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts(plan: Direct | Sorted | None, tokens: int, dtype: torch.dtype) -> None:
    check_experts(tokens, 2, 4, 48, 80, dtype, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 64, 256, 512, 2048])
def test_experts_of_v2_lite(tokens: int) -> None:
    check_experts(tokens, 8, 66, 1408, 2048, torch.bfloat16, None)


def test_no_tokens() -> None:
    out = torch.zeros(0, 16, device=DEVICE)
    gate_up, down = torch.zeros(2, 32, 16, device=DEVICE), torch.zeros(2, 16, 16, device=DEVICE)
    ids = torch.zeros(0, 2, dtype=torch.int32, device=DEVICE)
    moe.run_experts_(out, out, gate_up, down, ids, torch.zeros(0, 2, device=DEVICE))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_damage_stays_with_its_token() -> None:
    """Rows beside a NaN in a tile, and padding rows, which read token 0, are not touched."""
    x = torch.randn(5, 32, device=DEVICE)
    x[0] = float("nan")
    gate_up, down = torch.randn(3, 32, 32, device=DEVICE), torch.randn(3, 32, 16, device=DEVICE)
    ids, weights = make_choice(5, 2, 3)
    for plan in PLANS:
        out = torch.zeros(5, 32, device=DEVICE)
        moe.run_experts_(out, x, gate_up, down, ids, weights, plan=plan)
        assert out.isfinite().all(dim=1).tolist() == [False, True, True, True, True]


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    x = torch.randn(30, 32, device=DEVICE)
    gate_up, down = torch.randn(4, 64, 32, device=DEVICE), torch.randn(4, 32, 32, device=DEVICE)
    ids, weights = make_choice(30, 2, 4)

    def run(part: slice) -> torch.Tensor:
        rows = x[part]
        out = torch.zeros_like(rows)
        moe.run_experts_(
            out, rows, gate_up, down, ids[part].contiguous(), weights[part].contiguous(),
            plan=PLANS[2],
        )  # fmt: skip
        return out

    assert torch.equal(run(slice(5, 9)), run(slice(None))[5:9])


def make_fp8(experts: int, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3, scales, the same dense in fp64)."""
    codes = torch.empty(experts, rows, cols, dtype=torch.float8_e4m3fn, device=DEVICE)
    for matrix in codes:
        matrix.copy_((torch.randn(rows, cols, device=DEVICE) * 60).clamp(-448, 448))
    scales = torch.rand(experts, rows // 128, cols // 128, device=DEVICE) + 0.5
    scales *= cols**-0.5 / 60
    pairs = zip(codes, scales, strict=True)
    dense = torch.stack([dequantize_blocks(c, s, block=128) for c, s in pairs])
    return codes, scales, dense


def check_fp8_experts(
    tokens: int, top_k: int, experts: int, inner: int, hidden: int, plan: Direct | Sorted | None
) -> None:
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    gate_up, gate_up_scale, dense_gate_up = make_fp8(experts, 2 * inner, hidden)
    down, down_scale, dense_down = make_fp8(experts, hidden, inner)
    ids, weights = make_choice(tokens, top_k, experts)
    out = torch.zeros_like(x)
    moe.run_experts_(
        out, x, gate_up, down, ids, weights,
        scale_gate_up=gate_up_scale, scale_down=down_scale, plan=plan,
    )  # fmt: skip
    exact = experts_exact(x, dense_gate_up, dense_down, ids, weights, torch.float64)
    plain = torch.zeros_like(exact)  # rows rounded to e4m3 before either product
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (rounded(x[token]) @ dense_gate_up[expert].double().T).chunk(2, dim=1)
        h = (torch.nn.functional.silu(gate) * up).bfloat16()
        rows = rounded(h) @ dense_down[expert].double().T
        plain.index_add_(0, token, rows * weights[token, choice, None].double())
    check(out, plain.bfloat16(), exact)


def rounded(x: torch.Tensor) -> torch.Tensor:
    codes, scales = quantize_groups(x)
    return codes.double() * scales.double().repeat_interleave(128, dim=1)


FP8_PLANS = [
    None,
    Direct(Lanes(32, 128, 1), Lanes(64, 64, 1)),
    Sorted(16, Shape(128, 128, 4, 2), Shape(128, 128, 4, 2, swap=True)),
    Sorted(16, Shape(64, 128, 4, 2, swap=True), Shape(32, 128, 4, 2)),
]


@pytest.mark.parametrize("plan", FP8_PLANS)
@pytest.mark.parametrize("tokens", [1, 5])
def test_fp8_experts(plan: Direct | Sorted | None, tokens: int) -> None:
    check_fp8_experts(tokens, 2, 3, 128, 256, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 64, 200, 512, 2048])
def test_fp8_experts_of_v3_width(tokens: int) -> None:
    """As wide as V3, with fewer experts: the oracle is fp64."""
    check_fp8_experts(tokens, 4, 8, 2048, 7168, None)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_graph_follows_its_inputs(tokens: int) -> None:
    """Captured once, replayed over another choice of experts: nothing was read on the host."""
    hidden, inner, experts = 256, 128, 16
    x = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    gate_up = torch.randn(experts, 2 * inner, hidden, device=DEVICE).bfloat16() / 16
    down = torch.randn(experts, hidden, inner, device=DEVICE).bfloat16() / 16
    ids, weights = make_choice(tokens, 4, experts)
    out = torch.zeros_like(x)
    moe.run_experts_(out, x, gate_up, down, ids, weights)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe.run_experts_(out, x, gate_up, down, ids, weights)
    for _ in range(3):
        new_ids, new_weights = make_choice(tokens, 4, experts)
        ids.copy_(new_ids), weights.copy_(new_weights)
        out.zero_(), x.normal_()
        graph.replay()
        want = torch.zeros_like(out)
        moe.run_experts_(want, x, gate_up, down, ids, weights)
        assert torch.equal(out, want)


def test_weighted_sum_adds_to_strided_rows() -> None:
    wide = torch.randn(3, 40, device=DEVICE)
    before = wide.clone()
    rows, weights = torch.randn(6, 24, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    grouped_gemm.weighted_sum_(wide[:, 8:32], rows, weights)
    before[:, 8:32] += (rows.view(3, 2, 24) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(wide, before)
