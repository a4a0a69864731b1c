from __future__ import annotations

import numpy as np
import pytest
import torch
from support.scheduler_sim import make_request

from radix_mla.sampling.logprobs import token_logprobs, top_ids
from radix_mla.sampling.sampler import Sampler
from radix_mla.scheduler.batch import Work
from radix_mla.scheduler.sequence import Sequence

VOCAB = 64


def logits(rows: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("scale", [0.1, 3.0, 1000.0])
@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, 500])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(scale: float, k: int) -> None:
    row = logits(1, scale)[0]
    expected = torch.log_softmax(row.double(), dim=0)
    order = torch.argsort(row, descending=True, stable=True)
    for token in (0, int(order[0]), int(order[-1])):
        entry = token_logprobs(row.numpy(), token, k)
        assert entry.logprob == pytest.approx(float(expected[token]), rel=1e-5, abs=1e-4)
        assert order[entry.rank - 1] == token
        assert entry.top_ids == order[:k].tolist()
        np.testing.assert_allclose(entry.top_logprobs, expected[entry.top_ids], 1e-5, 1e-4)


def test_equal_logits_are_ranked_by_id() -> None:
    scores = np.asarray([1, 3, 3, 0, 3], dtype=np.float32)
    assert top_ids(scores, 2).tolist() == [1, 2]
    assert top_ids(scores, 4).tolist() == [1, 2, 4, 0]
    assert token_logprobs(scores, 4, 0).rank == 1


def test_logprobs_ignore_temperature_and_penalties() -> None:
    rows = logits(1)
    found = []
    for params in ({}, {"temperature": 0.1, "repetition_penalty": 5.0, "top_k": 1}):
        request = make_request("r", [1, 2], 5, seed=3, logprobs=3, **params)
        seq = Sequence(request, 0, namespace="", order=0)
        (sampled,) = Sampler(VOCAB).sample(rows, [Work(seq, 1, True, True, 0, 1, seq.num_tokens)])
        found.append(sampled.logprobs)
        expected = torch.log_softmax(rows[0], 0)[sampled.token_id]
        assert sampled.logprobs.logprob == pytest.approx(float(expected), abs=1e-5)
    assert found[0].top_logprobs == found[1].top_logprobs


def test_t14_prompt_logprobs_are_those_of_the_next_prompt_token() -> None:
    prompt = [5, 9, 2, 40]
    rows = logits(4)
    request = make_request("r", prompt, 5, temperature=0.0, prompt_logprobs=2)
    seq = Sequence(request, 0, namespace="", order=0)
    sampler = Sampler(VOCAB)
    (first,) = sampler.sample(rows[:3], [Work(seq, 3, False, False, 0, 3, seq.num_tokens)])
    assert first.token_id is None
    seq.add_prompt_logprobs(1, first.prompt_logprobs)
    seq.advance(3)
    assert not seq.needs_prompt_logprobs
    (last,) = sampler.sample(rows[3:], [Work(seq, 1, False, True, 0, 1, seq.num_tokens)])
    assert last.token_id == int(rows[3].argmax())
    assert seq.prompt_logprobs[0] is None
    expected = torch.log_softmax(rows, dim=1)
    for position in (1, 2, 3):
        entry = seq.prompt_logprobs[position]
        value = float(expected[position - 1, prompt[position]])
        assert entry.logprob == pytest.approx(value, abs=1e-5)


def test_prompt_logits_that_are_not_finite_fail_the_sequence() -> None:
    rows = logits(3)
    rows[0, 3] = torch.nan
    request = make_request("r", [1, 2, 3], 5, prompt_logprobs=0)
    seq = Sequence(request, 0, namespace="", order=0)
    (sampled,) = Sampler(VOCAB).sample(rows, [Work(seq, 3, False, True, 0, 3, seq.num_tokens)])
    assert sampled.nonfinite
