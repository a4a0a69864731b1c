"""The sampler against naive implementations and against the distributions that it claims."""

from __future__ import annotations

import math
from collections.abc import Sequence as Items

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_sim import make_request

from radix_mla.sampling.sampler import Sampler
from radix_mla.sampling.uniform import uniform
from radix_mla.scheduler.batch import Sampled, Work
from radix_mla.scheduler.sequence import Sequence

VOCAB = 50


def make_sequence(
    prompt: list[int] | None = None, generated: Items[int] = (), **params
) -> Sequence:
    params.setdefault("temperature", 1.0)
    index = params.pop("index", 0)
    request = make_request("r", prompt or [1, 2, 3], params.pop("max_tokens", 100_000), **params)
    seq = Sequence(request, index, namespace="", order=0, eos_ids=frozenset({VOCAB - 1}))
    for token in generated:
        seq.append(token)
    return seq


def sample(logits: np.ndarray, *seqs: Sequence, num_sampleable: int | None = None) -> list[Sampled]:
    rows = np.atleast_2d(logits).astype(np.float32)
    sampler = Sampler(num_sampleable or rows.shape[1])
    work = [Work(seq, 1, True, True, i, 1, seq.num_tokens) for i, seq in enumerate(seqs)]
    return sampler.sample(torch.from_numpy(rows), work)


def random_logits(seed: int = 0, rows: int = 1, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (rows, VOCAB)).astype(np.float32)


def naive_probabilities(logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Over all ids: sorts everything, filter after filter."""
    p = np.exp((logits - logits.max()).astype(np.float64) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    order = np.argsort(-p, kind="stable")
    if 0 < top_k < len(p):
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    return p / p.sum()


def draws(logits: np.ndarray, num: int, **params) -> np.ndarray:
    """`num` draws at consecutive positions of one seeded sequence."""
    seq = make_sequence(seed=7, max_tokens=num + 1, **params)
    counts = np.zeros(VOCAB)
    for _ in range(num):
        token = sample(logits, seq)[0].token_id
        counts[token] += 1
        seq.append(0)  # the next position; what is there does not matter
    return counts


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    ],
)
def test_draws_follow_the_filtered_softmax(params: dict) -> None:
    logits = random_logits()[0]
    num = 3000
    counts = draws(logits, num, **params)
    expected = naive_probabilities(logits, **params) * num
    assert counts[expected == 0].sum() == 0, "nothing outside the filters"
    big = expected >= 5
    rest_seen, rest_due = counts[~big].sum(), expected[~big].sum()
    chi2 = ((counts[big] - expected[big]) ** 2 / expected[big]).sum()
    if rest_due > 0:
        chi2 += (rest_seen - rest_due) ** 2 / rest_due
    freedom = big.sum() - 1 + (rest_due > 0)
    # mean + 4 standard deviations of the chi-square distribution; the seed is fixed
    assert chi2 <= freedom + 4 * math.sqrt(2 * freedom)


@given(st.integers(0, 10**6), st.data())
def test_the_kept_set_is_the_naive_one(seed: int, data: st.DataObject) -> None:
    # equal values at the border are the hard part: few distinct logits
    rng = np.random.default_rng(seed)
    logits = rng.choice([0.0, 1.0, 2.0, 5.0, -30.0], VOCAB).astype(np.float32)
    params = {
        "top_k": data.draw(st.sampled_from([0, 1, 3, VOCAB - 1, VOCAB, 10**9])),
        "top_p": data.draw(st.sampled_from([1.0, 0.999, 0.5, 1e-9])),
        "min_p": data.draw(st.sampled_from([0.0, 0.2, 1.0])),
        "temperature": data.draw(st.sampled_from([0.5, 1.0, 50.0])),
    }
    expected = naive_probabilities(logits, **params)
    for position in range(5):
        seq = make_sequence([1] * (1 + position), seed=seed, **params)
        token = sample(logits, seq)[0].token_id
        assert expected[token] > 0


def test_a_large_flat_nucleus_is_cut_at_the_same_place() -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, 20_000).astype(np.float32)
    expected = naive_probabilities(logits, top_p=0.9)
    inside = np.flatnonzero(expected)
    order = np.argsort(-logits, kind="stable")
    border = order[len(inside) - 3 : len(inside) + 3]
    seen = set()
    for position in range(2000):
        seq = make_sequence([1] * (1 + position % 50), seed=position, top_p=0.9)
        seen.add(sample(logits, seq)[0].token_id)
    assert seen <= set(inside) | set(border[:4].tolist()), "but for rounding at the very border"
    assert len(seen) > 1000


def test_draws_at_the_ends_of_the_unit_interval_have_weight() -> None:
    from radix_mla.sampling.draw import draw

    logits = np.full(3000, -1e30, dtype=np.float32)
    logits[[5, 2900]] = 0.0
    params = make_sequence().params
    assert draw(logits, params, 0.0) == 5
    assert draw(logits, params, 1 - 2**-53) == 2900
    assert draw(logits, make_sequence(top_p=0.9).params, 1 - 2**-53) == 2900


def test_greedy_is_the_argmax_of_its_own_row() -> None:
    logits = random_logits(rows=8)
    seqs = [make_sequence(temperature=0.0) for _ in range(8)]
    tokens = [s.token_id for s in sample(logits, *seqs)]
    assert tokens == logits.argmax(axis=1).tolist()


def mixed_work() -> list[Work]:
    """Greedy, drawn, one that is due nothing, logprobs, a penalty, three rows for prompt logprobs;
    their rows of logits in that order.
    """
    plain = [
        make_sequence(temperature=0.0),
        make_sequence(temperature=0.7, top_p=0.9, seed=5),
        make_sequence(temperature=1.3, top_k=7, min_p=0.01, seed=(1 << 63) + 9, index=2),
        make_sequence(),
        make_sequence(logprobs=2),
        make_sequence(generated=[4, 4, 4], presence_penalty=1.5),
    ]
    work = [Work(seq, 1, i != 3, i != 3, i, 1, seq.num_tokens) for i, seq in enumerate(plain)]
    seq = make_sequence([1, 2, 3], temperature=0.0, prompt_logprobs=1)
    return [*work, Work(seq, 3, False, True, len(work), 3, seq.num_tokens)]


def test_rows_that_stay_on_a_device_are_sampled_as_on_the_host() -> None:
    logits = torch.from_numpy(random_logits(rows=9))
    logits[0, 7] = math.nan
    sampler = Sampler(VOCAB - 5)
    want = sampler.sample(logits, mixed_work())
    assert sampler._sample_on_device(logits[:, : VOCAB - 5], mixed_work()) == want
    assert want[0].nonfinite
    assert want[3].token_id is None


def test_a_draw_ahead_of_the_last_token_is_the_draw_after_it() -> None:
    logits = torch.from_numpy(random_logits(rows=2))
    params = {"temperature": 0.9, "top_p": 0.95, "seed": 17}
    sampler = Sampler(VOCAB)
    seqs = [make_sequence(**params) for _ in range(2)]
    before = [
        Work(seq, 1, True, True, i, 1, seq.num_tokens + 1, is_drawn=True)
        for i, seq in enumerate(seqs)
    ]
    seqs = [make_sequence(generated=[9], **params) for _ in range(2)]
    after = [Work(seq, 1, True, True, i, 1, seq.num_tokens) for i, seq in enumerate(seqs)]
    queued = sampler.queue(logits, before)
    assert queued.wait() == sampler.sample(logits, after)
    assert queued.tokens.tolist() == [sampled.token_id for sampled in queued.wait()]


@pytest.mark.gpu
def test_logits_may_be_on_a_gpu() -> None:
    logits = torch.from_numpy(random_logits(rows=9))
    sampler = Sampler(VOCAB - 5)
    assert sampler.sample(logits.cuda(), mixed_work()) == sampler.sample(logits, mixed_work())


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-4])
def test_a13_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(scale=100.0)
    seq = make_sequence(temperature=temperature)
    assert sample(logits, seq)[0].token_id == logits.argmax()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 2.0},
        {"temperature": 999_999.0},
        {"top_p": 1e-12},
        {"top_k": 2**31},
        {"min_p": 1.0},
        {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {3: 1e39, 4: -1e39, 5: math.inf, 6: -math.inf, 7: math.nan}},
        {"temperature": 0.0015, "logit_bias": {3: -100.0}},
    ],
)
def test_a13_absurd_values_give_a_token(params: dict) -> None:
    for scale in (1.0, 1e4):
        seq = make_sequence([1, 3, 3], [4, 4, 4], **params)
        with np.errstate(over="raise", invalid="raise"):
            (sampled,) = sample(random_logits(scale=scale), seq)
        assert sampled.error is None
        assert 0 <= sampled.token_id < VOCAB


def test_x10_a_huge_logit_bias_wins_or_bans() -> None:
    logits = random_logits()
    banned = {i: -1e39 for i in range(VOCAB) if i != 9}
    for bias in ({9: 1e39}, banned):
        for temperature in (0.0, 1.0):
            seq = make_sequence(temperature=temperature, logit_bias=bias)
            assert sample(logits, seq)[0].token_id == 9


def test_a05_ids_outside_the_vocabulary_change_nothing() -> None:
    logits = random_logits()
    outside = {-1: 50.0, VOCAB: 50.0, 2**31: 50.0}
    plain = make_sequence([1, 2], [3], temperature=0.0)
    odd = make_sequence(
        [1, 2],
        [3],
        temperature=0.0,
        logit_bias=outside,
        stop_token_ids=(VOCAB, 2**40),
        min_tokens=5,
    )
    assert sample(logits, plain)[0] == sample(logits, odd)[0]


def test_a05_the_padding_of_the_vocabulary_is_never_sampled() -> None:
    logits = random_logits()
    logits[:, 40:] += 100.0
    for params in ({"temperature": 0.0}, {}, {"top_k": 30}, {"logit_bias": {45: 100.0}}):
        seq = make_sequence([45, 46], [47], repetition_penalty=2.0, **params)
        (sampled,) = sample(logits, seq, num_sampleable=40)
        assert sampled.token_id < 40
    seq = make_sequence(temperature=0.0, logprobs=60)
    (sampled,) = sample(logits, seq, num_sampleable=40)
    assert max(sampled.logprobs.top_ids) < 40
    assert len(sampled.logprobs.top_ids) == 40


@pytest.mark.parametrize("others", [0, 1, 7])
def test_a_draw_does_not_depend_on_the_batch(others: int) -> None:
    logits = random_logits(rows=8)
    params = {"seed": 5, "top_p": 0.9}
    alone = sample(logits[3], make_sequence(**params))[0]
    batch = [make_sequence(seed=i, temperature=i % 2) for i in range(8)]
    batch[3] = make_sequence(**params)
    order = np.roll(np.arange(8), others)
    together = sample(logits[order], *[batch[i] for i in order])
    assert together[order.tolist().index(3)] == alone


def test_draws_are_keyed_by_seed_choice_and_position() -> None:
    keys = [(s, c, p) for s in (0, 1, 2**63, -1) for c in (0, 1, 2) for p in range(50)]
    values = [uniform(*key) for key in keys]
    assert len(set(values)) == len(values)
    assert values == [uniform(*key) for key in keys]
    assert all(0 <= value < 1 for value in values)
    assert abs(np.mean(values) - 0.5) < 0.03
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.1


def test_t15_choices_of_one_request_draw_apart() -> None:
    logits = np.zeros(VOCAB, dtype=np.float32)
    tokens = [sample(logits, make_sequence(seed=3, index=i))[0].token_id for i in range(20)]
    assert len(set(tokens)) > 10


def test_min_tokens_masks_every_way_to_end() -> None:
    logits = random_logits()
    logits[0, [VOCAB - 1, 7]] = 100.0
    for temperature in (0.0, 1.0):
        params = {"min_tokens": 2, "stop_token_ids": (7,), "temperature": temperature}
        for generated in ([], [1]):
            token = sample(logits, make_sequence(generated=generated, **params))[0].token_id
            assert token not in (7, VOCAB - 1)
        token = sample(logits, make_sequence(generated=[1, 2], **params))[0].token_id
        assert token in (7, VOCAB - 1)


def test_min_tokens_with_every_id_a_stop_id_still_gives_a_token() -> None:
    seq = make_sequence(min_tokens=3, stop_token_ids=tuple(range(VOCAB)))
    assert sample(random_logits(), seq)[0].error is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.5}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_fails_its_sequence_only(bad: float, params: dict) -> None:
    logits = random_logits(rows=3)
    logits[1, 17] = bad
    sampled = sample(logits, *[make_sequence(**params) for _ in range(3)])
    assert [s.nonfinite for s in sampled] == [False, True, False]
    assert sampled[1].token_id is None
    assert sampled[1].error is not None
    logits[1] = -math.inf
    assert sample(logits, *[make_sequence() for _ in range(3)])[1].nonfinite


def test_an_exception_fails_its_sequence_only() -> None:
    seqs = [make_sequence(), make_sequence(logit_bias={"x": 1.0}), make_sequence()]
    sampled = sample(random_logits(rows=3), *seqs)
    assert [s.error is None for s in sampled] == [True, False, True]
    assert "ValueError" in sampled[1].error
