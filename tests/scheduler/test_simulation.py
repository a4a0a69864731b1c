"""Random schedules: no deadlock, no lost page, no wrong row, one terminal event each (S02-S09)."""

from __future__ import annotations

import pytest
from support.random_schedule import run_random

_BATCH = 50


@pytest.mark.parametrize("first", range(0, 500, _BATCH))
def test_random_schedules_keep_every_promise(first: int) -> None:
    for seed in range(first, first + _BATCH):
        run_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(500, 6000, 500))
def test_many_more_random_schedules_keep_every_promise(first: int) -> None:
    for seed in range(first, first + 500):
        run_random(seed)


def test_the_random_schedules_reach_what_they_are_for() -> None:
    # A generator that no longer retracts or shares would make the tests above worthless.
    sims = [run_random(seed) for seed in range(60)]
    reasons = sum((sim.reasons() for sim in sims), start=sims[0].reasons())
    assert {"stop", "length", "abort", "error"} <= set(reasons)
    assert sum(sim.scheduler.counters.retractions for sim in sims) > 20
    assert sum(sim.scheduler.counters.prefill_tokens["recomputed"] for sim in sims) > 0
    assert max(sim.max_retractions_seen for sim in sims) >= 3
    missed = {
        reason
        for sim in sims
        for outcome in sim.outcomes.values()
        if outcome.admitted is not None
        for reason in outcome.admitted.missed
    }
    assert missed >= {"new", "last_token", "evicted", "not_stored", "disabled", "in_flight"}
