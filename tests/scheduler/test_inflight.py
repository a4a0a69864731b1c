"""In-flight sharing (R21): one computes, the others wait and attach, however the leader leaves."""

from __future__ import annotations

import pytest
from support.scheduler_sim import Simulation

PREFIX = [*range(90), 5, 6, 7, 8, 9, 10]  # 96 tokens
CHUNK = 32


def simulate(**fields) -> Simulation:
    fields = {"num_pages": 200, "max_num_batched_tokens": CHUNK, "max_num_seqs": 80} | fields
    return Simulation(**fields)


def start_leader_and_waiter(sim: Simulation, **fields) -> None:
    """After it the leader has computed one chunk of three and "w" waits."""
    sim.submit("leader", [*PREFIX, 1], 3, **fields)
    sim.step()
    sim.submit("w", [*PREFIX, 2], 3)
    sim.step()
    assert sim.scheduler.num_waiting()["sibling"] == 1
    assert sim.outcomes["w", 0].admitted is None


def cached(sim: Simulation, request_id: str, index: int = 0) -> int:
    admitted = sim.outcomes[request_id, index].admitted
    assert admitted is not None
    return admitted.num_cached_tokens


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("leader_is_aborted", [False, True])
def test_r21_a_common_prefix_is_computed_once(policy: str, leader_is_aborted: bool) -> None:
    sim = simulate(
        policy=policy, num_pages=600, page_size=16, max_num_batched_tokens=256, step_s=0.1
    )
    prefix = [i * i % 97 for i in range(2048)]
    for i in range(64):
        sim.submit(f"r{i}", [*prefix, i, i % 7], 1)
    for _ in range(4):
        sim.step()
    (leader,) = sim.scheduler.running
    if leader_is_aborted:
        sim.abort(leader.request_id)
    sim.run()
    assert sim.model.num_computed_tokens <= 2048 + 64 * 2
    cached = [outcome.admitted.num_cached_tokens for outcome in sim.outcomes.values()]
    assert sum(num < 2048 for num in cached) == 1 + leader_is_aborted


def test_the_waiter_starts_when_the_common_part_is_committed() -> None:
    sim = simulate()
    sim.submit("leader", [*PREFIX, *range(60)], 3)  # its own part takes two steps more
    sim.step()
    sim.submit("w", [*PREFIX, 2], 3)
    sim.step()
    sim.step()
    assert sim.outcomes["w", 0].admitted is None
    sim.step()
    assert sim.scheduler.running[0].is_prefilling, "the leader goes on with its own part"
    sim.step()
    assert cached(sim, "w") == len(PREFIX)
    sim.run()


def test_a_waiter_holds_no_page() -> None:
    sim = simulate()
    start_leader_and_waiter(sim)
    assert len(sim.cache._leases) == 1


@pytest.mark.parametrize("reason", ["abort", "stop"])
def test_when_the_leader_is_aborted_the_first_waiter_goes_on_from_its_rows(reason: str) -> None:
    sim = simulate()
    start_leader_and_waiter(sim)
    sim.submit("w2", [*PREFIX, 3], 3)
    sim.abort("leader", reason=reason)
    sim.step()
    assert cached(sim, "w") == 2 * CHUNK, "rows of completed chunks stay"
    assert sim.outcomes["w2", 0].admitted is None, "the first waiter is the leader now"
    sim.run()
    assert cached(sim, "w2") == len(PREFIX)
    assert sim.model.num_computed_tokens <= len(PREFIX) + 3 * 4


def test_when_the_leader_fails_its_bad_rows_are_not_shared() -> None:
    sim = simulate()
    start_leader_and_waiter(sim)
    sim.fail_next("leader")
    sim.step()
    sim.run()
    assert sim.outcomes["leader", 0].finish_reason == "error"
    assert cached(sim, "w") == 2 * CHUNK


def test_when_the_leader_is_retracted_the_waiter_takes_over() -> None:
    sim = simulate()
    start_leader_and_waiter(sim)
    sim.scheduler._life.retract(sim.scheduler.running[0])
    sim.step()
    assert [seq.request_id for seq in sim.scheduler.running] == ["leader"], "it came first"
    sim.run()
    assert cached(sim, "w") == len(PREFIX)


def test_when_the_leader_finishes_early_the_waiter_attaches() -> None:
    sim = simulate()
    sim.submit("leader", [*PREFIX, 1], 1)
    sim.submit("w", [*PREFIX, 2], 1)
    sim.run()
    assert cached(sim, "w") == len(PREFIX)


def test_nobody_waits_for_one_that_does_not_store() -> None:
    sim = simulate(max_num_batched_tokens=CHUNK * 8)
    sim.submit("leader", [*PREFIX, 1], 3, store=False)
    sim.submit("w", [*PREFIX, 2], 3)
    sim.step()
    assert cached(sim, "w") == 0
    sim.run()


def test_nobody_waits_for_one_that_was_flushed_away() -> None:
    # Prompt logprobs take 256 rows a step, so that budget is left beside the leader's chunk.
    sim = simulate(num_pages=400, max_num_batched_tokens=400)
    prompt = [i % 90 for i in range(700)]
    sim.submit("leader", prompt, 3, prompt_logprobs=0)
    sim.step()
    sim.submit("w", [*prompt, 2], 3)
    sim.step()
    assert sim.scheduler.num_waiting()["sibling"] == 1
    sim.cache.flush()
    sim.step()
    assert cached(sim, "w") == 0, "it starts at once, though the leader still computes"
    sim.run()


def test_nobody_waits_across_namespaces() -> None:
    sim = simulate(max_num_batched_tokens=CHUNK * 8)
    sim.submit("leader", [*PREFIX, 1], 3)
    sim.submit("w", [*PREFIX, 2], 3, namespace="other")
    sim.step()
    assert cached(sim, "w") == 0
    sim.run()


def test_the_age_bound_ends_the_waiting_and_the_miss_says_so() -> None:
    sim = simulate(max_sibling_wait_s=2.0, num_pages=400)
    common = [7] * 400
    sim.submit("leader", common, 3)
    sim.step()
    sim.submit("w", [*common, 4], 3)
    sim.step()  # waits from now on
    sim.step()
    assert sim.scheduler.num_waiting()["sibling"] == 1
    sim.step()
    assert sim.scheduler.num_waiting()["sibling"] == 0, "two seconds later"
    sim.run()


def test_tokens_that_could_not_be_waited_for_are_missed_as_in_flight() -> None:
    sim = simulate(max_sibling_wait_s=0.0, max_num_batched_tokens=300)
    common = [7] * 400
    sim.submit("leader", common, 3)
    sim.step()
    sim.submit("w", [*common, 4], 3)
    sim.step()
    admitted = sim.outcomes["w", 0].admitted
    assert admitted is not None
    assert admitted.num_cached_tokens == 300
    assert admitted.missed == {"in_flight": 100, "new": 1}
    sim.run()


@pytest.mark.parametrize(("num_common", "waits"), [(31, False), (32, True)])
def test_less_than_32_common_tokens_are_not_waited_for(num_common: int, waits: bool) -> None:
    sim = simulate(max_num_batched_tokens=400)
    common = PREFIX[:num_common]
    sim.submit("leader", [*common, *[1] * 300], 3)
    sim.submit("w", [*common, *[2] * 10], 3)
    sim.step()
    admitted = sim.outcomes["w", 0].admitted
    assert (admitted is None) == waits
    if admitted is not None:
        assert admitted.missed == {"in_flight": 31, "new": 10}
    sim.run()


def test_the_leader_inherits_the_best_priority_of_its_waiters() -> None:
    sim = simulate(policy="priority")
    start_leader_and_waiter(sim, priority=9)
    sim.submit("urgent", [*PREFIX, 4], 3, priority=-5)
    sim.step()
    assert sim.scheduler.running[0].effective_priority == -5
    sim.run()


def test_t15_choices_attach_to_the_first_ones_prompt_at_any_length() -> None:
    for length in (1, 2, 4, 5, 31):
        sim = simulate()
        sim.submit("r", PREFIX[:length], 3, n=3)
        sim.run()
        assert [cached(sim, "r", i) for i in range(3)] == [0, length - 1, length - 1]
        assert sim.model.num_computed_tokens == length + 2 + 3 * 2


class LatestFirst:
    """A policy that offers the last choice first."""

    def order(self, waiting, peek, now):
        return list(reversed(waiting))


def test_the_first_choice_leads_under_any_policy() -> None:
    sim = simulate(policy=f"{__name__}:LatestFirst")
    sim.submit("r", PREFIX[:9], 3, n=3)
    sim.run()
    assert [cached(sim, "r", i) for i in range(3)] == [0, 8, 8]


def test_choices_wait_while_the_first_one_waits_for_room() -> None:
    sim = simulate(max_num_seqs=1)
    sim.submit("big", [1, 2, 3], 8)
    sim.step()
    sim.submit("r", PREFIX[:5], 1, n=2)
    sim.run()
    assert sim.outcomes["r", 0].first_step < sim.outcomes["r", 1].first_step


def test_when_the_first_choice_is_aborted_in_the_queue_the_next_one_leads() -> None:
    sim = simulate(max_num_seqs=1)
    sim.submit("big", [1, 2, 3], 4)
    sim.step()
    sim.submit("r", PREFIX[:5], 2, n=3)
    sim.abort("r", 0)
    sim.run()
    assert cached(sim, "r", 1) == 0
    assert cached(sim, "r", 2) == 4
