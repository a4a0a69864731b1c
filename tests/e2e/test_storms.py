"""Aborts at every moment and simultaneous requests, on the real engine and over HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from support.greedy_runs import assert_equal_runs, make_request, run, run_one_at_a_time
from support.server_process import ServerProcess, wait_for

from radix_mla.config import EngineConfig
from radix_mla.engine.build import build_engine
from radix_mla.engine.engine import Engine
from radix_mla.request import FinishReason

PREFIX = 2000


def engine_of(model: Path, **knobs: object) -> Engine:
    config = EngineConfig(model=str(model), num_threads=1, **knobs)  # type: ignore[arg-type]
    return build_engine(config)


@pytest.mark.parametrize("abort_leader", [False, True])
def test_64_at_once_compute_a_shared_prefix_once(tiny_model: Path, abort_leader: bool) -> None:
    rng = np.random.default_rng(3)
    prefix = rng.integers(3, 500, PREFIX)
    own = [rng.integers(3, 500, 1 + i % 9) for i in range(64)]
    requests = [
        make_request(f"r{i}", np.concatenate([prefix, tail]), 4) for i, tail in enumerate(own)
    ]
    engine = engine_of(tiny_model, kv_cache_tokens=8192, max_num_batched_tokens=512)
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        engine.cache.audit()
        if abort_leader and steps == 2:  # half of the prefix is computed
            engine.abort("r0")

    results = run(engine, requests, after_step=after_step)
    computed = engine.stats().prefill_tokens["computed"]
    assert computed <= PREFIX + 64 * max(len(tail) for tail in own)
    assert engine.stats().prefill_tokens["recomputed"] == 0
    if abort_leader:
        assert results.pop("r0").finish_reason == "abort"
        requests = requests[1:]
    assert all(result.finish_reason == "length" for result in results.values())
    alone = engine_of(tiny_model, kv_cache_tokens=8192, enable_prefix_cache=False)
    some = requests[:6]
    names = {request.request_id for request in some}
    want = run_one_at_a_time(alone, some)
    assert_equal_runs(want, {name: results[name] for name in names})


def test_aborts_at_random_steps_lose_nothing(tiny_model: Path) -> None:
    """Each moment: in the queue, behind a sibling, between chunks, decoding, at the last token."""
    rng = np.random.default_rng(5)
    draw = random.Random(5)
    heads = [rng.integers(3, 500, 200) for _ in range(10)]
    requests = [
        make_request(
            f"r{i}", np.concatenate([heads[i % 10], rng.integers(3, 500, 1 + i % 60)]), 1 + i % 12
        )
        for i in range(120)
    ]
    engine = engine_of(
        tiny_model, kv_cache_tokens=2048, max_num_batched_tokens=96, max_num_seqs=16, page_size=16
    )
    victims = draw.sample([request.request_id for request in requests], 40)
    steps = 0

    def after_step() -> None:
        nonlocal steps
        steps += 1
        engine.cache.audit()
        if victims and steps % 2 == 0:
            engine.abort(victims.pop())

    results = run(engine, requests, after_step=after_step)
    reasons = [result.finish_reason for result in results.values()]
    assert set(reasons) <= {"length", "abort"}
    assert 20 <= reasons.count("abort") <= 40
    stats = engine.stats()
    assert stats.num_running == 0
    assert sum(stats.num_waiting.values()) == 0
    assert stats.kv_slots["private"] == stats.kv_slots["protected"] == 0
    engine.cache.audit()
    engine.flush()
    assert engine.stats().kv_slots["free"] == 2048


def test_abort_reason_stop_is_counted_as_stop(tiny_model: Path) -> None:
    engine = engine_of(tiny_model, kv_cache_tokens=1024)
    engine.add_request(make_request("r", np.arange(3, 40), 50))
    engine.step()
    engine.abort("r", 0, FinishReason.STOP)
    ends = [output for output in engine.take_events().sequences if output.finish_reason]
    assert [output.finish_reason for output in ends] == ["stop"]


async def _storm(server: ServerProcess, count: int, seed: int) -> tuple[int, int]:
    """`count` requests, a third cut off by the client; (answered, cut off)."""
    draw = random.Random(seed)
    gate = asyncio.Semaphore(48)
    heads = [[draw.randrange(3, 500) for _ in range(300)] for _ in range(8)]
    answered = cut = 0

    async def one(session: aiohttp.ClientSession, index: int) -> None:
        nonlocal answered, cut
        body = {
            "model": "tiny",
            "prompt": heads[index % 8] + [draw.randrange(3, 500) for _ in range(index % 50)],
            "max_tokens": 1 + index % 20,
            "n": 1 + (index % 7 == 0),
            "stream": index % 2 == 0,
            "ignore_eos": True,
        }
        timeout = draw.uniform(0.001, 0.4) if index % 3 == 0 else 200.0
        async with gate:
            try:
                async with (
                    asyncio.timeout(timeout),
                    session.post(f"{server.url}/v1/completions", json=body) as reply,
                ):
                    assert reply.status == 200, await reply.text()
                    await reply.read()
                    answered += 1
            except TimeoutError:
                cut += 1

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session, index) for index in range(count)))
    return answered, cut


def check_storm(server: ServerProcess, count: int) -> None:
    before = server.metrics()
    answered, cut = asyncio.run(_storm(server, count, seed=count))
    assert answered + cut == count
    assert cut > 0

    def idle() -> bool:
        metrics = server.metrics()
        return metrics.total("requests_running") == metrics.total("requests_waiting") == 0

    wait_for(idle)
    metrics = server.metrics()
    states = metrics.by("kv_cache_tokens", "state")
    assert states["private"] == states["protected"] == 0
    assert sum(states.values()) == 4096
    accepted = metrics.total("requests_accepted_total")
    assert accepted == metrics.total("requests_finished_total")
    assert accepted - before.total("requests_accepted_total") >= answered
    reasons = metrics.by("requests_finished_total", "reason")
    assert reasons.get("error", 0) == 0
    assert reasons["length"] >= answered
    assert server.get("/v1/cache/audit")["ok"] is True
    queries = metrics.total("prefix_cache_queries_total")
    assert queries == metrics.total("prefix_cache_hits_total") + metrics.total(
        "prefix_cache_missed_tokens_total"
    )


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    flags = ("--served-model-name", "tiny", "--kv-cache-tokens", "4096", "--max-num-seqs", "16")
    flags = (*flags, "--max-num-batched-tokens", "128")
    with ServerProcess(tiny_model, *flags, without=["xgrammar"]) as server:
        yield server


@pytest.mark.parametrize("count", [90, pytest.param(500, marks=pytest.mark.stress)])
def test_clients_that_leave_at_random_moments(server: ServerProcess, count: int) -> None:
    check_storm(server, count)


def test_disconnects_abort_and_give_everything_back(server: ServerProcess) -> None:
    before = server.metrics()
    long = {"model": "tiny", "max_tokens": 3000, "ignore_eos": True}
    connections = [
        server.open_stream("/v1/completions", prompt=[9, i, 3], n=1 + i % 2, **long)
        for i in range(6)
    ]
    for connection in connections:
        connection.getresponse().readline()
    plain = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    plain.request("POST", "/v1/completions", json.dumps({**long, "prompt": [5, 6, 7, 8]}))
    wait_for(lambda: server.metrics().total("requests_running") > 0)
    for connection in [*connections, plain]:
        connection.sock.close()
        connection.close()
    wait_for(lambda: server.metrics().total("requests_running") == 0, 5)
    metrics = server.metrics()
    assert metrics.total("requests_waiting") == 0
    aborted, accepted = (
        metrics.total(name, **labels) - before.total(name, **labels)
        for name, labels in (
            ("requests_finished_total", {"reason": "abort"}),
            ("requests_accepted_total", {}),
        )
    )
    assert aborted == accepted >= 6
    states = metrics.by("kv_cache_tokens", "state")
    assert states["private"] == states["protected"] == 0
    assert server.get("/v1/cache/audit")["ok"] is True


def test_flush_while_busy_over_http(server: ServerProcess) -> None:
    """After the answer nothing hits, and what runs is unharmed."""
    prompt = list(range(3, 203))
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 400,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    want = server.post("/v1/completions", **body)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", **body)
        wait_for(lambda: server.metrics().total("requests_running") == 1)
        status, dropped = server.request("DELETE", "/v1/cache")
        assert status == 200, dropped
        after = server.post("/v1/completions", **{**body, "max_tokens": 1})
        ran = running.result()
    assert ran["choices"][0]["token_ids"] == want["choices"][0]["token_ids"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert server.get("/v1/cache/audit")["ok"] is True
