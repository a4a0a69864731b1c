"""The whole engine over a tiny random checkpoint: what is cached or retracted changes no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from support.greedy_runs import assert_equal_runs, make_request, prefix_families, run
from support.tiny_checkpoint import make_checkpoint

from radix_mla.config import EngineConfig
from radix_mla.engine import build as build_module
from radix_mla.engine.build import build_engine, limits_of
from radix_mla.engine.engine import Engine
from radix_mla.engine.outputs import SequenceOutput
from radix_mla.request import FinishReason, Request, SamplingParams
from radix_mla.scheduler.batch import Work

VOCAB = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), vocab=VOCAB)


def build(model: Path, **knobs: object) -> Engine:
    knobs = {"kv_cache_tokens": 8192, "num_threads": 1, "workspace_tokens": 512} | knobs
    return build_engine(EngineConfig(model=str(model), **knobs))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    prompts = prefix_families(3, families=4, prompts=16, vocab=VOCAB, max_prefix=90, max_own=30)
    return [make_request(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone(model: Path, requests: list[Request]):
    """Each request alone, nothing reused."""
    engine = build(model, enable_prefix_cache=False)
    results = {}
    for request in requests:
        results |= run(engine, [request])
    return results


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (16, 7), (64, 512)])
def test_batched_chunked_and_cached_runs_equal_the_lonely_ones(
    model: Path, requests: list[Request], alone, page_size: int, chunk: int
) -> None:
    engine = build(model, page_size=page_size, max_num_batched_tokens=chunk, max_num_seqs=6)
    cold = run(engine, requests)
    warm = run(engine, requests)
    assert_equal_runs(alone, cold)
    assert_equal_runs(alone, warm)
    for request in requests:
        assert warm[request.request_id].cached == len(request.prompt_tokens) - 1
    assert engine.audit()["ok"]
    assert engine.stats().kv_slots["protected"] == 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_s04_retractions_and_evictions_change_nothing(
    model: Path,
    requests: list[Request],
    alone,
    page_size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(  # no room to grow: retractions
        build_module,
        "limits_of",
        lambda config: replace(limits_of(config), min_reserve_steps=0),
    )
    engine = build(
        model,
        page_size=page_size,
        max_num_batched_tokens=64,
        kv_cache_tokens=16 * 22,
        max_model_len=200,
    )
    results = run(engine, requests, after_step=lambda: engine.cache.audit())
    assert_equal_runs(alone, results)
    stats = engine.stats()
    assert stats.retractions > 0
    assert stats.evicted_tokens["capacity"] > 0


def test_the_pool_is_the_whole_pool(model: Path) -> None:
    engine = build(model, kv_cache_tokens=160)
    assert engine.info["max_model_len"] == 144
    request = make_request("r", np.arange(100) % VOCAB, 44)
    assert len(run(engine, [request])["r"].tokens) == 44


def complete(engine: Engine, request_id: str, prompt: list[int], n: int = 1, **params):
    """{index: (tokens, first output)} of one request."""
    engine.add_request(
        Request(
            request_id=request_id,
            prompt=np.asarray(prompt, dtype="<i4").tobytes(),
            params=SamplingParams(**{"max_tokens": 8, "ignore_eos": True} | params),
            n=n,
        )
    )
    tokens: dict[int, list[int]] = {i: [] for i in range(n)}
    first: dict[int, SequenceOutput] = {}
    while engine.has_work:
        for output in engine.step().sequences:
            tokens[output.index] += output.token_ids
            first.setdefault(output.index, output)
            assert output.error is None
    return tokens, first


def test_t15_seeded_choices_differ_from_each_other_and_repeat(model: Path) -> None:
    engine = build(model)
    prompt = [5, 9, 33, 21, 8]
    one, _ = complete(engine, "a", prompt, n=3, seed=4, temperature=1.5)
    two, _ = complete(engine, "b", prompt, n=3, seed=4, temperature=1.5)
    other, _ = complete(engine, "c", prompt, n=3, seed=5, temperature=1.5)
    assert one == two
    assert one != other
    assert len({tuple(tokens) for tokens in one.values()}) == 3


def test_t14_prompt_logprobs_are_the_same_cold_warm_and_chunked(model: Path) -> None:
    for length in (1, 2, 15, 16, 17, 40):
        prompt = [(i * 37 + 5) % VOCAB for i in range(length)]
        found = []
        for chunk in (512, 7):
            engine = build(model, max_num_batched_tokens=chunk)
            for i in range(2):
                _, first = complete(engine, f"r{i}", prompt, temperature=0.0, prompt_logprobs=2)
                found.append(first[0].prompt_logprobs)
        for entries in found:
            assert len(entries) == length
            assert entries[0] is None
            for mine, reference in zip(entries[1:], found[0][1:], strict=True):
                assert mine.logprob == pytest.approx(reference.logprob, abs=1e-3)
                assert mine.top_ids == reference.top_ids


def storm(model: Path, num_requests: int) -> None:
    """A third of the requests is aborted at a random moment; everything returns."""
    rng = Random(11)
    engine = build(model, max_num_batched_tokens=32, kv_cache_tokens=1024, max_num_seqs=16)
    prefixes = [[rng.randrange(VOCAB) for _ in range(60)] for _ in range(6)]
    reasons: dict[tuple[str, int], str] = {}
    submitted = 0
    while submitted < num_requests or engine.has_work:
        if submitted < num_requests and rng.random() < 0.6:
            prompt = [*rng.choice(prefixes)[: rng.randrange(61)], rng.randrange(VOCAB)]
            request = Request(
                request_id=str(submitted),
                prompt=np.asarray(prompt, dtype="<i4").tobytes(),
                params=SamplingParams(max_tokens=rng.randrange(1, 10), ignore_eos=True),
                n=rng.choice([1, 1, 1, 3]),
                store=rng.random() > 0.1,
            )
            engine.add_request(request)
            submitted += 1
        if submitted and rng.random() < 0.25:
            reason = rng.choice([FinishReason.ABORT, FinishReason.STOP])
            engine.abort(str(rng.randrange(submitted)), rng.choice([None, 0]), reason)
        for output in engine.step().sequences:
            if output.finish_reason is not None:
                key = (output.request_id, output.index)
                assert key not in reasons, "two terminal events"
                reasons[key] = output.finish_reason
    assert set(reasons.values()) == {"length", "abort", "stop"}
    stats = engine.stats()
    assert (stats.num_running, sum(stats.num_waiting.values()), stats.waiting_tokens) == (0, 0, 0)
    assert stats.kv_slots["protected"] == stats.kv_slots["private"] == 0
    assert sum(stats.kv_slots.values()) == stats.kv_slots_total
    assert engine.audit()["ok"]
    engine.flush()
    assert engine.stats().kv_slots["free"] == stats.kv_slots_total


def test_r14_an_abort_storm_leaves_nothing_behind(model: Path) -> None:
    storm(model, 60)


@pytest.mark.stress
def test_r14_a_long_abort_storm_leaves_nothing_behind(model: Path) -> None:
    storm(model, 500)


class _Counted:
    """A sampler that counts the steps whose tokens it queued ahead, plain decode apart."""

    def __init__(self, sampler: object) -> None:
        self._sampler = sampler
        self.num_ahead = self.num_mixed_ahead = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._sampler, name)

    def queue(self, logits: torch.Tensor, work: list[Work]) -> object:
        is_drawn = [item.is_drawn for item in work]
        self.num_ahead += any(is_drawn)
        self.num_mixed_ahead += any(is_drawn) and not all(is_drawn)
        return self._sampler.queue(logits, work)  # type: ignore[attr-defined]


@pytest.mark.parametrize("chunk", [7, 64])
def test_steps_queued_ahead_change_nothing(model: Path, chunk: int) -> None:
    """As on a GPU, whose draws run in Triton's interpreter here; requests come one by one."""
    pytest.importorskip("triton")
    prompts = prefix_families(5, families=3, prompts=8, vocab=VOCAB, max_prefix=40, max_own=20)
    results = []
    for overlap in (False, True):
        engine = build(model, page_size=16, max_num_batched_tokens=chunk, max_num_seqs=3)
        pipeline = engine._pipeline
        sampler = _Counted(pipeline._sampler)
        pipeline._overlap, pipeline._sampler = overlap, sampler  # type: ignore[assignment]
        tokens: dict[str, list[int]] = {}
        waiting = list(enumerate(prompts))
        while engine.has_work or waiting:
            if waiting and (engine.num_steps % 3 == 0 or not engine.has_work):
                i, prompt = waiting.pop(0)
                params = SamplingParams(
                    max_tokens=6 + i, ignore_eos=True, temperature=0.8 * (i % 2), seed=i
                )
                request = Request(
                    request_id=f"r{i}", prompt=prompt.astype("<i4").tobytes(), params=params
                )
                engine.add_request(request)
            for output in engine.step().sequences:
                assert output.error is None
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            engine.cache.audit()
        results.append(tokens)
        assert (sampler.num_ahead > 20) == overlap
        assert (sampler.num_mixed_ahead > 3) == overlap
    assert results[0] == results[1]
