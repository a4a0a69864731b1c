"""VarlenBackend over a stand-in for FlashAttention: what it is given, what its answer becomes."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from radix_mla.attention.backend import MHAWork
from radix_mla.attention.backends.varlen import VarlenBackend, find_varlen

HEADS, QK, VALUE = 2, 8, 16
INF = float("inf")


def work(num_q: list[int], num_k: list[int], *, causal: bool) -> MHAWork:
    ends = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (num_q, num_k)]
    return MHAWork(cu_q=ends[0], cu_k=ends[1], causal=causal)


@pytest.mark.parametrize(("num_k", "has_empty"), [([4, 0], True), ([4, 3], False)])
def test_queries_are_padded_and_the_lse_of_no_keys_is_minus_infinity(
    num_k: list[int], has_empty: bool
) -> None:
    calls = []

    def varlen(q, k, v, planned, scale):
        calls.append((q, k, v, planned, scale))
        lse = torch.arange(HEADS * len(q), dtype=torch.float32).view(HEADS, len(q))
        if has_empty:
            lse[:, 2:] = INF
        return v.new_zeros(len(q), HEADS, v.shape[-1]), lse

    backend = VarlenBackend(varlen, "stand-in", "cpu")
    planned = work([2, 1], num_k, causal=False)
    backend.plan_mha([work([1], [1], causal=True), planned])
    q = torch.randn(3, HEADS, QK)
    k, v = torch.randn(HEADS, sum(num_k), VALUE), torch.randn(HEADS, sum(num_k), VALUE)
    partial = backend.run_mha(planned, q, k, v, 0.5)

    (given,) = calls
    assert torch.equal(given[0], torch.nn.functional.pad(q, (0, VALUE - QK)))
    assert torch.equal(given[1], k.transpose(0, 1))
    assert torch.equal(given[2], v.transpose(0, 1))
    assert given[3].cu_k.tolist() == planned.cu_k.tolist()
    assert (given[3].max_q, given[3].max_k, given[4]) == (2, 4, 0.5)
    assert partial.out.shape == (3, HEADS, VALUE)
    want = [[0.0, 3.0], [1.0, 4.0], [-INF, -INF] if has_empty else [2.0, 5.0]]
    assert partial.lse.tolist() == want


def test_the_first_module_that_has_the_function_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType("a_flash_release")
    there.flash_attn_varlen_func = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_flash_release", there)
    assert find_varlen("no_such_release", "a_flash_release") == ("a_flash_release", print)
    reason, function = find_varlen("no_such_release", "sys")
    assert function is None
    assert reason.startswith("no_such_release not importable: ")
    assert "; sys not importable: " in reason
