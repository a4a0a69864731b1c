"""Random requests against the cache: rows, hits, counts and audit after each operation."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.model_based_cache import CacheSimulation, FakeRequest

from radix_mla.cache.eviction import POLICIES
from radix_mla.cache.retention import NO_RETENTION, Retention

NAMESPACES = st.sampled_from(["", "", "", "salt"])
TOKEN = st.integers(0, 1)
PICK = st.integers(0, 5)
SELDOM = st.integers(0, 3)
RETENTIONS = st.sampled_from([NO_RETENTION, NO_RETENTION, Retention(1, 9.0), Retention(3, 2.0)])


class PrefixCacheMachine(RuleBasedStateMachine):
    """Few tokens, small pages and a small pool, so that everything collides."""

    sim: CacheSimulation

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 5]),
        num_pages=st.sampled_from([6, 12, 40]),
        policy=st.sampled_from(sorted(POLICIES)),
    )
    def open(self, page_size: int, num_pages: int, policy: str) -> None:
        self.sim = CacheSimulation(num_pages, page_size, policy=POLICIES[policy]())

    def pick(self, index: int) -> FakeRequest:
        return self.sim.running[index % len(self.sim.running)]

    @precondition(lambda self: len(self.sim.running) < 5)
    @rule(
        tokens=st.lists(TOKEN, min_size=1, max_size=14), namespace=NAMESPACES, retention=RETENTIONS
    )
    def start(self, tokens: list[int], namespace: str, retention: Retention) -> None:
        self.sim.start(tokens, namespace, retention)

    @precondition(lambda self: len(self.sim.running) < 5)
    @rule(
        tokens=st.lists(TOKEN, min_size=1, max_size=14),
        namespace=NAMESPACES,
        num_tokens=st.integers(1, 14),
        retention=RETENTIONS,
    )
    def start_and_prefill(
        self, tokens: list[int], namespace: str, num_tokens: int, retention: Retention
    ) -> None:
        request = self.sim.start(tokens, namespace, retention)
        if self.sim.compute(request, num_tokens):
            self.sim.commit(request)

    @precondition(lambda self: self.sim.running and len(self.sim.running) < 5)
    @rule(index=PICK, cut=st.integers(0, 9), tail=st.lists(TOKEN, min_size=1, max_size=4))
    def start_like_another(self, index: int, cut: int, tail: list[int]) -> None:
        """The same prompt at the same time, a longer one, or one that diverges."""
        other = self.pick(index)
        kept = max(0, len(other.tokens) - cut)
        self.sim.start(other.tokens[:kept] + tail, other.namespace)

    @precondition(lambda self: self.sim.running)
    @rule(index=PICK, num_tokens=st.integers(1, 9), commits=st.booleans())
    def prefill(self, index: int, num_tokens: int, commits: bool) -> None:
        request = self.pick(index)
        if self.sim.compute(request, num_tokens) and commits:
            self.sim.commit(request)

    @precondition(lambda self: self.sim.running)
    @rule(index=PICK, tokens=st.lists(TOKEN, min_size=1, max_size=6), every=st.integers(1, 7))
    def decode(self, index: int, tokens: list[int], every: int) -> None:
        """Sampled tokens, one a step, with a commit every few steps."""
        request = self.pick(index)
        if request.num_computed < len(request.tokens):
            return
        for step, token in enumerate(tokens, start=1):
            request.tokens.append(token)
            if not self.sim.compute(request, 1):
                request.tokens.pop()
                break
            if step % every == 0:
                self.sim.commit(request)

    @precondition(lambda self: self.sim.running)
    @rule(index=PICK)
    def commit(self, index: int) -> None:
        self.sim.commit(self.pick(index))

    @precondition(lambda self: self.sim.running)
    @rule(index=PICK, chance=SELDOM)
    def finish_or_retract(self, index: int, chance: int) -> None:
        request = self.pick(index)
        self.sim.commit(request)
        if chance == 0:
            self.sim.release(request)

    @precondition(lambda self: self.sim.running)
    @rule(index=PICK, chance=SELDOM)
    def abort(self, index: int, chance: int) -> None:
        if chance == 0:
            self.sim.release(self.pick(index))

    @precondition(lambda self: self.sim.cache.counts().evictable)
    @rule(num_pages=st.integers(1, 5), chance=SELDOM)
    def evict(self, num_pages: int, chance: int) -> None:
        if chance == 0:
            self.sim.evict(num_pages)

    @precondition(lambda self: self.sim.running and self.sim.cache.num_nodes)
    @rule(namespace=st.sampled_from([None, "", "salt"]), chance=SELDOM)
    def flush(self, namespace: str | None, chance: int) -> None:
        if chance == 0:
            self.sim.flush(namespace)

    @precondition(lambda self: self.sim.cache.num_nodes)
    @rule(num_s=st.sampled_from([0.5, 3.0]))
    def pass_time(self, num_s: float) -> None:
        self.sim.pass_time(num_s)

    def teardown(self) -> None:
        if hasattr(self, "sim"):
            self.sim.drain()


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def _soak(seed: int, num_steps: int) -> None:
    """The same operations with fixed odds, so that pools stay full of running requests."""
    rng = random.Random(seed)
    page_size, num_pages = rng.choice([1, 2, 3, 4, 7]), rng.choice([8, 16, 40])
    sim = CacheSimulation(num_pages, page_size, policy=POLICIES[rng.choice(sorted(POLICIES))]())
    for _ in range(num_steps):
        _soak_step(sim, rng)
    sim.drain()


def _sampled(request: FakeRequest, other: FakeRequest, rng: random.Random) -> int:
    """What `other` has at this place if it began alike, so that the two go on alike."""
    length = len(request.tokens)
    if other.tokens[:length] == request.tokens and len(other.tokens) > length:
        return other.tokens[length]
    return rng.randrange(2)


def _soak_step(sim: CacheSimulation, rng: random.Random) -> None:
    def some_tokens(most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randint(1, most))]

    operation = rng.choices(
        ["start", "prefill", "decode", "commit", "finish", "abort", "evict", "flush", "time"],
        [6, 10, 14, 5, 4, 1, 1, 0.3, 3],
    )[0]
    if operation == "time":
        sim.pass_time(rng.random())
    elif operation == "evict":
        sim.evict(rng.randint(1, 4))
    elif operation == "flush":
        sim.flush(rng.choice([None, "", "salt"]))
    elif operation == "start" or not sim.running:
        if len(sim.running) < 6:
            like = rng.choice(sim.running).tokens if sim.running and rng.random() < 0.7 else []
            kept = like[: rng.randint(0, len(like))]
            retention = rng.choice([NO_RETENTION, NO_RETENTION, Retention(1, 4.0), Retention(2, 1)])
            sim.start(kept + some_tokens(9), rng.choice(["", "", "", "salt"]), retention)
    else:
        request = rng.choice(sim.running)
        if operation == "decode" and request.num_computed == len(request.tokens):
            request.tokens.append(_sampled(request, rng.choice(sim.running), rng))
            if not sim.compute(request, 1):
                request.tokens.pop()
        elif operation in ("prefill", "decode"):
            sim.compute(request, rng.randint(1, 9))
        if operation in ("commit", "finish") or rng.random() < 0.3:
            sim.commit(request)
        if operation in ("finish", "abort"):
            sim.release(request)


@pytest.mark.parametrize("seed", range(12))
def test_random_requests(seed: int) -> None:
    _soak(seed, num_steps=400)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_random_requests_long(seed: int) -> None:
    _soak(seed, num_steps=2000)


class TestModel(PrefixCacheMachine.TestCase):
    settings = _settings(200)


@pytest.mark.slow
class TestModelLong(PrefixCacheMachine.TestCase):
    settings = _settings(2000)
