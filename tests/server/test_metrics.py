"""P01-P05; accepted == finished + running + waiting; hits + missed == queries."""

from __future__ import annotations

import re

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import FACTS, Call, Harness

from radix_mla.engine.ipc import Admitted, EngineStats
from radix_mla.text.tokenizer import Tokenizer
from server.metrics import LATENCY_BUCKETS

PREFIX = "radix_mla_"
_TEXT = """
prompt_tokens_total generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total
prefix_cache_missed_tokens_total prefill_tokens_total prefix_cache_hit_length_tokens_bucket
prefix_cache_hit_ratio_bucket kv_cache_tokens kv_cache_usage_ratio requests_accepted_total
requests_running requests_waiting waiting_tokens requests_finished_total rejections_total
retractions_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
e2e_request_latency_seconds_bucket queue_time_seconds_bucket prefill_context_chunks_total
step_host_seconds_sum engine_heartbeat_age_seconds api_loop_lag_seconds nonfinite_requests_total
audit_failures_total build_info cache_config_info
"""
NAMES = re.findall(r"\w+", _TEXT)


async def _identities(harness: Harness) -> None:
    async def total(name: str) -> float:
        return await harness.metric(PREFIX + name)

    assert await total("requests_accepted_total") == (
        await total("requests_finished_total")
        + await total("requests_running")
        + await total("requests_waiting")
    )
    assert await total("prefix_cache_queries_total") == (
        await total("prefix_cache_hits_total") + await total("prefix_cache_missed_tokens_total")
    )
    assert await total("kv_cache_tokens") == FACTS.kv_tokens


async def test_every_name_is_there_from_the_start(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = set(
        re.findall(r"^radix_mla_(\w+)\{model_name=|^radix_mla_(\w+)\{", response.text, re.M)
    )
    names = {first or second for first, second in found}
    assert set(NAMES) <= names
    assert "_created" not in response.text
    assert all(
        'model_name="demo"' in line
        for line in response.text.splitlines()
        if line and not line.startswith("#")
    )


async def test_p01_hits_are_counted_once_a_request(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script([70, 71], cached=3))
    harness = Harness(engine, tokenizer)
    await harness.complete(prompt=[9] * 10, n=4)
    await harness.complete(prompt=[[9] * 10, [8] * 5])
    assert await harness.metric(f"{PREFIX}prefix_cache_queries_total") == 25
    assert await harness.metric(f"{PREFIX}prefix_cache_hits_total") == 9
    assert await harness.metric(f"{PREFIX}prompt_tokens_total") == 25
    assert await harness.metric(f"{PREFIX}generation_tokens_total") == 8 + 4
    assert await harness.metric(f"{PREFIX}requests_accepted_total") == 3
    assert await harness.metric(f"{PREFIX}prefix_cache_hit_length_tokens_count") == 3
    await _identities(harness)


async def test_p01_a_second_admission_is_not_counted(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": [5] * 8, "stream": True})
    await call.next()
    request = engine.requests[0]
    stream = engine.streams[request.request_id]
    stream.push(Admitted(request.request_id, 0, 7, {"last_token": 1}, 0.5))
    call.disconnect()
    await call.end()
    assert await harness.metric(f"{PREFIX}prefix_cache_queries_total") == 8
    await _identities(harness)


async def test_the_identities_hold_in_every_state(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = Harness(engine, tokenizer)
    running = Call(harness.app, "/v1/completions", {"prompt": "a", "stream": True, "n": 3})
    await running.next()
    engine.script = lambda request, index: Script(hold_queue=True)
    engine.submitted.clear()
    waiting = Call(harness.app, "/v1/completions", {"prompt": ["a", "b"]})
    await engine.submitted.wait()
    assert await harness.metric(f"{PREFIX}requests_running") == 1
    assert await harness.metric(f"{PREFIX}requests_waiting") == 2
    assert await harness.metric(f"{PREFIX}waiting_tokens") == 4
    await _identities(harness)
    for call in (running, waiting):
        call.disconnect()
        await call.end()
    engine.script = lambda request, index: Script([70], error="x")
    await harness.complete()
    engine.script = lambda request, index: Script()
    await harness.complete()
    await _identities(harness)
    finished = {
        reason: await harness.metric(f"{PREFIX}requests_finished_total", reason=reason)
        for reason in ("abort", "error", "length")
    }
    assert finished == {"abort": 3, "error": 1, "length": 1}


async def test_p03_counters_only_ever_grow_and_health_probes_do_not_touch_them(
    tokenizer: Tokenizer,
) -> None:
    harness = Harness(FakeEngine(lambda request, index: Script(cached=1)), tokenizer)
    await harness.complete(prompt=[5, 6])
    hits = await harness.metric(f"{PREFIX}prefix_cache_hits_total")
    for path in ("/health", "/ready", "/metrics"):
        await harness.get(path)
    assert await harness.metric(f"{PREFIX}prefix_cache_hits_total") == hits == 1


async def test_p04_gauges_are_true_when_idle_and_states_add_up(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    assert await harness.metric(f"{PREFIX}kv_cache_tokens", state="free") == FACTS.kv_tokens
    harness.engine.stats = EngineStats(
        kv_slots={"free": 512, "evictable": 256, "protected": 128, "private": 128, "pinned": 0},
        kv_slots_total=1024,
    )
    await harness.complete()
    assert await harness.metric(f"{PREFIX}kv_cache_usage_ratio") == 0.25
    assert await harness.metric(f"{PREFIX}requests_running") == 0
    assert await harness.metric(f"{PREFIX}requests_waiting") == 0
    await _identities(harness)


@pytest.mark.parametrize("value", [0.005, 300.0])
def test_p05_buckets_tell_5_ms_and_300_s_from_their_neighbours(value: float) -> None:
    assert LATENCY_BUCKETS[0] == 0.001
    assert LATENCY_BUCKETS[-1] == 600.0
    assert list(LATENCY_BUCKETS) == sorted(set(LATENCY_BUCKETS))
    above = min(bucket for bucket in LATENCY_BUCKETS if bucket >= value)
    below = max(bucket for bucket in LATENCY_BUCKETS if bucket < value)
    assert below >= value / 2.5
    assert above <= value * 2


async def test_p05_histograms_are_monotone_and_end_in_their_count(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(n=2)
    text = (await harness.get("/metrics")).text
    series: dict[str, list[float]] = {}
    for line in text.splitlines():
        if "_bucket{" in line:
            key = re.sub(r'le="[^"]*",?', "", line.rpartition(" ")[0])
            series.setdefault(key, []).append(float(line.rpartition(" ")[2]))
    assert series
    assert all(counts == sorted(counts) for counts in series.values())
    assert await harness.metric(f"{PREFIX}time_to_first_token_seconds_count") == 1
    assert await harness.metric(f"{PREFIX}inter_token_latency_seconds_count") == 2
    assert await harness.metric(f"{PREFIX}e2e_request_latency_seconds_count") == 1


@pytest.mark.parametrize(
    ("cached", "label"), [(0, "miss"), (1, "partial"), (17, "partial"), (18, "hit"), (19, "hit")]
)
async def test_ttft_is_labelled_by_hit(tokenizer: Tokenizer, cached: int, label: str) -> None:
    harness = Harness(FakeEngine(lambda request, index: Script(cached=cached)), tokenizer)
    await harness.complete(prompt=[5] * 20)
    name = f"{PREFIX}time_to_first_token_seconds_count"
    assert await harness.metric(name, cache=label) == 1
    assert await harness.metric(name) == 1


async def test_turn_is_later_when_the_session_was_seen(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(prompt=[5, 6], prompt_cache_key="s1")
    await harness.complete(prompt=[5, 6], prompt_cache_key="s2")
    await harness.complete(prompt=[5, 6, 7], prompt_cache_key="s1")
    for _ in range(2):
        await harness.post("/v1/completions", {"prompt": [5]}, x_session_affinity="s3")
    name = f"{PREFIX}prefix_cache_queries_total"
    assert await harness.metric(name, turn="later") == 3 + 1
    assert await harness.metric(name, turn="first") == 2 + 2 + 1
    assert "s1" not in (await harness.get("/metrics")).text


async def test_rejections_are_counted_by_reason(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(n=0)
    await harness.complete(prompt=[5] * 500)
    await harness.complete(model="x")
    await harness.post("/tokenize", {})
    name = f"{PREFIX}rejections_total"
    for reason in ("invalid_request", "context_length", "model_not_found"):
        assert await harness.metric(name, reason=reason) == 1
    assert await harness.metric(f"{PREFIX}requests_accepted_total") == 0


async def test_vllm_aliases_only_when_asked_for(tokenizer: Tokenizer) -> None:
    assert "vllm:" not in (await Harness(tokenizer=tokenizer).get("/metrics")).text
    harness = Harness(tokenizer=tokenizer, metrics_aliases="vllm")
    await harness.complete(prompt=[5] * 4)
    assert await harness.metric("vllm:prefix_cache_queries_total") == 4
    text = (await harness.get("/metrics")).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        'vllm:cache_config_info{block_size="16"',
        "vllm:time_to_first_token_seconds_bucket",
    ):
        assert name in text


async def test_the_reasons_for_waiting_add_up_to_the_exact_count(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold_queue=True))
    engine.stats = EngineStats(num_waiting={"slots": 1, "sibling": 5})
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": ["a", "b", "c"]})
    await engine.submitted.wait()
    name = f"{PREFIX}requests_waiting"
    assert await harness.metric(name) == 3
    assert await harness.metric(name, reason="slots") == 1
    assert await harness.metric(name, reason="sibling") == 2
    call.disconnect()
    await call.end()
