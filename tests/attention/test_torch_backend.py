"""The two ragged attentions of the torch backend against their fp64 oracles."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support.assert_close import assert_within_plain

from kernels import reference_attention as reference
from radix_mla.attention.backend import MHAWork, MQAWork
from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.metadata import cumulative

INF = float("inf")


def mha_work(q_lens: list[int], k_lens: list[int], *, causal: bool) -> MHAWork:
    return MHAWork(cumulative(np.array(q_lens)), cumulative(np.array(k_lens)), causal)


MHA_CASES = {
    "one": ([63], [63], True),
    "ragged": ([1, 60, 7], [1, 60, 7], True),
    "with prefix": ([5, 1, 33], [500, 64, 33], True),
    "blocks of queries": ([600], [700], True),
    "not causal": ([5, 63], [500, 2], False),
    "no keys beside long context": ([3, 4, 2], [0, 300, 0], False),
}


@pytest.mark.parametrize("flash", [True, False], ids=["flash", "matmul"])
@pytest.mark.parametrize("case", MHA_CASES)
@pytest.mark.parametrize(("qk", "v_dim"), [(192, 128), (32, 20), (16, 48)])
def test_mha(case: str, qk: int, v_dim: int, flash: bool) -> None:
    q_lens, k_lens, causal = MHA_CASES[case]
    width = max(qk, v_dim)
    q = torch.randn(sum(q_lens), 2, qk)
    k = torch.zeros(2, sum(k_lens), width)
    v = torch.zeros(2, sum(k_lens), width)
    k[..., :qk], v[..., :v_dim] = torch.randn(*k.shape[:2], qk), torch.randn(*v.shape[:2], v_dim)
    work = mha_work(q_lens, k_lens, causal=causal)
    backend = TorchBackend("cpu", flash=flash)
    backend.plan([work], None)
    out, lse = backend.run_mha(work, q, k, v, 0.1)

    def oracle(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.mha_varlen(
            q.to(dtype),
            k[..., :qk].transpose(0, 1).to(dtype),
            v.transpose(0, 1).to(dtype),
            work.cu_q.tolist(),
            work.cu_k.tolist(),
            scale=0.1,
            causal=causal,
        )

    plain, exact = oracle(torch.float32), oracle(torch.float64)
    assert lse.dtype == torch.float32
    assert_within_plain(out, plain[0], exact[0])
    assert_within_plain(lse, plain[1], exact[1])
    assert (out[..., v_dim:] == 0).all(), "padding of v must stay padding until the last merge"


MQA_CASES = {
    "decode": ([1], [500]),
    "decode, different lengths": ([1, 1, 1, 1], [1, 63, 64, 500]),
    "new tokens only": ([60], [60]),
    "extend": ([7, 1, 33], [500, 1, 64]),
    "exact multiples": ([16, 16], [64, 16]),
}


@pytest.mark.parametrize("case", MQA_CASES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("layout", ["contiguous", "scattered", "mixed"])
@pytest.mark.parametrize("scratch_rows", [4096, 37])
def test_mqa(case: str, page_size: int, layout: str, scratch_rows: int) -> None:
    q_lens, kv_lens = MQA_CASES[case]
    pages = [-(-n // page_size) for n in kv_lens]
    order = np.arange(sum(pages), dtype=np.int32)
    if layout != "contiguous":
        half = len(order) // 2 if layout == "mixed" else len(order)
        order[:half] = np.random.default_rng(0).permutation(order[:half])
    bounds = np.cumsum([0, *pages])
    tables = tuple(order[a:b] for a, b in pairwise(bounds))
    pool = torch.full((len(order) * page_size, 48), float("nan"))
    for table, length in zip(tables, kv_lens, strict=True):
        for row in range(length):
            pool[int(table[row // page_size]) * page_size + row % page_size] = torch.randn(48)
    q = torch.randn(sum(q_lens), 3, 48)
    work = MQAWork(
        cumulative(np.array(q_lens)), np.array(kv_lens), tables, page_size, with_lse=True
    )
    backend = TorchBackend("cpu")
    backend.plan([], work)
    out, lse = backend.run_mqa(work, q.clone(), pool, torch.empty(scratch_rows, 48), 40, 0.2)

    padded = torch.zeros(len(tables), max(pages), dtype=torch.int32)
    for i, table in enumerate(tables):
        padded[i, : len(table)] = torch.from_numpy(table)

    def oracle(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.mqa_paged(
            q.to(dtype),
            pool.to(dtype),
            padded,
            kv_lens,
            work.cu_q.tolist(),
            page_size=page_size,
            latent=40,
            scale=0.2,
        )

    plain, exact = oracle(torch.float32), oracle(torch.float64)
    assert_within_plain(out, plain[0], exact[0])
    assert_within_plain(lse, plain[1], exact[1])


def test_scores_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ([40], [300])
    monkeypatch.setitem(MQA_CASES, "blocks", case)
    monkeypatch.setattr("radix_mla.attention.backends.torch_absorbed._MAX_SCORES", 3 * 300 * 7)
    test_mqa("blocks", 16, "mixed", 64)


def test_bf16_rows_are_converted() -> None:
    pool = torch.randn(64, 48).bfloat16()
    q = torch.randn(2, 3, 48)
    tables = (np.arange(4, dtype=np.int32),)
    work = MQAWork(np.array([0, 2]), np.array([50]), tables, 16, with_lse=True)
    backend = TorchBackend("cpu")
    backend.plan([], work)
    out, _ = backend.run_mqa(work, q.clone(), pool, torch.empty(64, 48), 40, 0.2)
    exact, _ = reference.mqa_paged(
        q.double(),
        pool.double(),
        torch.arange(4)[None],
        [50],
        [0, 2],
        page_size=16,
        latent=40,
        scale=0.2,
    )
    torch.testing.assert_close(out, exact.float())


def test_work_of_another_step_is_refused() -> None:
    backend = TorchBackend("cpu")
    work = MQAWork(np.array([0, 1]), np.array([1]), (np.array([0], dtype=np.int32),), 1)
    backend.plan([], None)
    with pytest.raises(AssertionError, match="not planned"):
        backend.run_mqa(work, torch.zeros(1, 1, 4), torch.zeros(1, 4), torch.zeros(1, 4), 2, 1.0)
