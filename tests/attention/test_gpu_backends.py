"""Every backend against the fp64 oracle: the Triton one in its interpreter at small sizes, all of
them on a GPU at true ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from support.assert_close import assert_within_plain
from support.mla_case import TRUE, MLACase, make_case

from kernels import reference_attention as reference
from radix_mla.attention.backend import AttentionBackend, MHAWork, MQAWork, Partial, Setting
from radix_mla.attention.backends.triton import TritonBackend
from radix_mla.attention.forms import Form
from radix_mla.attention.metadata import cumulative
from radix_mla.attention.select import choose_backends, device_arch, make_backend, refusal
from radix_mla.attention.shared_prefix import _MIN_SAVED_ROWS
from radix_mla.attention.workspace import MLADims

SMALL = MLADims(num_heads=2, latent=32, nope=16, rope=16, value=16)
LITE = replace(TRUE, num_heads=16)
WIDE = replace(TRUE, nope=192, value=256)  # GLM-4.7-Flash
FORMS = get_args(Form)
# The interpreter computes log2(0) in numpy: -inf, as a GPU does, but with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@dataclass(frozen=True)
class Place:
    """Where a test runs, and with which pair of backends."""

    pair: str
    device: str
    dims: MLADims
    dtype: torch.dtype
    page_size: int

    @property
    def names(self) -> tuple[str, str]:
        first, _, second = self.pair.partition(",")
        return first, second or first

    def backend(self, setting: Setting) -> AttentionBackend:
        """Skips where the pair cannot run."""
        if self.device == "cpu":
            assert self.pair == "triton"
            return TritonBackend(setting, num_programs=5)
        setting = replace(setting, arch=device_arch(setting.device))
        for name, role in zip(self.names, ("prefill", "absorbed"), strict=True):
            reason = refusal(name, role, setting)
            if reason is not None:
                pytest.skip(f"{name}: {reason}")
        return make_backend(choose_backends(self.pair, setting), setting)

    def case(self, sequences: list[tuple[int, int]], *, decode: bool = False) -> MLACase:
        return make_case(
            sequences,
            dims=self.dims,
            page_size=self.page_size,
            kv_dtype="bf16" if self.dtype == torch.bfloat16 else "fp32",
            dtype=self.dtype,
            decode=decode,
            device=self.device,
        )

    def check(self, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
        atol = 5e-6 if self.dtype == torch.float32 else 2e-2
        assert_within_plain(ours, plain, exact, atol=atol)


def on_gpu(
    pair: str,
    page_size: int = 64,
    dims: MLADims = LITE,
    dtype: torch.dtype = torch.bfloat16,
) -> object:
    place = Place(pair, "cuda", dims, dtype, page_size)
    kind = ("-fp32" if dtype == torch.float32 else "") + ("-wide" if dims is WIDE else "")
    return pytest.param(place, id=f"{pair}-{page_size}{kind}", marks=pytest.mark.gpu)


INTERPRETER = [
    pytest.param(Place("triton", "cpu", SMALL, torch.float32, size), id=f"interpreter-{size}")
    for size in (1, 16)
]
PAIRS = [
    on_gpu(pair, size)
    for pair in ("triton", "fa3,triton", "fa2,triton", "torch,flashmla", "fa3,flashmla", "torch")
    for size in (1, 16, 64)
    if size == 64 or "flashmla" not in pair
]
WHOLE = [
    *INTERPRETER,
    *PAIRS,
    on_gpu("triton", 16, dtype=torch.float32),
    *(on_gpu(pair, dims=WIDE) for pair in ("triton", "fa3,flashmla", "fa2,triton")),
]
ABSORBED = [
    *INTERPRETER,
    *(on_gpu("triton", size) for size in (1, 16, 64)),
    on_gpu("triton", 16, dtype=torch.float32),
    on_gpu("torch,flashmla"),
    on_gpu("torch", 16),
]
PREFILL = [
    INTERPRETER[0],
    *(on_gpu(f"{name},torch") for name in ("fa3", "fa2", "triton", "torch")),
    *(on_gpu(f"{name},torch", dims=WIDE) for name in ("fa3", "fa2", "triton")),
]


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    found = request.param
    assert isinstance(found, Place)
    if found.device == "cpu" and torch.cuda.is_available():
        pytest.skip("no interpreter beside a GPU")
    return found


whole = pytest.mark.parametrize("place", WHOLE, indirect=True)
absorbed = pytest.mark.parametrize("place", ABSORBED, indirect=True)
prefill = pytest.mark.parametrize("place", PREFILL, indirect=True)


# -- the whole of MLA, through ForwardContext


def run_form(
    place: Place, sequences: list[tuple[int, int]], form: Form | None, workspace_rows: int
) -> MLACase:
    case = place.case(sequences)
    backend = place.backend(case.setting())
    out, _ = case.run(form, workspace_rows=workspace_rows, backend=backend)
    place.check(out, case.answer(place.dtype), case.answer())
    return case


@whole
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sequences", "workspace_rows"),
    [([(5, 0), (3, 70), (1, 0), (17, 9)], 32), ([(6, 64)], 64)],
    ids=["ragged", "multiples"],
)
def test_forms(
    place: Place, form: Form, sequences: list[tuple[int, int]], workspace_rows: int
) -> None:
    run_form(place, sequences, form, workspace_rows)


@pytest.mark.parametrize("place", WHOLE[2:], indirect=True)
@pytest.mark.parametrize(
    ("form", "workspace_rows"),
    [("absorbed", 4096), ("non_absorbed", 100), ("non_absorbed", 4096), ("one_shot", 4096)],
)
def test_long_contexts(place: Place, form: Form, workspace_rows: int) -> None:
    run_form(place, [(130, 0), (65, 700), (1, 300), (128, 256), (3, 1)], form, workspace_rows)


@whole
def test_decode_batch(place: Place) -> None:
    lengths = [(1, 0), (1, 15), (1, 16), (1, 63), (1, 64), (1, 40)]
    if place.device != "cpu":
        lengths += [(1, 1000), (1, 4095)]
    run_form(place, lengths, "absorbed", 64)


# -- the two attentions alone, with their LSE


def random_mqa(place: Place, q_lens: list[int], kv_lens: list[int]) -> tuple[MQAWork, torch.Tensor]:
    """A pool [S, L + R], NaN wherever no sequence has a row, and the work over it."""
    size, width = place.page_size, place.dims.row
    pages = [-(-n // size) for n in kv_lens]
    order = np.random.default_rng(0).permutation(sum(pages) + 2).astype(np.int32)
    bounds = np.cumsum([0, *pages])
    tables = tuple(order[a:b] for a, b in pairwise(bounds))
    pool = torch.full((len(order) * size, width), float("nan"), dtype=place.dtype)
    for pages_of, length in zip(tables, kv_lens, strict=True):
        rows = np.arange(length)
        slots = pages_of[rows // size].astype(np.int64) * size + rows % size
        pool[torch.from_numpy(slots)] = torch.randn(length, width).to(place.dtype)
    work = MQAWork(cumulative(np.array(q_lens)), np.array(kv_lens), tables, size, with_lse=True)
    return work, pool.to(place.device)


def setting_of(place: Place, num_seqs: int, num_tokens: int, max_pages: int) -> Setting:
    dtype = "bf16" if place.dtype == torch.bfloat16 else "fp32"
    device = "cuda:0" if place.device == "cuda" else "cpu"
    return Setting(
        device=device,
        arch=None,
        dtype=dtype,
        kv_dtype=dtype,
        page_size=place.page_size,
        dims=place.dims,
        max_num_seqs=num_seqs,
        max_tokens=num_tokens,
        max_pages=max_pages,
    )


def attend(place: Place, work: MQAWork, pool: torch.Tensor, q: torch.Tensor) -> Partial:
    most = max(len(table) for table in work.page_tables)
    backend = place.backend(setting_of(place, len(work.kv_lens), len(q), most))
    backend.plan([], work)
    scratch = torch.empty(4096, place.dims.row, dtype=place.dtype, device=place.device)
    return backend.run_mqa(work, q, pool, scratch, place.dims.latent, 0.2)


def check_mqa(place: Place, work: MQAWork, pool: torch.Tensor) -> None:
    q = torch.randn(work.num_queries, place.dims.num_heads, place.dims.row).to(place.dtype)
    q = (q / place.dims.row**0.25).to(place.device)
    out, lse = attend(place, work, pool, q)
    padded = torch.zeros(len(work.page_tables), max(map(len, work.page_tables)), dtype=torch.int32)
    for i, table in enumerate(work.page_tables):
        padded[i, : len(table)] = torch.from_numpy(table)

    def oracle(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.mqa_paged(
            q.to(dtype),
            pool.to(dtype),
            padded,
            work.kv_lens.tolist(),
            work.cu_q.tolist(),
            page_size=work.page_size,
            latent=place.dims.latent,
            scale=0.2,
        )

    plain, exact = oracle(place.dtype), oracle(torch.float64)
    assert lse.dtype == torch.float32
    place.check(out, plain[0], exact[0])
    place.check(lse, plain[1], exact[1])


@absorbed
@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [([1, 1, 1], [1, 33, 70]), ([3, 3], [3, 64]), ([1, 7, 2, 1], [64, 40, 2, 16])],
    ids=["decode", "uniform", "mixed"],
)
def test_mqa_with_lse(place: Place, q_lens: list[int], kv_lens: list[int]) -> None:
    check_mqa(place, *random_mqa(place, q_lens, kv_lens))


@pytest.mark.parametrize("place", ABSORBED[2:], indirect=True)
def test_many_extends_of_different_lengths(place: Place) -> None:
    q_lens = [1, 2, 3, 5, 8, 13, 21, 34, 1, 1, 64]
    check_mqa(place, *random_mqa(place, q_lens, [n + 17 * i for i, n in enumerate(q_lens)]))


@absorbed
def test_shared_prefixes_are_read_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two on one prefix, a third on its beginning; the answer is that of separate reads."""
    size = place.page_size
    num_rows = 48 if place.device == "cpu" else 2 * _MIN_SAVED_ROWS
    monkeypatch.setattr("radix_mla.attention.shared_prefix._MIN_SAVED_ROWS", size)
    pages = -(-num_rows // size)
    work, pool = random_mqa(place, [1, 2, 1], [num_rows + 5, num_rows + 9, num_rows + 1])
    first, second, third = (table.copy() for table in work.page_tables)
    second[:pages] = first[:pages]
    half = max(1, pages // 2)
    third[:half] = first[:half]
    if num_rows % size:
        second[pages - 1] = work.page_tables[1][pages - 1]
    check_mqa(place, replace(work, page_tables=(first, second, third)), pool)


@prefill
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [
        ([5, 1, 12], [5, 1, 12], True),
        ([5, 1], [40, 33], True),
        ([3, 4, 2], [0, 37, 0], False),
    ],
    ids=["new", "prefix", "no keys"],
)
def test_mha_with_lse(place: Place, q_lens: list[int], k_lens: list[int], causal: bool) -> None:
    if place.device != "cpu":
        q_lens, k_lens = [50 * n for n in q_lens], [50 * n for n in k_lens]
    dims, num_q, num_k = place.dims, sum(q_lens), sum(k_lens)
    backend = place.backend(setting_of(place, len(q_lens), num_q, 4))
    pad = backend.caps.pad_heads
    widths = (max(dims.qk, dims.value),) * 2 if pad else (dims.qk, dims.value)
    room = num_k + 7  # the workspace is longer than its rows
    q = torch.randn(num_q, dims.num_heads + 1, dims.qk).to(place.device, place.dtype)[:, 1:]
    k = torch.zeros(dims.num_heads, room, widths[0], dtype=place.dtype, device=place.device)
    v = torch.zeros(dims.num_heads, room, widths[1], dtype=place.dtype, device=place.device)
    k[..., : dims.qk] = torch.randn(dims.num_heads, room, dims.qk)
    v[..., : dims.value] = torch.randn(dims.num_heads, room, dims.value)
    work = MHAWork(cumulative(np.array(q_lens)), cumulative(np.array(k_lens)), causal)
    backend.plan([work], None)
    scale = dims.qk**-0.5
    out, lse = backend.run_mha(work, q, k[:, :num_k], v[:, :num_k], scale)

    def oracle(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.mha_varlen(
            q.to(dtype),
            k[:, :num_k, : dims.qk].transpose(0, 1).to(dtype),
            v[:, :num_k].transpose(0, 1).to(dtype),
            work.cu_q.tolist(),
            work.cu_k.tolist(),
            scale=scale,
            causal=causal,
        )

    plain, exact = oracle(place.dtype), oracle(torch.float64)
    assert lse.shape == q.shape[:2]
    place.check(out, plain[0], exact[0])
    place.check(lse, plain[1], exact[1])
    assert (out[..., dims.value :] == 0).all(), "padding of v must stay padding"
