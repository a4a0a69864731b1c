"""POST /v1/responses: shapes, events, Codex's twelve fields, what is not stored."""

from __future__ import annotations

from typing import Any

import pytest
from support.demo_app import call_text, demo_app, named_events, prompt_text, says
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness

TOOL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}


async def _post(harness: Harness, **body: Any) -> Any:
    response = await harness.post("/v1/responses", {"model": "demo", "input": "hi", **body})
    assert response.status_code == 200, response.text
    return response


async def test_the_whole_response() -> None:
    harness = demo_app(says("Hello world", cached=2))
    body = (await _post(harness, instructions="Be brief.", metadata={"a": "b"})).json()
    assert body["object"] == "response"
    assert body["id"].startswith("resp_")
    assert (body["status"], body["error"], body["store"]) == ("completed", None, False)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hello world", "annotations": [], "logprobs": []}
    ]
    usage = body["usage"]
    assert usage["input_tokens"] == len(harness.engine.requests[0].prompt_tokens)
    assert usage["input_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert body["metadata"] == {"a": "b"}
    assert prompt_text(harness).endswith("<｜System｜>Be brief.<｜User｜>hi<｜Assistant｜>")


async def test_the_events_of_a_text() -> None:
    harness = demo_app(says("Hello world"))
    events = named_events(await _post(harness, stream=True))
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    names = [name.removeprefix("response.") for name, _ in events]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(names[4:-4]) == {"output_text.delta"}
    text = "".join(data["delta"] for name, data in events if name.endswith("output_text.delta"))
    assert text == "Hello world"
    assert events[2][1]["item"]["content"] == []
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == text


async def test_a_function_call_whole_and_streamed() -> None:
    harness = demo_app(says("Wait." + call_text("shell", '{"command": "ls -l"}')))
    body = (await _post(harness, tools=[TOOL])).json()
    message, call = body["output"]
    assert message["content"][0]["text"] == "Wait."
    assert (call["type"], call["name"], call["status"]) == ("function_call", "shell", "completed")
    assert call["arguments"] == '{"command": "ls -l"}'
    events = named_events(await _post(harness, tools=[TOOL], stream=True))
    deltas = [d["delta"] for name, d in events if name.endswith("arguments.delta")]
    assert "".join(deltas) == call["arguments"]
    assert len(deltas) > 1
    (done,) = [d for name, d in events if name.endswith("arguments.done")]
    assert (done["arguments"], done["output_index"]) == (call["arguments"], 1)
    items = [d["item"] for name, d in events if name.endswith("output_item.done")]
    assert [item["type"] for item in items] == ["message", "function_call"]


async def test_a_tool_loop_of_codex() -> None:
    harness = demo_app(says("ok"))
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAA"},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": '{"command":"a"}'},
        {"type": "function_call", "call_id": "c2", "name": "shell", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "two"}],
        },
        {"type": "web_search_call", "status": "completed"},
    ]
    response = await _post(
        harness,
        input=items,
        instructions="You are Codex.",
        tools=[
            TOOL,
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "namespace", "name": "mcp", "tools": []},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="session",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
    )
    ignored = response.headers["x-radix-ignored-fields"].split(", ")
    assert sorted(ignored) == [
        "input[8].type",
        "reasoning_effort",
        "tools[1]",
        "tools[2]",
        "tools[3]",
    ]
    text = prompt_text(harness)
    assert "<｜System｜>You are Codex." in text
    assert "<｜System｜>d<｜User｜>hi<｜Assistant｜>Wait.<｜tool▁calls▁begin｜>" in text
    assert '{"command":"a"}' in text
    assert "one<｜tool▁output▁end｜><｜tool▁output▁begin｜>two<｜tool▁output▁end｜>" in text


async def test_length_is_incomplete() -> None:
    harness = demo_app(says("Hello world"))
    body = (await _post(harness, max_output_tokens=1)).json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    assert body["output"][0]["status"] == "incomplete"
    events = named_events(await _post(harness, max_output_tokens=1, stream=True))
    assert events[-1][0] == "response.incomplete"


async def test_token_ids_go_round() -> None:
    harness = demo_app(says("Hello"))
    body = (await _post(harness, return_token_ids=True)).json()
    user = {"role": "user", "content": "hi"}
    answer = {**body["output"][0], "token_ids": body["token_ids"]}
    await _post(harness, input=[user, answer, user])
    first, later = (request.prompt_tokens.tolist() for request in harness.engine.requests)
    assert later[: len(first) + len(body["token_ids"])] == first + body["token_ids"]


async def test_logprobs_come_when_included() -> None:
    harness = demo_app(says("Hello"))
    body = (await _post(harness, include=["message.output_text.logprobs"], top_logprobs=2)).json()
    (part,) = body["output"][0]["content"]
    assert len(part["logprobs"]) >= 1
    assert len(part["logprobs"][0]["top_logprobs"]) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "narrator", "content": "x"}]}, "messages[0].role"),
        ({"n": 2}, "n"),
        ({"max_output_token": 2}, "max_output_token"),
    ],
)
async def test_refusals(body: dict[str, Any], param: str) -> None:
    response = await demo_app(says("a")).post(
        "/v1/responses", {"model": "demo", "input": "a", **body}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_failures_in_a_stream_are_events() -> None:
    engine = FakeEngine(lambda request, index: Script([20, 21], error="boom"))
    events = named_events(await _post(demo_app(engine), stream=True))
    assert [name for name, _ in events[-2:]] == ["error", "response.failed"]
    assert events[-1][1]["response"]["status"] == "failed"
    assert "boom" not in str(events)


async def test_empty_values_of_what_is_refused_are_fine() -> None:
    await _post(demo_app(says("a")), previous_response_id=None, background=False)
