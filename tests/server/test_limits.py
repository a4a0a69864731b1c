"""A01, A03, A05, A06, A13, X05 and the queue: edge values are 400 with their field, never more."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import Call, Harness

from radix_mla.text.tokenizer import Tokenizer
from server.openai.schemas import ChatRequest, CompletionRequest


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer=tokenizer)


async def _refused(harness: Harness, param: str, **body: Any) -> str:
    response = await harness.complete(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert harness.engine.requests == []
    assert (await harness.complete()).status_code == 200
    return str(error["message"])


async def test_a01_null_is_absent_one_by_one_and_all_at_once(harness: Harness) -> None:
    for schema, send, needed in (
        (CompletionRequest, harness.complete, "prompt"),
        (ChatRequest, harness.chat, "messages"),
    ):
        names = [name for name in schema.model_fields if name != needed]
        for name in names:
            assert (await send(**{name: None})).status_code == 200
        assert (await send(**dict.fromkeys(names))).status_code == 200
    plain = harness.engine.requests[0]
    assert {
        (request.params.max_tokens, request.params.temperature, request.n)
        for request in harness.engine.requests
        if request.prompt == plain.prompt
    } == {(16, 1.0, 1)}


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", ""], [[]], [[1], []], [1, [2]], [[1], 2], ["a", 1], [1, "a"]]
)
async def test_a03_empty_and_mixed_prompts(harness: Harness, prompt: Any) -> None:
    await _refused(harness, "prompt", prompt=prompt)


@pytest.mark.parametrize("prompt", [None, 5, {}, True, 1.5, [None], [1.5], [True], [[True]]])
async def test_a03_prompts_of_other_types(harness: Harness, prompt: Any) -> None:
    await _refused(harness, "prompt", prompt=prompt)


BAD_IDS = (-1, 400, 401, 2**31, 2**63, 5279552648203111001, 2**64, 10**30)


@pytest.mark.parametrize("token_id", BAD_IDS)
async def test_a05_ids_outside_the_vocabulary(harness: Harness, token_id: int) -> None:
    await _refused(harness, "prompt", prompt=[1, token_id])
    harness.engine.requests.clear()
    await _refused(harness, "stop_token_ids", stop_token_ids=[token_id])
    harness.engine.requests.clear()
    await _refused(harness, "logit_bias", logit_bias={str(token_id): 1})


async def test_a05_ids_between_tokenizer_and_vocabulary_may_be_sent(harness: Harness) -> None:
    assert (await harness.complete(prompt=[399])).status_code == 200


@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ("", "stop[0]"),
        ([""], "stop[0]"),
        (["", "x"], "stop[0]"),
        (["x", ""], "stop[1]"),
        (["x"] * 17, "stop"),
        ("x" * 1_000_000, "stop[0]"),
        (5, "stop"),
        ([5], "stop[0]"),
    ],
)
async def test_a06_stops(harness: Harness, stop: Any, param: str) -> None:
    await _refused(harness, param, stop=stop)


async def test_a06_no_stops_and_16_stops(harness: Harness) -> None:
    assert (await harness.complete(stop=[])).status_code == 200
    assert (await harness.complete(stop=[str(i) for i in range(16)])).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", 999999),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", -1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 5e-324),
        ("repetition_penalty", -1),
        ("seed", 2**63),
        ("seed", "x"),
        ("max_tokens", -2),
        ("max_tokens", 0),
        ("max_tokens", 2**63),
        ("max_tokens", "16"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("n", 0),
        ("n", -1),
        ("n", 17),
        ("n", 10**6),
        ("best_of", 10**6),
        ("best_of", 0),
        ("logprobs", 21),
        ("logprobs", 10**5),
        ("logprobs", -1),
        ("logprobs", True),
        ("stream", "yes"),
        ("echo", 1),
        ("priority", 2**31),
        ("cache_salt", 5),
        ("cache_salt", "x" * 1025),
        ("cache_store", "no"),
        ("request_id", "bad\nid"),
        ("model", 7),
        ("logit_bias", [1]),
        ("stop_token_ids", "x"),
    ],
)
async def test_a13_x05_values_out_of_range(harness: Harness, field: str, value: Any) -> None:
    body = {"max_tokens": 16, field: value}
    await _refused(harness, field, **body)


@pytest.mark.parametrize("value", [101, -101, 1e39, "x", True])
async def test_x10_logit_bias_values(harness: Harness, value: Any) -> None:
    await _refused(harness, "logit_bias", logit_bias={"3": value})


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "", "٣", "9" * 40])
async def test_a05_logit_bias_keys(harness: Harness, key: str) -> None:
    await _refused(harness, "logit_bias", logit_bias={key: 1})


async def test_whole_floats_are_integers(harness: Harness) -> None:
    assert (await harness.complete(max_tokens=4.0, n=1.0)).status_code == 200


async def test_best_of_up_to_n_is_accepted(harness: Harness) -> None:
    assert (await harness.complete(n=2, best_of=2)).status_code == 200


async def test_x05_a_long_list_of_prompts(harness: Harness) -> None:
    message = await _refused(harness, "prompt", prompt=["a"] * 100_000)
    assert "1024" in message
    harness.engine.requests.clear()
    await _refused(harness, "prompt", prompt=[[1]] * 100_000)


async def test_x05_limits_are_named(harness: Harness) -> None:
    assert "16" in await _refused(harness, "n", n=17)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [({"max_queued_requests": 2}, "queue_requests"), ({"max_queued_tokens": 5}, "queue_tokens")],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_s07_a_full_queue_is_429_with_retry_after(
    tokenizer: Tokenizer, knobs: dict[str, int], reason: str, stream: bool
) -> None:
    engine = FakeEngine(lambda request, index: Script(hold_queue=True))
    harness = Harness(engine, tokenizer, **knobs)
    calls = [Call(harness.app, "/v1/completions", {"prompt": "a", "max_tokens": 9})]
    calls.append(Call(harness.app, "/v1/completions", {"prompt": "a", "max_tokens": 9}))
    while len(engine.requests) < 2:
        await engine.submitted.wait()
        engine.submitted.clear()
    response = await harness.complete(stream=stream)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "2"
    message = response.json()["error"]["message"].lower()
    assert "context" not in message
    assert "too many tokens" not in message
    assert await harness.metric("radix_mla_rejections_total", reason=reason) == 1
    assert await harness.metric("radix_mla_requests_accepted_total") == 2
    for call in calls:
        call.disconnect()
        await call.end()


async def test_an_empty_queue_takes_a_request_above_the_limits(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer, max_queued_requests=1, max_queued_tokens=3)
    assert (await harness.complete(prompt=["aaaa", "bbbb"])).status_code == 200
