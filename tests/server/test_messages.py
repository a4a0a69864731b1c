"""POST /v1/messages and /count_tokens: shapes, events, translation, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.demo_app import call_text, demo_app, named_events, prompt_text, says
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness

USER = {"role": "user", "content": "hi"}
TOOL = {
    "name": "read_file",
    "description": "Reads a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
    "cache_control": {"type": "ephemeral"},
    "eager_input_streaming": True,
    "defer_loading": False,
}
BASE: dict[str, Any] = {"model": "demo", "max_tokens": 64, "messages": [USER]}


async def _post(harness: Harness, **body: Any) -> Any:
    response = await harness.post("/v1/messages", BASE | body)
    assert response.status_code == 200, response.text
    return response


async def test_the_whole_message() -> None:
    harness = demo_app(says("Hello world", cached=2))
    response = await _post(harness)
    body = response.json()
    usage = body.pop("usage")
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": "Hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    prompt = len(harness.engine.requests[0].prompt_tokens)
    assert usage["cache_read_input_tokens"] == 2
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(usage[part] for part in parts) == prompt
    assert usage["output_tokens"] > 0
    assert response.headers["x-radix-cached-tokens"] == "2"


async def test_the_events_of_a_text() -> None:
    harness = demo_app(says("Hello world", cached=2))
    events = named_events(await _post(harness, stream=True))
    assert all(name == data["type"] for name, data in events)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) == {"content_block_delta"}
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == "Hello world"
    start, delta = events[0][1]["message"], events[-2][1]
    assert start["content"] == []
    assert start["usage"]["cache_read_input_tokens"] == 2
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["cache_read_input_tokens"] == 2
    assert delta["usage"]["output_tokens"] > 0


async def test_a_tool_call_whole_and_streamed() -> None:
    harness = demo_app(says("Let me see." + call_text("read_file", '{"path": "a.py"}')))
    body = (await _post(harness, tools=[TOOL])).json()
    text, call = body["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "read_file",
        {"path": "a.py"},
    )
    assert body["stop_reason"] == "tool_use"
    events = named_events(await _post(harness, tools=[TOOL], stream=True))
    pieces = [
        data["delta"]["partial_json"]
        for _, data in events
        if data.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert "".join(pieces) == '{"path": "a.py"}'
    assert len(pieces) > 1
    starts = [data["content_block"] for name, data in events if name == "content_block_start"]
    assert [block["type"] for block in starts] == ["text", "tool_use"]
    assert starts[1]["input"] == {}
    stops = [data["index"] for name, data in events if name == "content_block_stop"]
    assert stops == [0, 1]
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


async def test_a_tool_loop_is_rendered_in_place() -> None:
    harness = demo_app(says("ok"))
    messages = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "read_file", "input": {"path": "ä"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "line"}],
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "go "},
                {"type": "text", "text": "on"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1"},
        {"type": "text", "text": "You are terse.", "cache_control": {"type": "ephemeral"}},
    ]
    await _post(harness, messages=messages, system=system, tools=[TOOL])
    text = prompt_text(harness)
    assert text.startswith("<｜begin▁of▁sentence｜><｜System｜>You are terse.\n\n## Tools")
    assert "Let me see.<｜tool▁calls▁begin｜>" in text
    assert '{"path": "ä"}' in text
    assert "line<｜tool▁output▁end｜><｜tool▁outputs▁end｜><｜User｜>go on<｜Assistant｜>" in text


async def test_a_last_assistant_message_is_continued() -> None:
    harness = demo_app(says("time"))
    await _post(harness, messages=[USER, {"role": "assistant", "content": "Once upon a "}])
    assert prompt_text(harness).endswith("<｜User｜>hi<｜Assistant｜>Once upon a ")


async def test_stop_sequences_and_length() -> None:
    harness = demo_app(says("Hello world"))
    body = (await _post(harness, stop_sequences=["world"])).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "world")
    assert body["content"] == [{"type": "text", "text": "Hello "}]
    body = (await _post(harness, max_tokens=1)).json()
    assert body["stop_reason"] == "max_tokens"


async def test_arguments_that_are_cut_are_kept() -> None:
    text = call_text("read_file", '{"path": "a.py"}').partition("a.py")[0]
    harness = demo_app(says(text, finish="length"))
    body = (await _post(harness, tools=[TOOL])).json()
    assert body["stop_reason"] == "max_tokens"
    assert body["content"][0]["input"] == {"invalid_json": '{"path": "'}


async def test_token_ids_go_round() -> None:
    harness = demo_app(says("Hello"))
    body = (await _post(harness, return_token_ids=True)).json()
    answer = {"role": "assistant", "content": body["content"], "token_ids": body["token_ids"]}
    await _post(harness, messages=[USER, answer, USER])
    first, later = (request.prompt_tokens.tolist() for request in harness.engine.requests)
    assert later[: len(first) + len(body["token_ids"])] == first + body["token_ids"]
    events = named_events(await _post(harness, return_token_ids=True, stream=True))
    assert events[-2][1]["token_ids"] == body["token_ids"]


async def test_count_tokens_is_what_a_message_uses() -> None:
    harness = demo_app(says("a"))
    body = {"model": "demo", "messages": [USER], "system": "s", "tools": [TOOL]}
    counted = await harness.post("/v1/messages/count_tokens", body)
    assert counted.status_code == 200
    assert not harness.engine.requests
    await _post(harness, system="s", tools=[TOOL])
    assert counted.json() == {"input_tokens": len(harness.engine.requests[0].prompt_tokens)}


async def test_fields_of_claude_code_and_ours() -> None:
    harness = demo_app(says("a"))
    response = await _post(
        harness,
        metadata={"user_id": "user_1_session_2"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        betas=["x"],
        speed="fast",
        container=None,
        mcp_servers=[],
        service_tier="auto",
        thinking={"type": "adaptive"},
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        cache_salt="salt",
        top_k=5,
    )
    ignored = response.headers["x-radix-ignored-fields"].split(", ")
    assert sorted(ignored) == ["thinking", "tools[1]"]
    request = harness.engine.requests[0]
    assert (request.namespace, request.params.top_k) == ("salt", 5)
    again = await _post(harness, metadata={"user_id": "user_1_session_2"})
    assert again.status_code == 200
    assert await harness.metric("radix_mla_prefix_cache_queries_total", turn="later") > 0


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        ({"messages": []}, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_request_error", "role"),
        ({"model": "other"}, "not_found_error", "does not exist"),
        ({"mcp_servers": [{"url": "x"}]}, "invalid_request_error", "mcp_servers"),
        ({"tool_choice": {"type": "some"}, "tools": [TOOL]}, "invalid_request_error", "some"),
        ({"max_tokens": 0}, "invalid_request_error", "max_tokens"),
        ({"max_token": 5}, "invalid_request_error", "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            "image",
        ),
        ({"n": 2}, "invalid_request_error", "n must be 1"),
    ],
)
async def test_refusals_have_anthropics_shape(body: dict[str, Any], kind: str, words: str) -> None:
    harness = demo_app(says("a"))
    response = await harness.post("/v1/messages", BASE | body)
    assert response.status_code == (404 if kind == "not_found_error" else 400)
    answer = response.json()
    assert answer["type"] == "error"
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]


async def test_a_prompt_that_is_too_long_says_so_in_anthropics_words() -> None:
    harness = demo_app(says("a"), max_model_len=32)
    response = await harness.post("/v1/messages", BASE | {"system": "word " * 100})
    assert response.status_code == 400
    assert response.json()["request_id"] == response.headers["x-request-id"]
    message = response.json()["error"]["message"]
    assert message.startswith("prompt is too long: ")
    assert message.endswith(" tokens > 32 maximum")


async def test_keys_and_unknown_paths_and_methods() -> None:
    harness = demo_app(says("a"), api_key=["secret"])
    refused = await harness.post("/v1/messages", BASE)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    assert (await harness.post("/v1/messages", BASE, x_api_key="secret")).status_code == 200
    bearer = await harness.post("/v1/messages", BASE, authorization="Bearer secret")
    assert bearer.status_code == 200
    wrong = await harness.get("/v1/messages", authorization="Bearer secret")
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


async def test_failures_in_a_stream_are_events() -> None:
    engine = FakeEngine(lambda request, index: Script([20, 21], error="boom"))
    events = named_events(await _post(demo_app(engine), stream=True))
    assert events[0][0] == "message_start"
    name, data = events[-1]
    assert (name, data["type"], data["error"]["type"]) == ("error", "error", "api_error")
    assert "boom" not in data["error"]["message"]


async def test_silence_is_filled_with_pings() -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = demo_app(engine, sse_keepalive=0.01)

    async def hang_up() -> None:
        await engine.submitted.wait()
        await asyncio.sleep(0.1)  # the silence under test
        engine.die()

    task = asyncio.create_task(hang_up())
    events = named_events(await _post(harness, stream=True))
    await task
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "ping"]
    assert names[-1] == "error"
