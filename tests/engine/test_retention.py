"""Retention through the engine: requests that ask for it, over a clock that the test moves."""

from __future__ import annotations

from support.fake_runner import QueueSampler, make_fake_engine
from support.scheduler_sim import make_request

from radix_mla.engine.engine import Engine

PROMPTS = {name: [start + i for i in range(16)] for name, start in (("a", 1), ("b", 20), ("c", 40))}


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(engine: Engine, name: str, max_tokens: int = 1, **fields) -> None:
    engine.add_request(make_request(name, PROMPTS[name], max_tokens, temperature=0.0, **fields))
    while engine.has_work:
        engine.step()
        assert engine.audit()["ok"]


def cached(engine: Engine) -> str:
    """The prompts that are cached whole."""
    cache = engine.cache
    return "".join(name for name in PROMPTS if cache.peek(PROMPTS[name]) == 16)


def make(overlap: bool = False) -> tuple[Engine, Clock]:
    """Room for two of the prompts."""
    clock = Clock()
    sampler = QueueSampler() if overlap else None
    engine, _ = make_fake_engine(
        num_pages=9, page_size=4, clock=clock, overlap=overlap, sampler=sampler
    )
    return engine, clock


def test_without_fields_the_oldest_goes() -> None:
    engine, _ = make()
    for name in "abc":
        run(engine, name)
    assert cached(engine) == "bc"


def test_a_ttl_keeps_rows_until_it_is_over() -> None:
    for wait_s, left in ((59.0, "ac"), (60.0, "bc")):
        engine, clock = make()
        run(engine, "a", cache_ttl_s=60.0)
        run(engine, "b")
        clock.now_s += wait_s
        run(engine, "c")
        assert cached(engine) == left


def test_a_ttl_is_renewed_by_a_request_that_asks_again() -> None:
    engine, clock = make()
    run(engine, "a", cache_ttl_s=60.0)
    clock.now_s += 50.0
    run(engine, "a", cache_ttl_s=60.0)
    run(engine, "b")
    clock.now_s += 50.0
    run(engine, "c")
    assert cached(engine) == "ac"


def test_a_greater_priority_stays_longer_and_a_full_pool_of_them_gives_way() -> None:
    engine, _ = make()
    run(engine, "a", cache_priority=5)
    run(engine, "b", cache_priority=2)
    run(engine, "c", cache_priority=1)
    assert cached(engine) == "ac"
    run(engine, "b")
    assert cached(engine) == "ab"


def test_what_is_not_stored_keeps_nothing() -> None:
    engine, _ = make()
    run(engine, "a", cache_priority=9, store=False)
    assert engine.cache.num_cached_tokens == 0
    assert engine.cache.counts().free == 9


def test_a_failed_or_aborted_request_leaves_its_rank_on_what_it_computed() -> None:
    engine, _ = make()
    engine.add_request(make_request("a", PROMPTS["a"], 8, temperature=0.0, cache_priority=1))
    engine.step()
    engine.abort("a")
    run(engine, "b")
    run(engine, "c")
    assert cached(engine) == "ac"


def test_time_passes_while_steps_are_queued_ahead() -> None:
    engine, clock = make(overlap=True)
    run(engine, "a", cache_ttl_s=60.0)
    engine.add_request(make_request("b", PROMPTS["b"], 8, temperature=0.0))
    engine.step()
    clock.now_s += 61.0
    for _ in range(3):
        engine.step()  # decodes alone, each planned ahead
    assert engine.cache._tree.nodes.queue.now_s == clock.now_s
    while engine.has_work:
        engine.step()
    assert engine.audit()["ok"]
