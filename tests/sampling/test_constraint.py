"""Constraint and MaskBuilder over a matcher that allows one string of ids, then EOS."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from support.scheduler_sim import make_request

from radix_mla.request import Grammar
from radix_mla.sampling.constraint import Constraint, MaskBuilder
from radix_mla.sampling.sampler import Sampler
from radix_mla.scheduler.batch import Work
from radix_mla.scheduler.sequence import Sequence

VOCAB, EOS = 40, 1
SCRIPT = (7, 33, 7)


class ScriptMatcher:
    def __init__(self, gate: threading.Event | None) -> None:
        self.place = 0
        self.gate = gate

    def accept(self, token_id: int) -> bool:
        fits = token_id in self._next()
        self.place += fits
        return fits

    def fill(self, mask: np.ndarray) -> None:
        if self.gate is not None:
            self.gate.wait(30)
        bits = np.zeros(64, dtype=np.uint8)
        bits[sorted(self._next())] = 1
        mask[:] = np.packbits(bits, bitorder="little").view("<i4")

    def reset(self) -> None:
        self.place = 0

    def _next(self) -> set[int]:
        return {SCRIPT[self.place]} if self.place < len(SCRIPT) else {EOS, 5}


@dataclass
class FakeGrammar:
    gate: threading.Event | None = None
    eos_ids: tuple[int, ...] = (EOS,)
    forbidden: np.ndarray = field(default_factory=lambda: np.zeros(2, dtype=np.int32))

    def matcher(self) -> ScriptMatcher:
        return ScriptMatcher(self.gate)


def sequence(gate: threading.Event | None = None, **params) -> Sequence:
    params = {"temperature": 0.0, "grammar": Grammar("regex", "x")} | params
    request = make_request("r", [2, 3], 20, **params)
    seq = Sequence(request, 0, namespace="", order=0, eos_ids=frozenset({EOS}))
    seq.constraint = Constraint(FakeGrammar(gate))  # type: ignore[arg-type]
    return seq


def work(*sequences: Sequence) -> list[Work]:
    return [Work(seq, 1, True, True, row, 1, seq.num_tokens) for row, seq in enumerate(sequences)]


def logits(rows: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(rows, VOCAB) * 5


def generate(sampler: Sampler, seq: Sequence, limit: int = 10) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit:
        (sampled,) = sampler.sample(logits(1), work(seq))
        assert sampled.error is None
        tokens.append(sampled.token_id)
        if seq.append(sampled.token_id) is not None:
            break
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_the_grammar_allows_is_sampled(temperature: float) -> None:
    tokens = generate(Sampler(VOCAB), sequence(temperature=temperature, seed=1))
    assert tuple(tokens[:3]) == SCRIPT
    assert tokens[3] in (EOS, 5)


def test_ignore_eos_takes_the_end_only_where_nothing_else_can_follow() -> None:
    seq = sequence(ignore_eos=True)
    tokens = generate(Sampler(VOCAB), seq)
    assert tokens == [*SCRIPT, *[5] * 7]
    assert EOS in seq.stop_ids, "an end that is sampled after all ends the sequence"


def test_min_tokens_holds_the_end_back_while_something_else_can_follow() -> None:
    tokens = generate(Sampler(VOCAB), sequence(min_tokens=8, logit_bias={EOS: 100.0}))
    assert tokens == [*SCRIPT, 5, 5, 5, 5, 5, EOS]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    seq = sequence(logprobs=2)
    (sampled,) = Sampler(VOCAB).sample(logits(1), work(seq))
    expected = torch.log_softmax(logits(1)[0], -1)
    assert sampled.token_id == SCRIPT[0]
    assert sampled.logprobs.logprob == pytest.approx(float(expected[SCRIPT[0]]), abs=1e-4)
    assert sampled.logprobs.top_ids == expected.topk(2).indices.tolist()


def test_a_token_that_was_not_booked_is_forgotten() -> None:
    sampler, seq = Sampler(VOCAB), sequence()
    for _ in range(3):  # as when a step fails after sampling
        (sampled,) = sampler.sample(logits(1), work(seq))
        assert sampled.token_id == SCRIPT[0]


def test_neighbours_are_not_constrained() -> None:
    free = sequence(grammar=None)
    free.constraint = None
    bound = sequence()
    first, second = Sampler(VOCAB).sample(logits(2), work(free, bound))
    assert first.token_id == int(logits(2)[0].argmax())
    assert second.token_id == SCRIPT[0]


def test_a_mask_that_takes_too_long_fails_its_own_sequence_only() -> None:
    gate = threading.Event()
    stuck, fine = sequence(gate), sequence()
    sampler = Sampler(VOCAB)
    sampler._masks = MaskBuilder(timeout_s=0.05)
    try:
        first, second = sampler.sample(logits(2), work(stuck, fine))
        assert "mask" in first.error
        assert second.error is not None or second.token_id == SCRIPT[0]
        (third,) = sampler.sample(logits(1), work(fine))
        assert third.token_id == SCRIPT[0]
    finally:
        gate.set()


def test_where_nothing_can_follow_the_sequence_fails() -> None:
    seq = sequence()
    assert seq.constraint is not None
    seq.constraint.advance(np.asarray(SCRIPT, dtype=np.int32))
    seq.constraint._mask[:] = 0
    with pytest.raises(ValueError, match="none of the vocabulary"):
        seq.constraint.apply(np.zeros(VOCAB, dtype=np.float32), ignore_eos=False)


def test_a_foreign_token_is_a_problem_not_a_crash() -> None:
    seq = sequence()
    assert seq.constraint is not None
    seq.constraint.advance(np.asarray([9], dtype=np.int32))
    assert not seq.constraint.is_ready(1)
    assert "token 9" in seq.constraint.problem
