"""Absorbed steps of fixed shapes: refilled in place, padded, and captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.assert_close import assert_within_plain
from support.fake_flashmla import FakeFlashMLA
from support.mla_case import TRUE, MLACase, make_case

from radix_mla.attention import shared_prefix
from radix_mla.attention.backend import AttentionBackend, BackendPair
from radix_mla.attention.backends import flashmla_kernel, flashmla_shared, flashmla_static
from radix_mla.attention.backends.flashmla import FlashMLABackend
from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.backends.triton import TritonBackend
from radix_mla.attention.context import ForwardContext
from radix_mla.attention.select import choose_backends, device_arch, make_backend, refusal
from radix_mla.attention.static_plan import Family, StaticAbsorbed, work_of
from radix_mla.attention.workspace import MLADims, Workspace
from radix_mla.errors import ConfigError

SMALL = MLADims(num_heads=2, latent=32, nope=16, rope=16, value=16)
BUCKET = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of the Triton tests, else interpreted


def context_of(case: MLACase, static: StaticAbsorbed, backend: AttentionBackend) -> ForwardContext:
    workspace = Workspace(
        case.dims,
        context_rows=64,
        step_tokens=static.num_tokens,
        pad_heads=backend.caps.pad_heads,
        dtype=case.q.dtype,
        device=case.device,
    )
    return ForwardContext(
        positions=static.positions,
        slots=static.slots,
        plan=static.plan,
        pool=case.pool,
        workspace=workspace,
        backend=backend,
    )


def padded(tensor: torch.Tensor, bucket: int) -> torch.Tensor:
    out = tensor.new_zeros(bucket, *tensor.shape[1:])
    out[: len(tensor)] = tensor
    return out


def over_one_pool(case: MLACase, sequences: list[tuple[int, int]]) -> MLACase:
    """Another step over the pool and weights of `case`."""
    other = make_case(
        sequences,
        dims=case.dims,
        page_size=case.pool.page_size,
        kv_dtype=case.pool.layout.name,
        dtype=case.q.dtype,
        seed=5,
        device=case.device,
    )
    case.pool.layer(0)[: len(other.pool.layer(0))] = other.pool.layer(0)
    return replace(other, pool=case.pool, weights=case.weights)


DECODES = [[(1, 20), (1, 7), (1, 16)], [(1, 60)], [(1, 0), (1, 40)]]
STEPS = [[(1, 20), (1, 7), (1, 16)], [(3, 20), (1, 0)], [(1, 30)], [(2, 5), (1, 31), (5, 3)]]


def test_one_buffer_serves_step_after_step() -> None:
    case = make_case([(1, 60), (1, 60), (1, 60)], dims=SMALL, page_size=16, device=DEVICE)
    setting = replace(case.setting(), max_num_seqs=4, max_tokens=16, max_pages=6)
    backend = TritonBackend(setting, num_programs=4)
    static = StaticAbsorbed(backend, BUCKET, case.pool, "mixed")
    ctx = context_of(case, static, backend)
    places = (static.positions.data_ptr(), static.slots.data_ptr())
    for sequences in STEPS:
        step = over_one_pool(case, sequences)
        step.pool.layer(0)[-16:] = float("nan")  # the dummy page
        static.refill(step.batch)
        static.begin()
        rows = ctx.write(0, padded(step.rows, BUCKET))
        out = ctx.attend(0, padded(step.q, BUCKET), rows, step.weights, step.scale)
        used = len(step.q)
        assert_within_plain(out[:used], step.answer(torch.float32), step.answer(), atol=5e-6)
        assert (out[used:] == 0).all(), "padding attends to nothing"
    assert (static.positions.data_ptr(), static.slots.data_ptr()) == places


def test_padding_alone() -> None:
    case = make_case([(1, 3)], dims=SMALL, page_size=16, device=DEVICE)
    backend = TritonBackend(case.setting(), num_programs=2)
    static = StaticAbsorbed(backend, 4, case.pool, "mixed")
    static.refill(None)
    assert static.slots.tolist() == [case.pool.dummy_page * 16] * 4
    ctx = context_of(case, static, backend)
    rows = ctx.write(0, torch.zeros(4, SMALL.row, device=DEVICE))
    q = torch.zeros(4, 2, SMALL.qk, device=DEVICE)
    out = ctx.attend(0, q, rows, case.weights, case.scale)
    assert (out == 0).all()


def test_more_tokens_than_the_bucket_are_our_bug() -> None:
    case = make_case([(5, 3)], dims=SMALL, page_size=16)
    backend = TritonBackend(case.setting(), num_programs=2)
    with pytest.raises(AssertionError, match="5 tokens in a bucket of 4"):
        StaticAbsorbed(backend, 4, case.pool, "mixed").refill(case.batch)


def test_a_backend_without_fixed_shapes_says_so() -> None:
    case = make_case([(1, 3)], dims=SMALL)
    with pytest.raises(ConfigError, match="torch,torch cannot run in a CUDA graph"):
        StaticAbsorbed(BackendPair(TorchBackend("cpu"), TorchBackend("cpu")), 4, case.pool, "plain")


# -- FlashMLA's adapter, with a stand-in for the kernel


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFlashMLA]:
    module = FakeFlashMLA()
    monkeypatch.setattr(flashmla_kernel, "find", lambda: ("", module))
    return module


@pytest.mark.parametrize(
    "sequences",
    [[(1, 20), (1, 90), (1, 64)], [(3, 20), (3, 0)], [(1, 70), (5, 2), (1, 0), (3, 65), (8, 8)]],
    ids=["decode", "uniform", "mixed"],
)
def test_flashmla_groups_sequences(fake: FakeFlashMLA, sequences: list[tuple[int, int]]) -> None:
    case = make_case(sequences, dims=SMALL, page_size=64)
    case.pool.layer(0).nan_to_num_(0.0)  # the stand-in reads whole pages
    backend = BackendPair(TorchBackend("cpu"), FlashMLABackend(case.setting()))
    for _ in range(2):
        out, _ = case.run("absorbed", backend=backend)
        assert_within_plain(out, case.answer(torch.float32), case.answer(), atol=5e-6)
    kinds = {1 << (new - 1).bit_length() for new, _ in sequences}
    assert len(fake.schedules) == 2 * len(kinds), "one schedule a step and group"


def test_flashmla_lse_of_queries_without_keys(fake: FakeFlashMLA) -> None:
    assert fake.has_legacy()
    inf = float("inf")
    lse = torch.tensor([[[1.0, inf], [-inf, 2.0]]])  # [B, H, Sq]
    assert flashmla_kernel.by_query(lse).tolist() == [[1.0, -inf], [-inf, 2.0]]


def test_flashmla_sees_each_token_as_a_sequence(fake: FakeFlashMLA) -> None:
    case = make_case([(1, 60), (1, 60), (1, 60)], dims=SMALL, page_size=64)
    setting = replace(case.setting(), max_num_seqs=4, max_tokens=16, max_pages=2)
    backend = BackendPair(TorchBackend("cpu"), FlashMLABackend(setting))
    static = StaticAbsorbed(backend, BUCKET, case.pool, "plain")
    for sequences in DECODES:
        step = over_one_pool(case, sequences)
        step.pool.layer(0).nan_to_num_(0.0)
        static.refill(step.batch)
        static.begin()
        ctx = context_of(case, static, backend)
        rows = ctx.write(0, padded(step.rows, BUCKET))
        out = ctx.attend(0, padded(step.q, BUCKET), rows, step.weights, step.scale)
        used = len(step.q)
        assert_within_plain(out[:used], step.answer(torch.float32), step.answer(), atol=5e-6)
        assert (out[used:] == 0).all()
    assert len(fake.schedules) == 1 + len(DECODES)
    assert not static.fits(work_of(over_one_pool(case, [(2, 5)]).batch))


def test_flashmla_takes_runs_of_tokens(fake: FakeFlashMLA, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 queries each: sequences of fewer, of as many, of a multiple, of more."""
    monkeypatch.setattr(flashmla_static, "_RUN_ROWS", 8)
    case = make_case([(1, 90), (1, 90), (1, 90)], dims=SMALL, page_size=64)
    setting = replace(case.setting(), max_num_seqs=4, max_tokens=32, max_pages=2)
    backend = BackendPair(TorchBackend("cpu"), FlashMLABackend(setting))
    bucket = 20
    static = StaticAbsorbed(backend, bucket, case.pool, "mixed")
    for sequences in ([(3, 20), (1, 0)], [(4, 60), (8, 1)], [(7, 70), (1, 64), (9, 0)], [(20, 5)]):
        step = over_one_pool(case, sequences)
        step.pool.layer(0).nan_to_num_(0.0)
        assert static.fits(work_of(step.batch))
        static.refill(step.batch)
        static.begin()
        ctx = context_of(case, static, backend)
        rows = ctx.write(0, padded(step.rows, bucket))
        out = ctx.attend(0, padded(step.q, bucket), rows, step.weights, step.scale)
        used = len(step.q)
        assert_within_plain(out[:used], step.answer(torch.float32), step.answer(), atol=5e-6)
        assert (out[used:] == 0).all()
    many = make_case([(1, 3)] * 12, dims=SMALL, page_size=64)
    assert not static.fits(work_of(many.batch)), "each takes a run of its own"
    assert fake.schedules


def sharing(case: MLACase, groups: list[tuple[tuple[int, ...], int, int]]) -> MLACase:
    """`case` with pages [first, last) of each group's members on those of its first member."""
    tables = [table.copy() for table in case.batch.page_tables]
    for members, first, last in groups:
        for member in members[1:]:
            tables[member][first:last] = tables[members[0]][first:last]
    return replace(case, batch=replace(case.batch, page_tables=tuple(tables)))


# name: sequences' context, groups, rows that FlashMLA is asked to read in passes
SHARED = {
    "one": ([200, 150, 190], [((0, 1, 2), 0, 2)], 2 * 128),
    "nested": ([270, 300, 150, 9], [((0, 1, 2), 0, 2), ((0, 1), 2, 4)], 3 * 128),
    "two": ([64, 70, 130, 150, 129], [((0, 1), 0, 1), ((2, 3, 4), 0, 2)], 64 + 2 * 128),
    "nothing": ([64, 70], [], 0),
    "too deep": ([300, 300, 300], [((0, 1, 2), 0, 1), ((0, 1), 1, 2)], 2 * 64),
    "no room": ([64] * 8, [((0, 1), 0, 1), ((2, 3), 0, 1), ((4, 5), 0, 1), ((6, 7), 0, 1)], 192),
}


@pytest.mark.parametrize("name", SHARED)
def test_flashmla_reads_shared_prefixes_once(
    fake: FakeFlashMLA, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(flashmla_shared, "_RUN_ROWS", 4)  # two tokens a run
    monkeypatch.setattr(shared_prefix, "_MIN_SAVED_ROWS", 64)
    if name == "too deep":
        monkeypatch.setattr(flashmla_shared, "_DEPTH", 1)
    if name == "no room":
        monkeypatch.setattr(flashmla_shared, "_RUN_ROWS", 6)
        monkeypatch.setattr(flashmla_shared, "_SPARE_RUNS", 0)
    context, groups, in_passes = SHARED[name]
    case = sharing(make_case([(1, n) for n in context], dims=SMALL, page_size=64), groups)
    case.pool.layer(0).nan_to_num_(0.0)
    backend = BackendPair(TorchBackend("cpu"), FlashMLABackend(case.setting()))
    static = StaticAbsorbed(backend, BUCKET, case.pool, "shared")
    for _ in range(2):
        fake.calls.clear()
        static.refill(case.batch)
        static.begin()
        ctx = context_of(case, static, backend)
        rows = ctx.write(0, padded(case.rows, BUCKET))
        out = ctx.attend(0, padded(case.q, BUCKET), rows, case.weights, case.scale)
        used = len(case.q)
        assert_within_plain(out[:used], case.answer(torch.float32), case.answer(), atol=5e-6)
        assert (out[used:] == 0).all()
        (tail_q, tails), (pass_q, passes) = fake.calls
        assert (tail_q, sum(passes)) == (1, in_passes)
        assert pass_q > 1
        covered = sum((last - first) * 64 * len(members) for members, first, last in groups) - {
            "too deep": 2 * 64,
            "no room": 2 * 64,
        }.get(name, 0)
        assert sum(tails) == sum(context) + used - covered
    assert not static.fits(work_of(make_case([(2, 64)], dims=SMALL, page_size=64).batch))


# -- captured


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["plain", "mixed", "shared"])
@pytest.mark.parametrize("name", ["triton", "fa3,flashmla"])
def test_a_captured_step_replays_with_other_batches(name: str, family: Family) -> None:
    """Also across a change of lengths that needs another schedule, and with padding."""
    case = make_case(
        [(1, 4000)] * 6,
        dims=replace(TRUE, num_heads=16),
        page_size=64,
        kv_dtype="bf16",
        dtype=torch.bfloat16,
        device="cuda",
    )
    setting = replace(case.setting(), max_num_seqs=16, max_tokens=64, max_pages=80)
    setting = replace(setting, arch=device_arch(setting.device))
    first, _, second = name.partition(",")
    for part, role in ((first, "prefill"), (second or first, "absorbed")):
        if (reason := refusal(part, role, setting)) is not None:
            pytest.skip(f"{part}: {reason}")
    backend = make_backend(choose_backends(name, setting), setting)
    bucket = 32
    static = StaticAbsorbed(backend, bucket, case.pool, family)
    ctx = context_of(case, static, backend)
    q = torch.zeros(bucket, *case.q.shape[1:], dtype=case.q.dtype, device="cuda")
    rows = torch.zeros(bucket, case.dims.row, dtype=case.q.dtype, device="cuda")

    def forward() -> torch.Tensor:
        static.begin()
        outs = [
            ctx.attend(0, q, ctx.write(0, rows), case.weights, case.scale) for _ in range(2)
        ]  # two layers share a schedule
        return torch.stack(outs)

    static.refill(None)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    many = [(1, n) for n in np.random.default_rng(1).integers(1, 2000, 12).tolist()]
    prefix = [(tuple(range(5)), 0, 20), ((0, 1, 2), 20, 30), ((6, 7), 0, 30)]
    for sequences in (
        [(1, 1500)],
        many,
        [(4, 300), (1, 3000), (9, 0)],
        [(1, 2000 + n) for n in range(9)],
        [(32, 500)],
        [(1, 0)],
    ):
        step = over_one_pool(case, sequences)
        if len(sequences) == 9:
            step = sharing(step, prefix)
        used = len(step.q)
        if not static.fits(work_of(step.batch)):
            continue
        static.refill(step.batch)
        q[:used], rows[:used] = step.q, step.rows
        graph.replay()
        plain, exact = step.answer(torch.bfloat16), step.answer()
        for layer in out:
            assert_within_plain(layer[:used], plain, exact, atol=2e-2)
            assert (layer[used:] == 0).all()
