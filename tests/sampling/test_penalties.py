from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_sim import make_request

from radix_mla.sampling.penalties import PenaltyCounts, adjust, changes_logits
from radix_mla.scheduler.sequence import Sequence

VOCAB = 20
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=200)


def make_sequence(prompt: list[int], **params) -> Sequence:
    return Sequence(make_request("r", prompt, 1000, **params), 0, namespace="", order=0)


def naive(scores, prompt, generated, *, repetition, presence, frequency):
    """The definitions, id by id (repetition: Keskar et al. 2019; the others: OpenAI)."""
    out = scores.astype(np.float64).copy()
    counts = Counter(generated)
    for token in set(prompt) | set(generated):
        out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
    for token, count in counts.items():
        out[token] -= frequency * count + presence
    return out


@given(
    prompt=tokens.filter(bool),
    generated=tokens,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -1.0]),
)
def test_penalties_are_the_naive_ones_step_by_step(
    prompt: list[int], generated: list[int], repetition: float, presence: float, frequency: float
) -> None:
    seq = make_sequence(
        prompt,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    scores = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
    for num in {0, len(generated) // 2, len(generated)}:
        for token in generated[seq.num_generated : num]:
            seq.append(token)
        adjusted = scores.copy()
        if changes_logits(seq):
            adjust(adjusted, seq)
        expected = naive(
            scores,
            prompt,
            seq.tokens[len(prompt) :].tolist(),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        np.testing.assert_allclose(adjusted, expected, rtol=1e-5, atol=1e-5)


@given(prompt=tokens.filter(bool), generated=st.lists(st.integers(0, 500), max_size=400))
def test_counts_grow_with_the_sequence(prompt: list[int], generated: list[int]) -> None:
    counts = PenaltyCounts(np.asarray(prompt, dtype=np.int32))
    for num in range(0, len(generated) + 1, 37):
        counts.update(np.asarray(prompt + generated[:num], dtype=np.int32))
        ids, times = counts.generated
        assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(generated[:num])
        assert set(counts.all_ids.tolist()) == set(prompt) | set(generated[:num])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.5, "seed": 3}, False),
        ({"logit_bias": {}}, False),
        ({"logit_bias": {1: 1.0}}, True),
        ({"min_tokens": 1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
    ],
)
def test_rows_are_copied_only_where_something_changes(params: dict, expected: bool) -> None:
    assert changes_logits(make_sequence([1], **params)) is expected


def test_many_distinct_ids_are_counted() -> None:
    counts = PenaltyCounts(np.asarray([1], dtype=np.int32))
    generated = [i for i in range(500) for _ in range(1 + i % 3)]
    counts.update(np.asarray([1, *generated], dtype=np.int32))
    ids, times = counts.generated
    assert dict(zip(ids.tolist(), times.tolist(), strict=True)) == Counter(generated)
