"""Steps queued before the one in front of them is read: the same tokens, nothing lost."""

from __future__ import annotations

import pytest
from support.fake_model import Oracle
from support.fake_runner import QueueSampler, make_fake_engine
from support.random_steps import RandomSteps
from support.scheduler_sim import VOCAB, make_request

from radix_mla.cache.lease import Lease
from radix_mla.cache.prefix_cache import PageCopy
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.errors import NoSpace
from radix_mla.request import FinishReason
from radix_mla.scheduler import scheduler
from radix_mla.scheduler.budget import MAX_LOGPROB_ROWS
from radix_mla.scheduler.policy import load_policy


def ahead(seeds: range, page_size: int) -> tuple[int, int]:
    """How many steps went ahead, and how many of them were not plain decode."""
    samplers = [RandomSteps(seed, page_size).run().sampler for seed in seeds]
    return sum(s.num_ahead for s in samplers), sum(s.num_mixed_ahead for s in samplers)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_requests(page_size: int) -> None:
    num, mixed = ahead(range(40), page_size)
    assert num > 800
    assert mixed > 40


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
def test_many_random_requests(page_size: int) -> None:
    num, mixed = ahead(range(100, 500), page_size)
    assert num > 10_000
    assert mixed > 500


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


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_nobody_passes_a_long_prompt_that_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Slots are what is scarce: the one that gets free during a step ahead is the long prompt's."""
    monkeypatch.setattr(scheduler, "MAX_AHEAD_TOKENS", 16)
    engine, _ = make_fake_engine(
        sampler=QueueSampler(), overlap=True, num_pages=200, max_num_seqs=2
    )
    engine.scheduler._admission._policy = load_policy(policy)
    for i in range(2):
        engine.add_request(make_request(f"first{i}", [i, 1], 10 + i, temperature=0.0, priority=1))
    for _ in range(4):
        engine.step()
    engine.add_request(make_request("long", list(range(20)), 5, temperature=0.0))
    order = []
    for i in range(6):
        engine.add_request(make_request(f"short{i}", [i, 2], 10, temperature=0.0, priority=1))
    while engine.has_work:
        order += [a.request_id for a in engine.step().admitted]
    assert order[0] == "long"


def test_tokens_go_on_in_another_order_than_they_were_drawn_in() -> None:
    """The last token of a prompt with logprobs comes behind decodes that were admitted later."""
    engine, _ = make_fake_engine(
        sampler=QueueSampler(), overlap=True, num_pages=200, max_num_batched_tokens=512
    )
    prompts = {"long": [i * 7 % VOCAB for i in range(MAX_LOGPROB_ROWS + 1)], "short": [5, 6, 7]}
    have: dict[str, list[int]] = {name: [] for name in prompts}
    engine.add_request(make_request("long", prompts["long"], 9, temperature=0.0, prompt_logprobs=0))
    engine.add_request(make_request("short", prompts["short"], 9, temperature=0.0))
    while engine.has_work:
        for output in engine.step().sequences:
            have[output.request_id] += output.token_ids
    for name, prompt in prompts.items():
        assert have[name] == Oracle(VOCAB).generate(prompt, 9, frozenset())
