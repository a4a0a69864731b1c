"""What the fields that ask for retention become in the engine's request."""

from __future__ import annotations

from typing import Any

import pytest
from support.demo_app import demo_app, says

from radix_mla.cache.retention import Retention

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}


async def asked(path: str, body: dict[str, Any]) -> tuple[Retention, str]:
    """What reached the engine, and the names of what was ignored."""
    harness = demo_app(says("Fine."))
    response = await harness.post(path, {**LEAST[path], **body})
    assert response.status_code == 200, response.text
    (request,) = harness.engine.requests
    retention = Retention(request.cache_priority, request.cache_ttl_s)
    return retention, response.headers.get("x-radix-ignored-fields", "")


def mark(**fields: Any) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", **fields}}


def text(**fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": "a", **fields}


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, (0, 0)),
        ({"cache_ttl": 60}, (1, 60)),
        ({"cache_ttl": 0.5}, (1, 0.5)),
        ({"cache_ttl": "90s"}, (1, 90)),
        ({"cache_ttl": "5m"}, (1, 300)),
        ({"cache_ttl": "24h"}, (1, 86_400)),
        ({"cache_priority": 0}, (0, 0)),
        ({"cache_priority": 10}, (10, 3600)),
        ({"cache_priority": 3, "cache_ttl": "1h"}, (3, 3600)),
        ({"metadata": {"radix_mla.cache_ttl": "5m"}}, (1, 300)),
        ({"metadata": {"radix_mla.cache_ttl": "5", "radix_mla.cache_priority": "2"}}, (2, 5)),
        ({"prompt_cache_retention": "24h"}, (1, 86_400)),
        ({"prompt_cache_retention": "in_memory"}, (0, 0)),
        ({"prompt_cache_options": {"ttl": "30m"}}, (1, 1800)),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, (1, 86_400)),
        (mark(), (1, 300)),
        (mark(ttl="1h"), (1, 3600)),
        ({"nvext": mark(ttl="1h")}, (1, 3600)),
        ({"nvext": {"agent_hints": {"priority": 4}}}, (4, 3600)),
        ({"nvext": {"agent_hints": {"priority": 99}}}, (10, 3600)),
        ({"nvext": {"agent_hints": {"priority": -3}}}, (0, 0)),
        # Our own fields win.
        ({"cache_ttl": 7, "prompt_cache_retention": "24h"}, (1, 7)),
        ({"cache_priority": 0, "nvext": {"agent_hints": {"priority": 4}}}, (0, 0)),
    ],
)
async def test_what_reaches_the_engine(
    path: str, body: dict[str, Any], expected: tuple[int, float]
) -> None:
    assert await asked(path, body) == (expected, "")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_marks_on_blocks(path: str) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}}
    if path == CHAT:
        tool = {"type": "function", "function": {"name": "f"}}
    earlier = [{"role": "user", "content": [text(**mark()), text()]}]
    later = [{"role": "user", "content": [text(), text(**mark(ttl="1h"))]}]
    answer = [{"role": "assistant", "content": "b"}]
    for body, ttl_s in (
        ({"messages": earlier}, 300),
        ({"messages": later}, 3600),
        ({"messages": earlier + answer + later}, 3600),
        ({"messages": later + answer + earlier}, 3600),
        ({"messages": earlier, "tools": [{**tool, **mark(ttl="1h")}]}, 3600),
    ):
        assert await asked(path, body) == ((1, ttl_s), "")
    assert await asked(path, {"messages": later, "cache_ttl": 9}) == ((1, 9), "")


async def test_marks_on_anthropics_system_and_tool_results() -> None:
    assert await asked(MESSAGES, {"system": [text(**mark(ttl="1h"))]}) == ((1, 3600), "")
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    for result in (
        {"content": "r", **mark(ttl="1h")},
        {"content": [text(**mark(ttl="1h"))]},
    ):
        messages = [
            USER,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", **result}]},
        ]
        assert await asked(MESSAGES, {"messages": messages}) == ((1, 3600), "")


async def test_marks_of_unknown_form_are_named_once() -> None:
    blocks = [text(**mark(ttl="2y")), text(cache_control={}), text(cache_control=[])]
    body = {"messages": [{"role": "user", "content": blocks}]}
    assert await asked(MESSAGES, body) == ((0, 0), "cache_control")
    blocks.append(text(**mark()))
    assert await asked(MESSAGES, body) == ((1, 300), "cache_control")
