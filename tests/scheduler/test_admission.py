"""Who starts when: room, order, budgets, and what a miss is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scheduler_sim import Simulation, make_request

from radix_mla.errors import ContextOverflow, InvalidRequest
from radix_mla.scheduler.policy import load_policy
from radix_mla.scheduler.scheduler import Scheduler


def missed(sim: Simulation, request_id: str, index: int = 0) -> dict[str, int]:
    admitted = sim.outcomes[request_id, index].admitted
    assert admitted is not None
    return admitted.missed


def test_s02_a_prompt_above_the_pool_is_refused_at_once_and_the_next_is_served() -> None:
    sim = Simulation(num_pages=250, page_size=4, max_model_len=4096)
    with pytest.raises(ContextOverflow) as overflow:
        sim.submit("huge", [1] * 1500, 4)
    assert overflow.value.limit == 997
    assert "maximum context length is 997 tokens" in str(overflow.value)
    sim.submit("small", [1, 2, 3], 4)
    sim.run()
    assert sim.reasons() == {"length": 1}


def test_the_longest_prompt_that_fits_is_served() -> None:
    sim = Simulation(num_pages=10, page_size=4, max_model_len=37)
    sim.submit("r", [1] * 36, 1)
    sim.run()
    with pytest.raises(ContextOverflow, match="38 tokens"):
        sim.submit("over", [1] * 36, 2)


@pytest.mark.parametrize(
    ("prompt", "fields"), [([], {}), ([1], {"max_tokens": 0}), ([1], {"n": 0})]
)
def test_what_makes_no_sequence_is_refused(prompt: list[int], fields: dict) -> None:
    sim = Simulation()
    with pytest.raises(InvalidRequest):
        sim.scheduler.add(make_request("r", prompt, **fields))
    assert not sim.scheduler.has_work


def test_a_request_id_in_use_is_refused_and_free_again_after_its_end() -> None:
    sim = Simulation()
    sim.submit("r", [1, 2], 1)
    with pytest.raises(InvalidRequest, match="in use"):
        sim.scheduler.add(make_request("r", [1, 2]))
    sim.run()
    sim.submit("r", [1, 2], 1)
    sim.run()


def test_s06_small_ones_pass_a_big_one_that_does_not_fit_but_not_for_ever() -> None:
    sim = Simulation(num_pages=100, page_size=4, max_num_batched_tokens=512, max_skips=5)
    sim.submit("running", [1] * 300, 20)  # 80 of 100 pages
    sim.step()
    sim.submit("big", [2] * 200, 2)
    for i in range(20):
        sim.submit(f"small{i}", [3 + i] * 2, 2)
    sim.step()
    started = [k for k, outcome in sim.outcomes.items() if outcome.admitted is not None]
    assert started == [("running", 0), *((f"small{i}", 0) for i in range(5))]
    sim.run()
    big = sim.outcomes["big", 0].first_step
    assert all(sim.outcomes[f"small{i}", 0].first_step >= big for i in range(5, 20))


def test_s06_no_more_than_so_many_that_do_not_fit_are_looked_at_in_a_step() -> None:
    sim = Simulation(num_pages=100, page_size=4, max_num_batched_tokens=512, max_num_seqs=100)
    sim.submit("running", [1] * 300, 60)
    sim.step()
    for i in range(40):
        sim.submit(f"big{i}", [2 + i] * 200, 2)
    sim.submit("small", [90, 91], 2)
    sim.step()
    assert sim.outcomes["small", 0].admitted is None
    sim.run()


def test_s07_huge_prompts_queue_instead_of_thrashing() -> None:
    sim = Simulation(num_pages=100, page_size=4, max_num_batched_tokens=64)
    for i in range(8):
        sim.submit(f"r{i}", [i] * 350, 4)
    while sim.scheduler.has_work:
        sim.step()
        assert len(sim.scheduler.running) <= 1
    sim.check_outcomes()
    assert sim.scheduler.counters.retractions == 0


def test_s07_tiny_prompts_with_a_huge_max_tokens_run_together() -> None:
    sim = Simulation(num_pages=100, page_size=16, max_num_seqs=50, max_num_batched_tokens=2048)
    for i in range(50):
        prompt = [i] * 8
        sim.submit(f"r{i}", prompt, sim.limits.max_model_len - 8)
    sim.step()
    assert len(sim.scheduler.running) >= 40


def test_where_a_partial_pages_source_does_not_fit_the_hit_ends_at_the_page_before() -> None:
    # All 8 pages are needed, so there is none for the source, which is locked until the commit.
    sim = Simulation(num_pages=8, page_size=4, max_model_len=100)
    sim.submit("a", [1, 2, 3, 4, 5, 6, 7], 1)
    sim.run()
    limits = replace(sim.limits, num_pages=9)  # to let a prompt of the whole pool in
    sim.scheduler = Scheduler(sim.cache, limits, load_policy("fcfs"))
    sim.submit("b", [1, 2, 3, 4, 5, 6, *range(40, 66)], 1)
    sim.run()
    assert sim.outcomes["b", 0].admitted.num_cached_tokens == 4
    assert len(sim.outcomes["b", 0].tokens) == 1


@pytest.mark.parametrize(("reserve_steps", "starts"), [(0, True), (4, False)])
def test_admission_leaves_room_for_the_running_ones_to_grow(
    reserve_steps: int, starts: bool
) -> None:
    sim = Simulation(num_pages=20, page_size=4, min_reserve_steps=reserve_steps)
    sim.submit("a", [1] * 20, 30)
    sim.submit("b", [2] * 9, 30)
    sim.step()
    sim.submit("c", [3] * 33, 2)  # 9 of the 11 pages that are left
    sim.step()
    assert (sim.outcomes["c", 0].admitted is not None) == starts
    sim.run()


def test_a_step_holds_decodes_first_and_no_more_than_its_budget() -> None:
    sim = Simulation(max_num_batched_tokens=10, num_pages=100)
    for i in range(3):
        sim.submit(f"d{i}", [i], 20)
    sim.step()
    sim.submit("long", [9] * 30, 2)
    work = sim.step().work
    assert [w.num_tokens for w in work] == [1, 1, 1, 7]
    assert [w.is_decode for w in work] == [True, True, True, False]
    sim.run()


def test_no_more_sequences_run_than_the_budget_has_tokens() -> None:
    sim = Simulation(max_num_batched_tokens=3, num_pages=100)
    for i in range(5):
        sim.submit(f"d{i}", [i, i], 10)
    while sim.scheduler.has_work:
        decodes = sum(not seq.is_prefilling for seq in sim.scheduler.running)
        scheduled = sim.step()
        assert len(sim.scheduler.running) <= 3
        assert sum(w.is_decode for w in scheduled.work) == decodes, "each step decodes all"


def test_waiting_is_counted_by_reason() -> None:
    sim = Simulation(max_num_seqs=1, num_pages=20)
    sim.submit("a", [1, 2, 3], 30)
    sim.submit("b", [4, 5, 6], 3)
    sim.step()
    assert sim.scheduler.num_waiting() == {"slots": 1, "budget": 0, "sibling": 0, "grammar": 0}
    assert sim.scheduler.waiting_tokens == 3
    sim.abort("b")
    assert sim.scheduler.num_waiting() == {"slots": 0, "budget": 0, "sibling": 0, "grammar": 0}
    assert sim.scheduler.waiting_tokens == 0
    sim.run()


def test_r05_a_full_hit_recomputes_one_token_at_every_residue() -> None:
    for page_size in (1, 4, 16):
        for length in (1, 2, 15, 16, 17, 32, 33):
            sim = Simulation(num_pages=400 // page_size, page_size=page_size)
            prompt = [50 + i for i in range(length)]
            for i in range(4):
                sim.submit(f"r{i}", prompt, 4)
                sim.run()
            assert missed(sim, "r3") == {"last_token": 1}
            cached = [sim.outcomes[f"r{i}", 0].admitted.num_cached_tokens for i in range(4)]
            assert cached == [0, length - 1, length - 1, length - 1]
            sim.submit("longer", [*prompt, 96, 96], 4)
            sim.run()
            assert sim.outcomes["longer", 0].admitted.num_cached_tokens >= length


def test_r12_the_whole_match_counts_whatever_the_chunk() -> None:
    for length in (40, 160):
        sim = Simulation(max_num_batched_tokens=16, num_pages=100)
        sim.submit("a", list(range(40)) * (length // 40), 1)
        sim.run()
        before = sim.model.num_computed_tokens
        sim.submit("b", list(range(40)) * (length // 40), 1)
        sim.run()
        assert sim.model.num_computed_tokens - before == 1
        assert sim.outcomes["b", 0].admitted.num_cached_tokens == length - 1


def test_misses_are_told_apart() -> None:
    sim = Simulation(num_pages=200, page_size=4)
    prompt = [i % 90 for i in range(64)]
    sim.submit("first", prompt, 1)
    sim.run()
    assert missed(sim, "first") == {"new": 64}
    sim.submit("again", prompt, 1)
    sim.run()
    assert missed(sim, "again") == {"last_token": 1}
    sim.submit("elsewhere", prompt, 1, namespace="tenant")
    sim.run()
    assert missed(sim, "elsewhere")["namespace"] > 0
    sim.cache.flush("")
    sim.submit("evicted", prompt, 1)
    sim.run()
    assert missed(sim, "evicted")["evicted"] > 0
    sim.submit("unstored", prompt, 1, store=False)
    sim.run()
    assert missed(sim, "unstored") == {"not_stored": 64}
    sim.submit("logprobs", prompt, 1, prompt_logprobs=0)
    sim.run()
    assert missed(sim, "logprobs") == {"disabled": 63, "last_token": 1}


def test_without_a_prefix_cache_nothing_hits_and_nothing_stays() -> None:
    sim = Simulation(enable_prefix_cache=False)
    for i in range(2):
        sim.submit(f"r{i}", [1, 2, 3, 4, 5], 4)
        sim.run()
        assert missed(sim, f"r{i}") == {"disabled": 5}
    counts = sim.cache.counts()
    assert counts.free == counts.total


def test_nothing_stays_of_a_request_that_is_not_stored() -> None:
    sim = Simulation(num_pages=100)
    sim.submit("shared", [1, 2, 3, 4, 5, 6], 4)
    sim.run()
    before = sim.cache.counts()
    sim.submit("private", [1, 2, 3, 4, 5, 6, 7], 4, store=False, n=2)
    sim.run()
    assert sim.cache.counts() == before
    assert missed(sim, "private", 0) == {"not_stored": 7}
    assert missed(sim, "private", 1) == {"not_stored": 1}, "it attaches to choice 0"
    sim.submit("next", [1, 2, 3, 4, 5, 6, 7], 4)
    sim.run()
    assert sim.outcomes["next", 0].admitted.num_cached_tokens == 6


def test_prefill_tokens_are_told_by_source() -> None:
    sim = Simulation(num_pages=100)
    sim.submit("a", list(range(50)), 3)
    sim.run()
    sim.submit("b", [*range(50), 1, 2], 3)
    sim.run()
    assert sim.scheduler.counters.prefill_tokens == {"computed": 52, "recomputed": 0, "device": 50}


def test_t14_prompt_logprobs_take_no_more_than_256_rows_of_logits_a_step() -> None:
    sim = Simulation(num_pages=400, max_num_batched_tokens=1000)
    for i in range(3):
        sim.submit(f"r{i}", [i] * 300, 2, prompt_logprobs=0)
    sim.submit("plain", [9] * 300, 2)
    while sim.scheduler.has_work:
        scheduled = sim.step()
        assert sum(w.num_logits for w in scheduled.work if not w.is_decode) <= 256 + 1
    sim.check_outcomes()
    assert sim.outcomes["plain", 0].first_step == 1, "others are not held up by it"
