"""Every way to end: rows that stay, rows that must not, pages that return, one terminal event."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.scheduler_sim import Simulation, make_request

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.errors import NoSpace
from radix_mla.scheduler.batch import Sampled


class FaultyCache(PrefixCache):
    """Raises once in `method` for a sequence that begins with `first_token`."""

    def __init__(self, method: str, first_token: int, error: Exception) -> None:
        super().__init__(64, 4, seed=1)
        self._fault: tuple[str, int, Exception] | None = (method, first_token, error)
        self.armed = True

    def _check_fault(self, method: str, first_token: int) -> None:
        if self.armed and self._fault is not None and self._fault[:2] == (method, first_token):
            error, self._fault = self._fault[2], None
            raise error

    def acquire(self, tokens, namespace="", **options):
        self._check_fault("acquire", int(tokens[0]))
        lease = super().acquire(tokens, namespace, **options)
        self._first = {**getattr(self, "_first", {}), id(lease): int(tokens[0])}
        return lease

    def grow(self, lease, num_tokens):
        self._check_fault("grow", self._first[id(lease)])
        return super().grow(lease, num_tokens)

    def commit(self, lease, tokens):
        self._check_fault("commit", int(tokens[0]))
        super().commit(lease, tokens)

    def classify_miss(self, tokens, namespace, num_matched):
        self._check_fault("classify_miss", int(tokens[0]))
        return super().classify_miss(tokens, namespace, num_matched)


@pytest.mark.parametrize("method", ["acquire", "grow", "commit", "classify_miss"])
def test_x10_an_exception_in_the_cache_fails_that_request_only(method: str) -> None:
    sim = Simulation(cache=FaultyCache(method, 7, RuntimeError("injected")))
    for token in (5, 7, 9):
        sim.submit(f"r{token}", [token] * 11, 6)
    sim.failed.add(("r7", 0))
    sim.run()
    assert sim.outcomes["r7", 0].error == "RuntimeError: injected"
    assert sim.reasons() == {"length": 2, "error": 1}
    sim.submit("again", [7] * 11, 6)
    sim.run()
    assert sim.outcomes["again", 0].admitted.num_cached_tokens == 0, "computed afresh"


@pytest.mark.parametrize("armed_at", ["decode", "end"])
def test_x10_a_commit_that_fails_late_keeps_what_was_committed_before(armed_at: str) -> None:
    cache = FaultyCache("commit", 7, RuntimeError("injected"))
    cache.armed = False
    sim = Simulation(cache=cache, commit_every=3 if armed_at == "decode" else 256)
    sim.submit("r7", [7] * 11, 6)
    sim.submit("r9", [9] * 11, 6)
    sim.step()
    cache.armed = True
    sim.failed.add(("r7", 0))
    sim.run()
    sim.submit("again", [7] * 11, 6)
    sim.run()
    assert sim.outcomes["again", 0].admitted.num_cached_tokens == 10


def test_x10_a_commit_that_fails_at_a_stop_token_ends_with_the_error_not_the_stop() -> None:
    cache = FaultyCache("commit", 7, RuntimeError("injected"))
    cache.armed = False
    sim = Simulation(cache=cache)
    _, second = sim.oracle.generate([7] * 11, 2, frozenset())
    sim.scheduler.add(make_request("r7", [7] * 11, 6, stop_token_ids=(second,)))
    outputs = []
    while sim.scheduler.has_work:
        scheduled = sim.scheduler.schedule(1.0)
        tokens = sim.model.run(scheduled.plan)
        sim.scheduler.postprocess(scheduled, [True], [Sampled(tokens[0])])
        outputs += sim.scheduler.take_events().sequences
        cache.armed = True
    assert [output.token_ids[-1] for output in outputs][-1] == second
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].stop_token_id is None


def test_s09_one_that_gets_no_page_gives_way_and_the_others_go_on() -> None:
    cache = FaultyCache("grow", 7, NoSpace(1, 0))
    cache.armed = False
    sim = Simulation(cache=cache)
    for token in range(8):
        sim.submit(f"r{token}", [token] * 11, 6)
    for _ in range(4):
        sim.step()
    cache.armed = True
    sim.run()
    assert sim.reasons() == {"length": 8}
    assert sim.scheduler.counters.retractions == 1


def test_x10_a_running_request_whose_page_cannot_be_had_for_another_reason_fails() -> None:
    cache = FaultyCache("grow", 7, RuntimeError("injected"))
    cache.armed = False
    sim = Simulation(cache=cache)
    for token in (5, 7):
        sim.submit(f"r{token}", [token] * 11, 6)
    sim.step()
    cache.armed = True
    sim.failed.add(("r7", 0))
    sim.run()
    assert sim.outcomes["r7", 0].error == "RuntimeError: injected"
    assert sim.reasons() == {"length": 1, "error": 1}


def test_x10_a_lookup_that_fails_while_others_run_fails_when_it_is_admitted() -> None:
    class Blind(PrefixCache):
        def peek(self, tokens, namespace=""):
            raise RuntimeError("injected")

    sim = Simulation(cache=Blind(64, 4, seed=1))
    sim.submit("leader", [1] * 40, 2)
    sim.submit("r", [1] * 39 + [2, 3], 2)
    sim.run()
    assert sim.reasons() == {"length": 2}, "a failed look for a leader is no reason to fail"


def test_x10_a_commit_that_fails_in_a_retraction_fails_that_request() -> None:
    cache = FaultyCache("commit", 7, RuntimeError("injected"))
    cache.armed = False
    sim = Simulation(cache=cache)
    sim.submit("r5", [5] * 11, 6)
    sim.submit("r7", [7] * 11, 6)
    sim.step()
    sim.step()
    cache.armed = True
    sim.failed.add(("r7", 0))
    sim.scheduler._life.retract(sim.scheduler.running[1])
    sim.run()
    assert sim.reasons() == {"length": 1, "error": 1}


def _in_queue(sim: Simulation, token: int) -> None:
    sim.submit("r", [token] * 30, 8)


def _waiting_for_sibling(sim: Simulation, token: int) -> None:
    sim.submit("leader", [token] * 60, 8)
    sim.step()
    sim.submit("r", [token] * 59 + [95], 8)
    sim.step()
    assert sim.scheduler.num_waiting()["sibling"] == 1


def _between_chunks(sim: Simulation, token: int) -> None:
    sim.submit("r", [token] * 60, 8)
    sim.step()
    sim.step()
    assert sim.scheduler.running[0].is_prefilling


def _in_decode(sim: Simulation, token: int) -> None:
    sim.submit("r", [token] * 5, 8)
    sim.step()
    sim.step()
    assert sim.outcomes["r", 0].tokens


def _at_the_last_token(sim: Simulation, token: int) -> None:
    sim.submit("r", [token] * 5, 3)
    for _ in range(2):
        sim.step()
    assert len(sim.outcomes["r", 0].tokens) == 2


def _half_done_choices(sim: Simulation, token: int) -> None:
    sim.submit("r", [token] * 5, 4, n=3)
    for _ in range(2):
        sim.step()
    sim.abort("r", 1)


_MOMENTS = [
    _in_queue,
    _waiting_for_sibling,
    _between_chunks,
    _in_decode,
    _at_the_last_token,
    _half_done_choices,
]


@pytest.mark.parametrize("reason", ["abort", "stop"])
@pytest.mark.parametrize("moment", _MOMENTS)
def test_r14_an_abort_at_any_moment_returns_everything(
    moment: Callable[[Simulation, int], None], reason: str
) -> None:
    sim = Simulation(max_num_batched_tokens=16)
    for token in range(20):
        moment(sim, token)
        sim.abort("r", reason=reason)
        sim.run()
        counts = sim.cache.counts()
        assert counts.protected == counts.private == 0
        for key in [key for key in sim.outcomes if key[0] in ("r", "leader")]:
            del sim.outcomes[key]
    sim.submit("after", [3] * 60, 4)
    sim.run()


def test_aborted_tokens_are_counted_by_phase() -> None:
    sim = Simulation(max_num_batched_tokens=16)
    sim.submit("queued", [3] * 30, 8)
    sim.abort("queued")
    _between_chunks(sim, 4)
    sim.abort("r")
    del sim.outcomes["r", 0]
    sim.submit("r", [9] * 5, 8)
    for _ in range(3):
        sim.step()
    sim.abort("r")
    assert sim.scheduler.counters.aborted_tokens == {"waiting": 30, "prefill": 32, "decode": 3}
    del sim.outcomes["r", 0]
    sim.submit("r", [9] * 5, 8)
    sim.step()
    sim.abort("r", reason="stop")
    assert sim.scheduler.counters.aborted_tokens["decode"] == 3, "a stop string is no abort"


def test_an_unknown_request_is_ignored() -> None:
    sim = Simulation()
    sim.abort("never")
    sim.submit("r", [1], 1)
    sim.abort("r", index=5)
    sim.run()
    assert sim.reasons() == {"length": 1}


def test_rows_of_a_failed_request_never_enter_the_tree() -> None:
    sim = Simulation(max_num_batched_tokens=16)
    sim.submit("r", [3] * 40, 4)
    sim.step()
    sim.fail_next("r")
    sim.run()
    assert sim.scheduler.counters.nonfinite_requests == 1
    sim.submit("again", [3] * 40, 4)
    sim.run()
    assert sim.outcomes["again", 0].admitted.num_cached_tokens == 16, "only the chunk before it"


def test_a_forward_that_raises_ends_its_step_s_sequences_only() -> None:
    sim = Simulation(max_num_batched_tokens=8)
    sim.submit("a", [1] * 8, 4)
    sim.submit("b", [2] * 8, 4)
    scheduled = sim.scheduler.schedule(1.0)
    sim.scheduler.fail_step(scheduled, RuntimeError("kernel"))
    sim.failed.add(("a", 0))
    sim._take_events()
    sim.run()
    assert sim.outcomes["a", 0].error == "RuntimeError: kernel"
    assert sim.reasons() == {"error": 1, "length": 1}


def test_what_ended_while_the_step_ran_is_not_booked() -> None:
    sim = Simulation()
    sim.submit("r", [1] * 8, 4)
    scheduled = sim.scheduler.schedule(1.0)
    sim.abort("r")
    sim.scheduler.postprocess(scheduled, [True], [Sampled(5)])
    assert not sim.scheduler.take_events()


def test_r07_generated_rows_are_hit_by_the_next_turn() -> None:
    for page_size in (1, 4, 16):
        sim = Simulation(num_pages=800 // page_size, page_size=page_size)
        prompt = [i % 90 for i in range(100)]
        sim.submit("turn1", prompt, 50)
        sim.run()
        answer = sim.outcomes["turn1", 0].tokens
        sim.submit("turn2", [*prompt, *answer, *range(50)], 4)
        sim.run()
        assert sim.outcomes["turn2", 0].admitted.num_cached_tokens == 149


def test_rows_of_a_long_answer_enter_the_tree_while_it_runs() -> None:
    sim = Simulation(num_pages=200, commit_every=8)
    sim.submit("r", [1, 2, 3], 100)
    for _ in range(10):
        sim.step()
    lease = sim.scheduler.running[0].lease
    assert lease is not None
    assert lease.num_committed == 3 + 8  # in the middle of a page of 4
    sim.run()


def test_r01_two_equal_cold_prompts_in_one_step_read_their_own_rows() -> None:
    for page_size in (1, 4, 16):
        sim = Simulation(
            num_pages=240 // page_size,
            page_size=page_size,
            max_num_batched_tokens=200,
            min_in_common=10**6,  # both compute
        )
        prompt = list(range(49))
        sim.submit("a", prompt, 20)
        sim.submit("b", prompt, 20)
        sim.step()
        assert len(sim.scheduler.running) == 2
        sim.submit("third", [90] * 60, 10)  # takes and overwrites the freed duplicates
        sim.run()
        assert sim.outcomes["a", 0].tokens == sim.outcomes["b", 0].tokens


def test_progress_is_told_chunk_by_chunk() -> None:
    sim = Simulation(max_num_batched_tokens=16)
    sim.submit("r", [1] * 40, 2)
    sim.scheduler.take_events()
    seen = []
    for _ in range(3):
        scheduled = sim.scheduler.schedule(1.0)
        sim.model.run(scheduled.plan)
        token = 5 if scheduled.work[0].samples else None
        sim.scheduler.postprocess(scheduled, [True], [Sampled(token)])
        seen += [p.num_computed for p in sim.scheduler.take_events().progress]
    assert seen == [16, 32]
