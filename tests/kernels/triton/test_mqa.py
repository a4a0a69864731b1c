"""Absorbed attention over pages: small under Triton's interpreter, full size on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.assert_close import assert_within_plain
from support.mqa_case import SCALE, MQACase, make_mqa_case

from kernels.triton.mqa import MQAConfig, MQAPartials, choose_config, mqa
from kernels.triton.mqa_plan import MQACapacity, SharedPass, plan_mqa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = MQAConfig(16, 16, 4, 1)


def run(
    case: MQACase, config: MQAConfig, *, programs: int, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, heads = case.q.shape[:2]
    capacity = MQACapacity(
        heads, config.block_m, config.block_n, programs, tokens, len(case.kv_lens), 4 * tokens
    )
    plan = plan_mqa(capacity, case.cu_q, case.kv_lens, case.shared)
    partials = MQAPartials(capacity, case.latent, DEVICE)
    partials.out.fill_(float("nan"))
    out = torch.full((tokens, heads, case.latent), float("nan"), dtype=case.q.dtype, device=DEVICE)
    lse = torch.full((tokens, heads), float("nan"), device=DEVICE) if with_lse else None
    mqa(
        case.q,
        case.pool,
        case.page_table,
        torch.from_numpy(plan.buffer).to(DEVICE),
        out,
        capacity=capacity,
        config=config,
        partials=partials,
        page_size=case.page_size,
        scale=SCALE,
        lse=lse,
        combine=plan.num_units > 0,
    )
    return out, lse


def check(case: MQACase, config: MQAConfig, *, programs: int) -> None:
    exact, exact_lse = case.answer()
    plain, plain_lse = case.answer(case.q.dtype)
    out, lse = run(case, config, programs=programs)
    assert lse is not None
    assert_within_plain(out, plain, exact, atol=2e-6)
    assert_within_plain(lse, plain_lse, exact_lse, atol=1e-5)
    bare, _ = run(case, config, programs=programs, with_lse=False)
    assert torch.equal(bare, out)


RAGGED = {
    "decode": [(1, 1), (1, 40), (1, 16), (1, 33)],
    "extend": [(5, 21), (1, 50), (3, 3)],
    "padding": [(1, 30), (0, 0), (2, 9), (0, 7)],
    "no keys": [(2, 0), (1, 20), (4, 2)],
    "one": [(1, 90)],
}


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize("sequences", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_ragged(page_size: int, sequences: list[tuple[int, int]], parted: bool) -> None:
    case = make_mqa_case(
        sequences,
        heads=4,
        latent=32,
        rope=16,
        page_size=page_size,
        dtype=torch.float32,
        device=DEVICE,
    )
    check(case, MQAConfig(16, 16, 4, 1, parted), programs=3)


@pytest.mark.parametrize(("heads", "programs"), [(16, 1), (5, 4), (20, 6), (33, 4)])
def test_heads_and_lanes(heads: int, programs: int) -> None:
    case = make_mqa_case(
        [(1, 50), (2, 20)],
        heads=heads,
        latent=16,
        rope=16,
        page_size=4,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case, SMALL, programs=programs)


@pytest.mark.parametrize("heads", [4, 32])
def test_shared_prefixes(heads: int) -> None:
    shared = [SharedPass((0, 1, 2), 0, 32), SharedPass((0, 2), 32, 48)]
    case = make_mqa_case(
        [(1, 50), (3, 36), (2, 64), (1, 20)],
        heads=heads,
        latent=32,
        rope=16,
        page_size=8,
        dtype=torch.float32,
        device=DEVICE,
        shared=shared,
    )
    check(case, SMALL, programs=4)


def test_strided_tensors_and_untouched_tokens() -> None:
    case = make_mqa_case(
        [(2, 30)], heads=3, latent=16, rope=16, page_size=2, dtype=torch.float32, device=DEVICE
    )
    config, capacity = SMALL, MQACapacity(3, 16, 16, 2, 4, 2)
    wide_q = torch.full((4, 3, 40), float("nan"), device=DEVICE)
    wide_q[:2, :, :32] = case.q
    out = torch.full((3, 4, 16), 7.0, device=DEVICE).transpose(0, 1)  # heads first
    lse = torch.full((3, 4), 7.0, device=DEVICE).t()
    plan = plan_mqa(capacity, case.cu_q, case.kv_lens)
    mqa(
        wide_q[..., :32],
        case.pool,
        case.page_table,
        torch.from_numpy(plan.buffer).to(DEVICE),
        out,
        capacity=capacity,
        config=config,
        partials=MQAPartials(capacity, 16, DEVICE),
        page_size=2,
        scale=SCALE,
        lse=lse,
    )
    exact, exact_lse = case.answer()
    torch.testing.assert_close(out[:2], exact.float())
    torch.testing.assert_close(lse[:2], exact_lse.float())
    assert (out[2:] == 7).all()
    assert (lse[2:] == 7).all()


def test_zero_tokens() -> None:
    case = make_mqa_case(
        [(0, 0), (0, 5)],
        heads=4,
        latent=16,
        rope=16,
        page_size=1,
        dtype=torch.float32,
        device=DEVICE,
    )
    capacity = MQACapacity(4, 16, 16, 2, 8, 2)
    out = torch.full((8, 4, 16), 7.0, device=DEVICE)
    plan = plan_mqa(capacity, case.cu_q, case.kv_lens)
    mqa(
        torch.zeros(8, 4, 32, device=DEVICE),
        case.pool,
        case.page_table,
        torch.from_numpy(plan.buffer).to(DEVICE),
        out,
        capacity=capacity,
        config=SMALL,
        partials=MQAPartials(capacity, 16, DEVICE),
        page_size=1,
        scale=SCALE,
    )
    assert (out == 7).all()


@pytest.mark.parametrize("parted", [False, True])
def test_fp8_rows(parted: bool) -> None:
    case = make_mqa_case(
        RAGGED["extend"],
        heads=4,
        latent=128,
        rope=16,
        page_size=4,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case.in_fp8(), MQAConfig(16, 16, 4, 1, parted), programs=3)


FULL = {
    "decode": [(1, n) for n in (1, 3000, 64, 65, 777, 2049, 1500, 12)],
    "extend": [(33, 900), (1, 4000), (64, 64), (7, 1000)],
    "padding": [(1, 3000), (0, 0), (2, 90), (0, 7), (3, 1)],
}


@pytest.mark.gpu
@pytest.mark.parametrize("sequences", FULL.values(), ids=FULL)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_full_size(heads: int, page_size: int, sequences: list[tuple[int, int]]) -> None:
    case = make_mqa_case(
        sequences,
        heads=heads,
        latent=512,
        rope=64,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case, choose_config(heads, torch.bfloat16), programs=132)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        MQAConfig(64, 64, 8, 2),
        MQAConfig(64, 64, 8, 2, parted=True),
        MQAConfig(64, 32, 8, 4, parted=True),
        MQAConfig(16, 64, 8, 3),
        MQAConfig(16, 64, 8, 2),
    ],
    ids=str,
)
def test_every_config(config: MQAConfig) -> None:
    case = make_mqa_case(
        FULL["extend"],
        heads=16,
        latent=512,
        rope=64,
        page_size=1,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case, config, programs=132)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("page_size", [1, 64])
def test_full_size_fp8(heads: int, page_size: int) -> None:
    case = make_mqa_case(
        FULL["extend"],
        heads=heads,
        latent=512,
        rope=64,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=DEVICE,
    )
    check(case.in_fp8(), choose_config(heads, torch.uint8), programs=132)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_full_size_shared(heads: int) -> None:
    shared = [SharedPass(tuple(range(8)), 0, 2048), SharedPass((0, 3, 5), 2048, 2560)]
    case = make_mqa_case(
        [(1 + i % 2, 2600 + 37 * i) for i in range(9)],
        heads=heads,
        latent=512,
        rope=64,
        page_size=64,
        dtype=torch.bfloat16,
        device=DEVICE,
        shared=shared,
    )
    check(case, choose_config(heads, torch.bfloat16, shared=True), programs=132)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
def test_one_graph_serves_other_batches(heads: int) -> None:
    """Captured once; replayed with other lengths, tables, numbers of sequences and padding."""
    max_tokens, page_size, latent = 48, 16, 512
    config = choose_config(heads, torch.bfloat16)
    capacity = MQACapacity(heads, config.block_m, config.block_n, 132, max_tokens, 16, 96)
    pool = torch.empty(40_000, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.zeros(16, 400, dtype=torch.int32, device=DEVICE)
    q = torch.zeros(max_tokens, heads, 576, dtype=torch.bfloat16, device=DEVICE)
    buffer = torch.zeros(capacity.at.end, dtype=torch.int32, device=DEVICE)
    out = torch.empty(max_tokens, heads, latent, dtype=torch.bfloat16, device=DEVICE)
    lse = torch.empty(max_tokens, heads, device=DEVICE)
    partials = MQAPartials(capacity, latent, DEVICE)

    def launch() -> None:
        mqa(
            q,
            pool,
            table,
            buffer,
            out,
            capacity=capacity,
            config=config,
            partials=partials,
            page_size=page_size,
            scale=SCALE,
            lse=lse,
        )

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    batches = [
        [(1, 5000)],
        [(1, 100 * i + 1) for i in range(16)],
        [(30, 400), (0, 0), (1, 6000), (0, 0), (8, 8)],
        [(0, 0), (0, 0)],
        [(1, 3000), (2, 3100), (1, 2900)],
    ]
    for seed, sequences in enumerate(batches):
        shared = [SharedPass((0, 1, 2), 0, 2048)] if seed == 4 else []
        case = make_mqa_case(
            sequences,
            heads=heads,
            latent=latent,
            rope=64,
            page_size=page_size,
            dtype=torch.bfloat16,
            device=DEVICE,
            shared=shared,
            seed=seed,
        )
        tokens = case.q.shape[0]
        pool.fill_(float("nan"))
        pool[: len(case.pool)] = case.pool
        table.zero_()
        table[: len(sequences), : case.page_table.shape[1]] = case.page_table
        q.fill_(float("nan"))
        q[:tokens] = case.q
        plan = plan_mqa(capacity, case.cu_q, case.kv_lens, case.shared)
        buffer.copy_(torch.from_numpy(plan.buffer))
        out.fill_(7.0)
        partials.out.fill_(float("nan"))
        graph.replay()
        assert (out[tokens:] == 7).all()
        if tokens:
            exact, exact_lse = case.answer()
            plain, plain_lse = case.answer(torch.bfloat16)
            assert_within_plain(out[:tokens], plain, exact)
            assert_within_plain(lse[:tokens], plain_lse, exact_lse, atol=1e-5)


@pytest.mark.gpu
def test_a_pool_past_int32() -> None:
    """Elements past 2^31: addresses are 64-bit."""
    num_slots = (1 << 31) // 576 + 4096
    pool = torch.empty(num_slots, 576, dtype=torch.bfloat16, device=DEVICE)
    pool[-4096:] = torch.randn(4096, 576, device=DEVICE)
    q = torch.randn(1, 16, 576, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(num_slots - 1000, num_slots, dtype=torch.int32, device=DEVICE)[None]
    tail = pool[-1000:].clone()
    outs = []
    for rows, pages in ((pool, table), (tail, table - (num_slots - 1000))):
        case = MQACase(q, rows, pages, np.array([0, 1]), np.array([1000]), [], 1, 512)
        outs.append(run(case, choose_config(16, torch.bfloat16), programs=132)[0])
    assert torch.equal(*outs)
