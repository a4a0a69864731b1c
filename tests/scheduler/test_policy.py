from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler_sim import Simulation, make_request

from radix_mla.errors import ConfigError
from radix_mla.scheduler.policy import FirstComeFirstServed, LongestPrefixMatch, load_policy
from radix_mla.scheduler.sequence import Sequence


class ShortestFirst:
    """A user's policy."""

    def order(self, waiting, peek, now):
        return sorted(waiting, key=lambda seq: seq.num_tokens)


def make(order: int, arrival_s: float = 0.0, priority: int = 0) -> Sequence:
    request = make_request(f"r{order}", [1, 2, 3], arrival_s=arrival_s, priority=priority)
    return Sequence(request, 0, namespace="", order=order)


def test_fcfs_keeps_the_order_of_arrival() -> None:
    waiting = [make(0), make(1)]
    assert list(FirstComeFirstServed().order(waiting, lambda seq: 0, 0.0)) == waiting


def test_longest_prefix_comes_first() -> None:
    waiting = [make(0), make(1), make(2)]
    hits = {0: 10, 1: 300, 2: 300}
    ordered = LongestPrefixMatch().order(waiting, lambda seq: hits[seq.order], 0.0)
    assert [seq.order for seq in ordered] == [1, 2, 0]


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 10**6)), min_size=2, max_size=30))
def test_s01_nobody_is_passed_by_one_that_came_much_later(items: list[tuple[float, int]]) -> None:
    arrivals = sorted(arrival for arrival, _ in items)
    waiting = [make(i, arrival) for i, arrival in enumerate(arrivals)]
    hits = {i: hit for i, (_, hit) in enumerate(items)}
    ordered = list(LongestPrefixMatch().order(waiting, lambda seq: hits[seq.order], 100.0))
    assert sorted(seq.order for seq in ordered) == list(range(len(items)))
    for place, seq in enumerate(ordered):
        for later in ordered[place + 1 :]:
            behind = seq.request.arrival_s - later.request.arrival_s
            assert behind <= LongestPrefixMatch.MAX_BONUS_S + 1e-9


def test_s01_a_cold_request_starts_while_hot_ones_keep_coming() -> None:
    sim = Simulation(policy="lpm", max_num_seqs=1, num_pages=4000, max_num_batched_tokens=4096)
    hot = [1] * 6000
    sim.submit("warm", hot, 1)
    sim.run()
    submitted = sim.now
    sim.submit("cold", [2] * 500, 1)
    for i in range(40):  # each step serves one; each second brings one
        sim.submit(f"hot{i}", [*hot, i, i], 1)
        sim.step()
    cold = sim.outcomes["cold", 0]
    assert cold.admitted is not None
    assert sim.outcomes["hot0", 0].first_step < cold.first_step, "the hot one came first"
    assert cold.admitted.queue_s <= LongestPrefixMatch.MAX_BONUS_S + 2
    assert cold.first_step <= submitted + LongestPrefixMatch.MAX_BONUS_S + 3


def test_priority_runs_the_lower_value_first() -> None:
    sim = Simulation(policy="priority", max_num_seqs=1)
    sim.submit("low", [1, 2], 1, priority=5)
    sim.submit("high", [3, 4], 1, priority=-1)
    sim.submit("high-later", [5, 6], 1, priority=-1)
    sim.run()
    steps = {key[0]: outcome.first_step for key, outcome in sim.outcomes.items()}
    assert steps["high"] < steps["high-later"] < steps["low"]


def test_a_policy_of_ones_own_is_loaded_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(f"{__name__}:ShortestFirst")
    short, long = make(1), make(0)
    long.append(4)
    assert policy.order([long, short], lambda seq: 0, 0.0) == [short, long]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("fastest", "fcfs, lpm, priority"),
        ("no_such_module:Policy", "no_such_module"),
        ("radix_mla.errors:Nothing", "Nothing"),
        ("radix_mla.errors:ContextOverflow", "limit"),
        ("radix_mla.errors:ConfigError", "order"),
    ],
)
def test_an_unknown_policy_is_an_error_that_names_the_knob(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"schedule_policy.*{why}"):
        load_policy(name)
