"""When pages run out: who gives way, how often, and that nothing changes by it."""

from __future__ import annotations

import pytest
from support.scheduler_sim import Simulation, make_request

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.scheduler.sequence import Status


def test_s04_retracting_every_third_step_changes_no_token() -> None:
    for page_size, chunk in ((1, 16), (16, 16), (4, 7)):
        sim = Simulation(
            num_pages=1600 // page_size,
            page_size=page_size,
            max_num_batched_tokens=chunk,
            max_retractions=10**6,
        )
        for i in range(20):
            sim.submit(f"r{i}", [i, *range(i % 23)], 30)
        while sim.scheduler.has_work:
            sim.step()
            if sim.num_steps % 3 == 0 and sim.scheduler.running:
                sim.scheduler._life.retract(sim.scheduler.running[-1])
            assert sim.num_steps < 3000
        sim.check_outcomes()
        assert sim.scheduler.counters.retractions > 20


def test_the_one_with_the_least_sunk_work_gives_way_and_never_the_oldest() -> None:
    sim = Simulation(num_pages=16, page_size=4, max_num_batched_tokens=64, min_reserve_steps=0)
    sim.submit("oldest", [1] * 4, 30)
    sim.submit("much", [2] * 24, 30)
    sim.submit("little", [3] * 10, 30)
    while not sim.scheduler.counters.retractions:
        sim.step()
    assert [seq.request_id for seq in sim.scheduler.waiting] == ["little"]
    assert sim.scheduler.waiting[0].status is Status.WAITING
    sim.run()


def test_a_retracted_sequence_returns_only_when_its_whole_length_fits() -> None:
    sim = Simulation(num_pages=16, page_size=4, max_num_batched_tokens=64, min_reserve_steps=0)
    sim.submit("a", [1] * 20, 24)
    sim.submit("b", [2] * 20, 24)
    while not sim.scheduler.counters.retractions:
        sim.step()
    (retracted,) = sim.scheduler.waiting
    needed = -(-retracted.num_tokens // 4)
    while sim.scheduler.waiting:
        available = sim.cache.available_pages()
        sim.step()
        assert sim.scheduler.waiting or available >= needed
    sim.run()


def test_p01_recomputed_tokens_are_no_hits_and_are_counted_apart() -> None:
    sim = Simulation(num_pages=16, page_size=4, max_num_batched_tokens=64, min_reserve_steps=0)
    for i in range(5):
        sim.submit(f"r{i}", [i * 10 + j for j in range(10)], 30)
    sim.run()
    counters = sim.scheduler.counters
    assert counters.retractions > 0
    assert counters.prefill_tokens["recomputed"] > 0
    assert counters.prefill_tokens["device"] == 0
    assert counters.prefill_tokens["computed"] == 50
    assert all(outcome.admitted.num_cached_tokens == 0 for outcome in sim.outcomes.values())


@pytest.mark.parametrize("max_retractions", [0, 1, 2])
def test_no_request_is_retracted_more_often_than_allowed(max_retractions: int) -> None:
    sim = Simulation(
        num_pages=16,
        page_size=4,
        max_num_batched_tokens=64,
        min_reserve_steps=0,
        max_retractions=max_retractions,
    )
    for i in range(10):
        sim.submit(f"r{i}", [i] * 6, 40)
    sim.run()
    assert sim.max_retractions_seen == max_retractions


def test_a_lone_request_that_outgrows_the_pool_ends_with_length() -> None:
    sim = Simulation(num_pages=4, page_size=4, max_model_len=1000)
    sim.submit("r", [1, 2, 3], 100)
    sim.run()
    outcome = sim.outcomes["r", 0]
    assert outcome.finish_reason == "length"
    assert len(outcome.tokens) == 16 - 3 + 1, "all 16 rows are used"


def test_one_that_can_never_fit_ends_instead_of_waiting_for_ever() -> None:
    sim = Simulation(num_pages=100, cache=PrefixCache(5, 4, seed=1))  # less than promised
    sim.scheduler.add(make_request("r", [1] * 50))
    sim.scheduler.schedule(1.0)
    (output,) = sim.scheduler.take_events().sequences
    assert output.finish_reason == "length"
    assert not sim.scheduler.has_work


def test_two_that_outgrow_the_pool_end_one_after_the_other() -> None:
    sim = Simulation(num_pages=6, page_size=4, max_model_len=1000)
    sim.submit("a", [1, 2, 3], 100)
    sim.submit("b", [4, 5, 6], 100)
    sim.run()
    assert sim.reasons() == {"length": 2}


def test_one_that_may_not_be_retracted_again_starts_only_where_all_fit_for_good() -> None:
    sim = Simulation(num_pages=16, page_size=4, max_retractions=0, max_num_batched_tokens=64)
    sim.submit("a", [1] * 8, 24)  # 8 pages at its longest, and one for a source
    sim.submit("b", [2] * 8, 24)
    sim.step()
    assert [seq.request_id for seq in sim.scheduler.running] == ["a"]
    sim.run()
    assert sim.scheduler.counters.retractions == 0


def test_one_that_is_retracted_right_after_its_admission_waits_once() -> None:
    sim = Simulation()
    sim.submit("a", [1] * 8, 3)
    sim.submit("b", [2] * 8, 3)
    scheduled = sim.scheduler.schedule(1.0)
    sim.scheduler.fail_step(scheduled, RuntimeError("x"))
    sim.failed |= {("a", 0), ("b", 0)}
    sim.submit("c", [3] * 8, 3)
    sim.submit("d", [4] * 8, 3)
    sim.scheduler.schedule(2.0)
    for seq in list(sim.scheduler.running):
        sim.scheduler._life.retract(seq)
    assert [seq.request_id for seq in sim.scheduler.waiting] == ["c", "d"]
    sim._take_events()
    sim.run()
