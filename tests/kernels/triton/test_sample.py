"""Tokens chosen on the device against the sampler of the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels import sample as plain
from kernels.triton import sample
from radix_mla.request import SamplingParams
from radix_mla.sampling.draw import draw
from radix_mla.sampling.uniform import uniform

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN, INF = float("nan"), float("inf")


def i64(values: list[int]) -> torch.Tensor:
    """int64 with the bits of unsigned 64-bit numbers."""
    return torch.from_numpy(np.array([v % 2**64 for v in values], np.uint64).view(np.int64)).to(
        DEVICE
    )


def test_uniform_is_the_samplers_bit_for_bit() -> None:
    keys = [
        (seed, choice, position)
        for seed in (0, 1, 12345, 2**63 - 1, 2**63, 2**64 - 1, -1)
        for choice in (0, 3)
        for position in (0, 1, 131_072)
    ]
    seeds, choices, positions = (list(column) for column in zip(*keys, strict=True))
    got = sample.uniform(i64(seeds), i64(choices), i64(positions))
    assert got.tolist() == [uniform(*key) for key in keys]


def test_greedy() -> None:
    logits = torch.randn(7, 50, device=DEVICE)
    logits[0] = 0.0  # all equal
    logits[1, [7, 9]] = 5.0  # a tie: the lowest id
    logits[2, 49] = INF
    logits[3, [3, 8]] = NAN
    logits[4] = -INF
    logits[5, 0] = NAN
    tokens, finite = sample.greedy(logits)
    want = logits.cpu().numpy().argmax(axis=1)  # the first NaN, if there is one
    assert tokens.tolist() == want.tolist()
    assert finite.tolist() == [True, True, False, False, False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_over_several_splits_of_a_slice(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 20_000, device=DEVICE).to(dtype)
    logits[:, 17_001:] = 100.0  # padding
    rows = logits[:, :17_001]
    logits[0, [9_000, 16_000]] = 50.0
    tokens, finite = sample.greedy(rows)
    assert tokens.tolist()[0] == 9_000
    assert tokens.tolist() == rows.cpu().float().numpy().argmax(axis=1).tolist()
    assert tokens.tolist() == plain.greedy(rows).tolist()
    assert finite.all()


def run(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    tokens, finite = sample.sample(
        logits,
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float64),
        min_p=column([p.min_p for p in params], torch.float32),
        seeds=i64([p.seed for p in params]),
        choices=i64([0] * len(params)),
        positions=i64(list(range(len(params)))),
    )
    assert finite.all()
    return tokens.tolist()


def agree(logits: torch.Tensor, params: list[SamplingParams]) -> float:
    """The share of rows on which the CPU's draw is the same."""
    rows = logits.float().cpu().numpy()
    want = [
        int(row.argmax()) if p.temperature < 1e-3 else draw(row, p, uniform(p.seed, 0, position))
        for position, (row, p) in enumerate(zip(rows, params, strict=True))
    ]
    got = run(logits, params)
    return sum(a == b for a, b in zip(got, want, strict=True)) / len(want)


BASE = SamplingParams(max_tokens=1, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
KINDS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-5},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.02, "top_k": 10, "top_p": 0.9},
    {"min_p": 1e-5, "top_k": 3, "top_p": 0.9, "temperature": 1.7},
]


@pytest.mark.parametrize("spread", [0.5, 3.0, 8.0])
def test_draws_are_the_samplers(spread: float) -> None:
    params = [replace(BASE, seed=31 * i, **kind) for i, kind in enumerate(KINDS)]
    logits = torch.randn(len(params), 300, device=DEVICE) * spread
    assert agree(logits, params) == 1.0


def test_ties_at_the_border_keep_the_lowest_ids() -> None:
    """Few levels of weight: every border stands among equals."""
    params = [replace(BASE, seed=7 * i, **kind) for i, kind in enumerate(KINDS)]
    logits = torch.randint(-3, 3, (len(params), 200), device=DEVICE).float()
    assert agree(logits, params) == 1.0


def test_masked_ids_are_never_drawn() -> None:
    logits = torch.full((len(KINDS), 64), -INF, device=DEVICE)
    logits[:, [5, 60]] = torch.tensor([0.0, -1.0], device=DEVICE)
    got = run(logits, [replace(BASE, seed=i, **kind) for i, kind in enumerate(KINDS)])
    assert set(got) <= {5, 60}


def test_a_row_that_is_not_finite_is_reported() -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[0, 3] = NAN
    one = torch.ones(2, device=DEVICE)
    tokens, finite = sample.sample(
        logits,
        temperature=one,
        top_k=one.int() * 0,
        top_p=one.double(),
        min_p=one * 0,
        seeds=i64([1, 2]),
        choices=i64([0, 0]),
        positions=i64([0, 0]),
    )
    assert finite.tolist() == [False, True]
    assert tokens.tolist()[0] == 3


def test_plain_torch_draws_the_same() -> None:
    logits = torch.randn(len(KINDS) - 1, 200) * 3
    params = [replace(BASE, seed=i, **kind) for i, kind in enumerate(KINDS) if kind != KINDS[1]]
    u = torch.tensor([uniform(p.seed, 0, i) for i, p in enumerate(params)], dtype=torch.float64)
    got = plain.draw(
        logits,
        u,
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([p.top_k for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float64),
        min_p=torch.tensor([p.min_p for p in params]),
    )
    want = [
        draw(row, p, float(share)) for row, p, share in zip(logits.numpy(), params, u, strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
def test_draws_over_a_real_vocabulary(dtype: torch.dtype, spread: float) -> None:
    """Rounding of exp may move a border: 1 in 100 rows at the most."""
    params = [replace(BASE, seed=i, **KINDS[i % len(KINDS)]) for i in range(256)]
    logits = (torch.randn(256, 129_280, device=DEVICE) * spread).to(dtype)
    assert agree(logits, params) >= 0.99


@pytest.mark.gpu
def test_greedy_over_a_real_vocabulary() -> None:
    for rows in (1, 7, 256):
        logits = torch.randn(rows, 102_400, device=DEVICE)
        assert torch.equal(sample.greedy(logits)[0], logits.argmax(dim=1))
