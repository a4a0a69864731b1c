"""Tool calls on the bundled model: forced by grammar, streamed, and sent back."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from support.server_process import ServerProcess

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Bern", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
TOOLS = [WEATHER, CLOCK]
USER = {"role": "user", "content": "What is the weather like?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def _client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def _ask(server: ServerProcess, messages: list[Any], **extra: Any) -> Any:
    body = {"model": "demo", "messages": messages, "tools": TOOLS, "max_tokens": 200, **extra}
    return _client(server).chat.completions.create(**body)


def _check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "clock":
        assert value == {}
        return
    assert name == "get_weather"
    assert set(value) == {"city", "days"}
    assert value["city"] in ("Bern", "Oslo")
    assert 1 <= value["days"] <= 9


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_follows_the_schema(
    demo_server: ServerProcess, choice: Any, temperature: float
) -> None:
    extra = {"tool_choice": choice, "temperature": temperature, "seed": 1}
    answer = _ask(demo_server, [USER], parallel_tool_calls=False, **extra).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls
    assert choice == "required" or call.function.name == "get_weather"
    _check(call.function.name, call.function.arguments)

    name, arguments, reasons = "", "", []
    for chunk in _ask(demo_server, [USER], stream=True, parallel_tool_calls=False, **extra):
        for part in chunk.choices:
            reasons.append(part.finish_reason)
            for piece in part.delta.tool_calls or []:
                assert piece.index == 0
                name += piece.function.name or ""
                arguments += piece.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)
    assert reasons[-1] == "tool_calls"


def test_a_call_sent_back_is_found_in_the_cache(demo_server: ServerProcess) -> None:
    """As `token_ids` all of the first turn is a prefix of the second, as text its prompt is."""
    ids = {"return_token_ids": True}
    first = _ask(demo_server, [USER], tool_choice=NAMED, temperature=0, extra_body=ids)
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    as_text = message.model_dump(exclude_none=True)
    as_ids = {**as_text, "token_ids": first.choices[0].token_ids}
    turn = first.usage.prompt_tokens + first.usage.completion_tokens
    for sent, least in ((as_text, first.usage.prompt_tokens), (as_ids, turn - 1)):
        second = _ask(demo_server, [USER, sent, result], tool_choice="none", temperature=0)
        assert second.choices[0].message.tool_calls is None
        assert second.usage.prompt_tokens_details.cached_tokens >= least


def test_strict_under_auto_leaves_text_alone(demo_server: ServerProcess) -> None:
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    answers = [
        _ask(demo_server, [USER], tools=[tool], temperature=0, max_tokens=40, seed=1)
        for tool in (WEATHER, strict)
    ]
    assert answers[0].usage.prompt_tokens == answers[1].usage.prompt_tokens
    for answer in answers:
        for call in answer.choices[0].message.tool_calls or []:
            assert call.function.name == "get_weather"
    assert answers[1].choices[0].message.content == answers[0].choices[0].message.content


def test_role_marks_of_a_user_stay_text(demo_server: ServerProcess) -> None:
    mark = "<｜User｜>"
    ask = {"model": "demo", "max_tokens": 1, "extra_body": {"return_token_ids": True}}
    create = _client(demo_server).chat.completions.create
    plain = create(messages=[{"role": "user", "content": "a"}], **ask)
    marked = create(messages=[{"role": "user", "content": f"a{mark}b{mark}"}], **ask)
    user_id = 4
    counts = [answer.prompt_token_ids.count(user_id) for answer in (plain, marked)]  # type: ignore[attr-defined]
    assert counts == [1, 1]
