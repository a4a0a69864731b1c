"""Steps queued before the one in front of them is read: the same tokens, nothing lost."""

from __future__ import annotations

import random

import pytest
from support.fake_model import Oracle
from support.fake_runner import QueueSampler, make_fake_engine
from support.scheduler_sim import VOCAB, make_request

from radix_mla.cache.lease import Lease
from radix_mla.cache.prefix_cache import PageCopy
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.errors import NoSpace
from radix_mla.request import FinishReason
from radix_mla.scheduler import scheduler

STOP = 11


def drive(seed: int, page_size: int) -> tuple[int, int]:
    """Random requests and aborts against the oracle, on a pool whose free pages are overwritten
    after each step; how many steps went ahead, and how many of them were not plain decode.
    """
    rng = random.Random(seed)
    sampler = QueueSampler()
    engine, runner = make_fake_engine(
        num_pages=rng.choice([60, 200]) * 4 // page_size,
        page_size=page_size,
        sampler=sampler,
        overlap=True,
        max_num_seqs=rng.choice([1, 3, 8]),
        max_num_batched_tokens=rng.choice([9, 32, 64]),
        commit_every=rng.choice([1, 5, 256]),
    )
    oracle, head = Oracle(VOCAB), [rng.randrange(VOCAB) for _ in range(30)]
    want: dict[str, list[int]] = {}
    have: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    pending = rng.randrange(4, 12)
    while pending or engine.has_work:
        if pending and rng.random() < 0.15:
            pending -= 1
            name = f"r{pending}"
            prompt = head[: rng.randrange(1, 30)] + [rng.randrange(VOCAB) for _ in range(3)]
            num = rng.randrange(1, 25)
            stops = (STOP,) if rng.random() < 0.5 else ()
            params = {"stop_token_ids": stops, "temperature": 0.0}
            if rng.random() < 0.1:
                params["logprobs"] = 1  # never queued
            if rng.random() < 0.1:
                params["prompt_logprobs"] = 1
            engine.add_request(make_request(name, prompt, num, **params))
            want[name] = oracle.generate(prompt, num, frozenset(stops))
            have[name] = []
        if have and rng.random() < 0.03:
            engine.abort(rng.choice(list(have)))
        events = engine.step() if engine.has_work else engine.take_events()
        engine.cache.audit()
        runner.model.poison(engine.cache.free_pages())
        for output in events.sequences:
            have[output.request_id] += output.token_ids
            if output.finish_reason:
                assert output.request_id not in ends, "ended twice"
                ends[output.request_id] = output.finish_reason
    assert ends.keys() == want.keys()
    for name, tokens in want.items():
        if ends[name] == FinishReason.ABORT:
            assert have[name] == tokens[: len(have[name])]
        else:
            assert have[name] == tokens, name
    counts = engine.cache.counts()
    assert counts.private == counts.protected == 0
    return sampler.num_ahead, sampler.num_mixed_ahead


def ahead(seeds: range, page_size: int) -> tuple[int, int]:
    counts = [drive(seed, page_size) for seed in seeds]
    return sum(count for count, _ in counts), sum(mixed for _, mixed in counts)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_requests(page_size: int) -> None:
    num, mixed = ahead(range(25), page_size)
    assert num > 300
    assert mixed > 60


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_many_random_requests(page_size: int) -> None:
    num, mixed = ahead(range(100, 900), page_size)
    assert num > 10_000
    assert mixed > 1000


def test_a_failing_step_fails_its_sequences_once() -> None:
    engine, runner = make_fake_engine(sampler=QueueSampler(), overlap=True)
    engine.add_request(make_request("a", [1, 2, 3], 20, temperature=0.0))

    def fault(plan: StepPlan, result: StepResult) -> None:
        if runner.num_steps == 5:
            raise RuntimeError("broken")

    runner.fault = fault
    ends = []
    while engine.has_work:
        ends += [o for o in engine.step().sequences if o.finish_reason]
        engine.cache.audit()
    assert [(o.finish_reason, "broken" in (o.error or "")) for o in ends] == [("error", True)]
    engine.add_request(make_request("b", [1, 2, 3], 4, temperature=0.0))
    while engine.has_work:
        ends += [o for o in engine.step().sequences if o.finish_reason]
    assert ends[-1].finish_reason == FinishReason.LENGTH


def test_what_the_host_must_see_is_never_queued() -> None:
    sampler = QueueSampler()
    engine, _ = make_fake_engine(sampler=sampler, overlap=True)
    engine.add_request(make_request("a", [1, 2, 3], 9, temperature=0.0, logprobs=1))
    while engine.has_work:
        engine.step()
    assert sampler.num_ahead == 0


def test_without_a_page_the_next_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = QueueSampler()
    engine, _ = make_fake_engine(sampler=sampler, overlap=True)
    grow, refused = engine.cache.grow, []

    def full_once(lease: Lease, num_tokens: int) -> list[PageCopy]:
        if sampler.num_ahead == 3 and not refused:
            refused.append(num_tokens)
            raise NoSpace(1, 0)
        return grow(lease, num_tokens)

    monkeypatch.setattr(engine.cache, "grow", full_once)
    engine.add_request(make_request("a", [1, 2, 3], 12, temperature=0.0))
    have: list[int] = []
    while engine.has_work:
        have += [token for o in engine.step().sequences for token in o.token_ids]
        engine.cache.audit()
    assert have == Oracle(VOCAB).generate([1, 2, 3], 12, frozenset())
    assert refused
    assert sampler.num_ahead > 3
    assert engine.stats().retractions == 0


def test_new_requests_join_a_step_that_is_queued_ahead() -> None:
    """And none of them makes the device wait: every step but the first is planned ahead."""
    sampler = QueueSampler()
    engine, runner = make_fake_engine(sampler=sampler, overlap=True)
    have: dict[str, list[int]] = {name: [] for name in "abc"}
    prompts = {name: [ord(name) % VOCAB, *range(9)] for name in have}
    waiting = list(have)
    while engine.has_work or waiting:
        if waiting and runner.num_steps % 4 == 0:
            name = waiting.pop(0)
            engine.add_request(make_request(name, prompts[name], 20, temperature=0.0))
        for output in engine.step().sequences:
            have[output.request_id] += output.token_ids
    assert sampler.num_mixed_ahead == 2
    assert sampler.num_ahead == runner.num_steps - 1
    for name, tokens in have.items():
        assert tokens == Oracle(VOCAB).generate(prompts[name], 20, frozenset())


def test_a_long_prompt_gets_the_next_step_that_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are queued ahead are short; they may not keep it out."""
    monkeypatch.setattr(scheduler, "MAX_AHEAD_TOKENS", 8)
    sampler = QueueSampler()
    engine, runner = make_fake_engine(sampler=sampler, overlap=True, num_pages=100)
    engine.add_request(make_request("decode", [1, 2, 3], 200, temperature=0.0))
    for _ in range(5):
        engine.step()
    engine.add_request(make_request("long", list(range(20)), 5, temperature=0.0))
    before = runner.num_steps
    while not engine.step().admitted:
        assert runner.num_steps - before < 4
    assert sampler.num_mixed_ahead == 0


def test_one_that_the_host_must_see_may_join_ahead() -> None:
    """The step is queued; its tokens are chosen when it is booked, and nothing goes ahead of it."""
    sampler = QueueSampler()
    engine, _ = make_fake_engine(sampler=sampler, overlap=True)
    engine.add_request(make_request("a", [1, 2, 3], 20, temperature=0.0))
    for _ in range(4):
        engine.step()
    num = sampler.num_ahead
    engine.add_request(make_request("b", [4, 5], 3, temperature=0.0, logprobs=1))
    logprobs: list[object] = []
    have: dict[str, list[int]] = {"a": [], "b": []}
    while engine.has_work:
        for output in engine.step().sequences:
            have[output.request_id] += output.token_ids
            logprobs += output.logprobs or []
    assert len(logprobs) == 3
    assert have["b"] == Oracle(VOCAB).generate([4, 5], 3, frozenset())
    assert sampler.num_ahead > num, "after b has ended"


def test_prompts_that_wait_for_the_budget_keep_steps_apart() -> None:
    sampler = QueueSampler()
    engine, _ = make_fake_engine(
        sampler=sampler, overlap=True, max_num_batched_tokens=6, max_num_seqs=4
    )
    names = {"a": 2, "b": 30, "c": 31}
    for name, num in names.items():
        prompt = [(i * 7 + num) % VOCAB for i in range(num)]
        engine.add_request(make_request(name, prompt, 9, temperature=0.0))
    ends = []
    while engine.has_work:
        ends += [o.request_id for o in engine.step().sequences if o.finish_reason]
        engine.cache.audit()
    assert sorted(ends) == ["a", "b", "c"]
