"""T09: a client that goes away ends its requests at once, streamed or not, n > 1, lists."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import Call, Harness

from radix_mla.text.tokenizer import Tokenizer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("body", [{"prompt": "a"}, {"prompt": "a", "n": 4}, {"prompt": ["a", "b"]}])
@pytest.mark.parametrize("queued", [True, False])
async def test_t09_disconnect_aborts(
    tokenizer: Tokenizer, stream: bool, body: dict[str, Any], queued: bool
) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True, hold_queue=queued))
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {**body, "stream": stream, "max_tokens": 100})
    await engine.submitted.wait()
    if stream and not queued:
        await call.next()
    num_requests = len(engine.requests)
    call.disconnect()
    await call.end()
    ids = {request.request_id for request in engine.requests}
    assert {request_id for request_id, _, reason in engine.aborts if reason == "abort"} == ids
    assert engine.streams == {}
    assert await harness.metric("radix_mla_requests_running") == 0
    assert await harness.metric("radix_mla_requests_waiting") == 0
    aborted = await harness.metric("radix_mla_requests_finished_total", reason="abort")
    assert aborted == num_requests == await harness.metric("radix_mla_requests_accepted_total")
    assert harness.service.generations == set()


async def test_t09_disconnect_in_the_middle_of_tokens(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script([70] * 100, per_event=1), delay_s=0.001)
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 100})
    for _ in range(4):
        await call.next()
    call.disconnect()
    await call.end()
    assert [reason for _, _, reason in engine.aborts] == ["abort"]


async def test_a_finished_request_is_not_aborted(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete()
    assert harness.engine.aborts == []
    assert len(harness.engine.forgotten) >= 1


async def test_a_request_runs_until_the_engine_has_let_go_of_it(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True), slow_aborts=True)
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": "a", "n": 2, "stream": True})
    await call.next()
    call.disconnect()
    await call.end()
    request_id = engine.requests[0].request_id
    assert await harness.metric("radix_mla_requests_running") == 1
    engine.settle(request_id, 0, "abort")
    assert await harness.metric("radix_mla_requests_running") == 1
    engine.settle(request_id, 1, "abort")
    assert await harness.metric("radix_mla_requests_running") == 0
    assert await harness.metric("radix_mla_requests_finished_total", reason="abort") == 1
    assert engine.streams == {}


async def test_the_same_after_a_stop_string_but_the_answer_does_not_wait(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("a STOP and more", False)
    engine = FakeEngine(
        lambda request, index: Script([*ids, 70, 70]), slow_aborts=True, delay_s=0.001
    )
    harness = Harness(engine, tokenizer)
    answer = await harness.complete(stop="STOP", max_tokens=100)
    assert answer.json()["choices"][0]["text"] == "a "
    assert [(index, why) for _, index, why in engine.aborts] == [(0, "stop")]
    assert await harness.metric("radix_mla_requests_running") == 1
    engine.settle(engine.requests[0].request_id, 0, "stop")
    assert await harness.metric("radix_mla_requests_finished_total", reason="stop") == 1
    assert await harness.metric("radix_mla_requests_running") == 0


async def test_engine_death_settles_what_was_closing(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True), slow_aborts=True)
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": "a", "stream": True})
    await call.next()
    call.disconnect()
    await call.end()
    engine.die()
    assert await harness.metric("radix_mla_requests_finished_total", reason="abort") == 1
    assert await harness.metric("radix_mla_requests_running") == 0
