"""The table of request fields, row by row: honoured, ignored, named in the header, or refused.

What honoured fields do is tested where they are at work; here each is taken without a complaint,
and nothing that is not text or a tool changes the prompt.
"""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from support.demo_app import demo_app, says
from support.http_app import Harness

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b":1, "a" : 2}'}}
NAMED = {"type": "function", "function": {"name": "f"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
BAD_FORMAT = {"anyOf": [{"required": 5}, {"type": "array"}], "required": ["a"]}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "a"},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}


def said(**message: Any) -> dict[str, Any]:
    """A conversation with this message in the middle."""
    return {"messages": [USER, {"role": "assistant", "content": "a", **message}, USER]}


def image(kind: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]}


HONOURED: list[tuple[str, str, dict[str, Any]]] = [
    ("any optional field = null", CHAT, {"temperature": None, "tools": None, "stop": None}),
    ("role developer", CHAT, {"messages": [{"role": "developer", "content": "d"}, USER]}),
    ("content missing", CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
    ("content empty with tool_calls", CHAT, said(content="", tool_calls=[CALL])),
    ("content null", CHAT, said(content=None, tool_calls=[CALL])),
    ("message reasoning_content", CHAT, said(reasoning_content="r")),
    ("message reasoning", CHAT, said(reasoning="r")),
    (
        "arguments that are no JSON",
        CHAT,
        said(tool_calls=[{**CALL, "function": {"name": "f", "arguments": "{"}}]),
    ),
    ("tool strict", CHAT, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}),
    *(
        ("tool_choice", CHAT, {"tools": [TOOL], "tool_choice": choice})
        for choice in ("none", "auto", "required", NAMED, ALLOWED)
    ),
    ("parallel_tool_calls", CHAT, {"tools": [TOOL], "parallel_tool_calls": False}),
    *(
        ("response_format", CHAT, {"response_format": form})
        for form in ({"type": "text"}, {"type": "json_object"}, SCHEMA)
    ),
    (
        "response_format strict",
        CHAT,
        {"response_format": {**SCHEMA, "json_schema": {**SCHEMA["json_schema"], "strict": False}}},
    ),
    (
        "stream_options",
        CHAT,
        {
            "stream": True,
            "stream_options": {
                "include_usage": True,
                "continuous_usage_stats": True,
                "include_obfuscation": False,
            },
        },
    ),
    ("stream_options without stream", CHAT, {"stream_options": {"include_usage": True}}),
    ("max_completion_tokens", CHAT, {"max_completion_tokens": 5, "max_tokens": -1}),
    ("n at temperature 0", CHAT, {"n": 16, "temperature": 0}),
    ("logprobs", CHAT, {"logprobs": True, "top_logprobs": 20}),
    (
        "seed, stop, bias, penalties",
        CHAT,
        {
            "seed": 1,
            "stop": ["x"] * 16,
            "logit_bias": {"3": 1},
            "presence_penalty": 1,
            "frequency_penalty": -1,
        },
    ),
    ("best_of = n", TEXT, {"best_of": 2, "n": 2}),
    ("service_tier", CHAT, {"service_tier": "flex"}),
    ("prompt_cache_key", CHAT, {"prompt_cache_key": "s"}),
    ("ours", CHAT, {"cache_salt": "s", "cache_store": False, "priority": 3}),
    *(("cache_ttl", CHAT, {"cache_ttl": ttl}) for ttl in (60, 0.5, 86_400, "90s", "5m", "24h")),
    ("cache_priority", CHAT, {"cache_priority": 10}),
    *(
        ("prompt_cache_retention", CHAT, {"prompt_cache_retention": value})
        for value in ("in_memory", "24h")
    ),
    ("prompt_cache_options", CHAT, {"prompt_cache_options": {"ttl": "1h"}}),
    (
        "nvext",
        CHAT,
        {
            "nvext": {
                "cache_control": {"type": "ephemeral", "ttl": "1h"},
                "agent_hints": {"priority": 1},
            }
        },
    ),
    ("cache_control", MESSAGES, {"cache_control": {"type": "ephemeral", "ttl": "1h"}}),
    (
        "vLLM's and SGLang's",
        CHAT,
        {
            "skip_special_tokens": False,
            "include_stop_str_in_output": True,
            "add_generation_prompt": True,
            "request_id": "r",
            "return_token_ids": True,
            "ignore_eos": True,
            "min_tokens": 1,
            "stop_token_ids": [3],
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
        },
    ),
    ("structured_outputs", CHAT, {"structured_outputs": {"choice": ["a", "b"]}}),
    *(
        ("guided_*", TEXT, {name: value})
        for name, value in (
            ("guided_json", {"type": "object"}),
            ("guided_regex", "a+"),
            ("guided_choice", ["a"]),
            ("guided_grammar", 'root ::= "a"'),
        )
    ),
    (
        "llama.cpp's and Ollama's",
        TEXT,
        {"cache_prompt": False, "n_predict": 4, "return_progress": True},
    ),
    ("Anthropic system text", MESSAGES, {"system": "s"}),
    (
        "Anthropic system array",
        MESSAGES,
        {"system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}]},
    ),
    (
        "Anthropic tools",
        MESSAGES,
        {
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        },
    ),
    ("Anthropic stop_sequences, top_k", MESSAGES, {"stop_sequences": ["x"], "top_k": 3}),
    ("Anthropic metadata.user_id", MESSAGES, {"metadata": {"user_id": "u"}}),
    ("response_format on messages", MESSAGES, {"response_format": SCHEMA}),
    (
        "Codex's twelve",
        RESPONSES,
        {
            "client_metadata": {"a": "b"},
            "include": ["reasoning.encrypted_content"],
            "instructions": "i",
            "model": "demo",
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
            "store": False,
            "stream": True,
            "tool_choice": "auto",
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
        },
    ),
]

IGNORED: list[tuple[str, str, dict[str, Any]]] = [
    ("name", CHAT, said(name="n")),
    (
        "refusal, annotations, audio, id, index",
        CHAT,
        said(refusal=None, annotations=[], audio=None, id="i", index=0),
    ),
    (
        "eager_input_streaming, defer_loading",
        CHAT,
        {"tools": [{**TOOL, "eager_input_streaming": True, "defer_loading": True}]},
    ),
    ("store", CHAT, {"store": False}),
    (
        "metadata ... prediction",
        CHAT,
        {
            "metadata": {"a": "b"},
            "user": "u",
            "safety_identifier": "s",
            "verbosity": "low",
            "moderation": "auto",
            "prediction": {"type": "content", "content": "x"},
        },
    ),
    ("id_slot, keep_alive, num_ctx", CHAT, {"id_slot": 1, "keep_alive": "5m", "num_ctx": 4096}),
    (
        "Anthropic's own",
        MESSAGES,
        {
            "context_management": {"edits": []},
            "output_config": {"effort": "low"},
            "betas": ["x"],
            "speed": "fast",
            "container": "c",
        },
    ),
    ("empty mcp_servers", MESSAGES, {"mcp_servers": []}),
    ("store on responses", RESPONSES, {"store": True}),
    (
        "cache_control in parts",
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "hi",
                            "cache_control": {"type": "ephemeral", "ttl": "1h"},
                        }
                    ],
                }
            ]
        },
    ),
]

NAMED_IN_HEADER: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, "tools[1]%3Acustom"),
    (RESPONSES, {"tools": [{"type": "web_search"}, {"type": "namespace"}]}, "tools[0], tools[1]"),
    # The demo model's template has no such variables; test_chat.py has one that does.
    (
        CHAT,
        {"reasoning_effort": "high", "enable_thinking": True},
        "reasoning_effort, enable_thinking",
    ),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking"),
    (CHAT, {"chat_template_kwargs": {"unheard_of": 1}}, "chat_template_kwargs.unheard_of"),
    (CHAT, {"prompt_cache_retention": "for ever"}, "prompt_cache_retention"),
    (
        CHAT,
        {"prompt_cache_options": {"ttl": "1y", "mode": "explicit", "prewarm": True}},
        "prompt_cache_options.ttl, prompt_cache_options.mode, prompt_cache_options.prewarm",
    ),
    (CHAT, {"prompt_cache_options": "1h"}, "prompt_cache_options"),
    (CHAT, {"prompt_cache_breakpoint": {}}, "prompt_cache_breakpoint"),
    (CHAT, {"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
    (CHAT, {"nvext": {"agent_hints": {"priority": True}}}, "nvext.agent_hints.priority"),
    (CHAT, {"nvext": {"agent_hints": {"osl": 9}, "x": 1}}, "nvext.agent_hints.osl, nvext.x"),
    (CHAT, {"nvext": {"cache_control": {"ttl": 10**6}}}, "nvext.cache_control"),
    (CHAT, {"nvext": []}, "nvext"),
    *(
        (MESSAGES, {"cache_control": mark}, "cache_control")
        for mark in ({}, "ephemeral", {"type": "lasting"}, {"type": "ephemeral", "ttl": True})
    ),
    (CHAT, {"never_heard_of": 1}, "never_heard_of"),
]

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    *((CHAT, image(kind), "messages[0].content") for kind in ("image_url", "input_audio", "file")),
    *(
        (CHAT, {name: value}, name)
        for name, value in (("n", 17), ("top_logprobs", 21), ("stop", ["x"] * 17))
    ),
    (TEXT, {"best_of": 3, "n": 2}, "best_of"),
    *(
        (path, {name: value}, name)
        for path in (CHAT, MESSAGES)
        for name, value in (
            ("cache_ttl", 0),
            ("cache_ttl", 86_401),
            ("cache_ttl", "25h"),
            ("cache_ttl", "soon"),
            ("cache_ttl", True),
            ("cache_priority", 11),
            ("cache_priority", -1),
            ("cache_priority", "1"),
        )
    ),
    (CHAT, {"metadata": {"radix_mla.cache_ttl": "5y"}}, "cache_ttl"),
    (TEXT, {"suffix": "x"}, "suffix"),
    (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"function_call": "auto"}, "function_call"),
    (CHAT, {"audio": {"voice": "x"}}, "audio"),
    (CHAT, {"web_search_options": {"a": 1}}, "web_search_options"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    *(
        (TEXT, {name: value}, name)
        for name, value in (
            ("truncate_prompt_tokens", 5),
            ("prompt_embeds", "x"),
            ("kv_transfer_params", {"a": 1}),
            ("use_beam_search", True),
            ("lora_path", "x"),
            ("explain_cache", True),
            ("cache_unheard_of", 1),
            ("max_token", 5),
        )
    ),
    (CHAT, {"messages": [{"role": {}, "content": "x"}]}, "messages[0].role"),
    (CHAT, said(tool_calls={}), "messages[1].tool_calls"),
    (CHAT, said(token_ids={}), "messages[1].token_ids"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD_FORMAT}}},
        "response_format.json_schema.schema",
    ),
    (RESPONSES, {"input": [{"type": [], "content": "x"}]}, "input"),
    (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": {}}}, "tool_choice.type"),
    (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
    (RESPONSES, {"conversation": "c"}, "conversation"),
    (RESPONSES, {"background": True}, "background"),
    (MESSAGES, {"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
]


async def send(path: str, extra: dict[str, Any]) -> tuple[Harness, httpx2.Response]:
    harness = demo_app(says("Fine."))
    return harness, await harness.post(path, {**LEAST[path], **extra})


@pytest.mark.parametrize(("row", "path", "extra"), HONOURED, ids=[row for row, *_ in HONOURED])
async def test_honoured(row: str, path: str, extra: dict[str, Any]) -> None:
    _, response = await send(path, extra)
    assert response.status_code == 200, response.text
    named = response.headers.get("x-radix-ignored-fields", "")
    assert not set(named.split(", ")) & set(extra), row


@pytest.mark.parametrize(("row", "path", "extra"), IGNORED, ids=[row for row, *_ in IGNORED])
async def test_ignored(row: str, path: str, extra: dict[str, Any]) -> None:
    harness, response = await send(path, extra)
    assert response.status_code == 200, response.text
    assert "x-radix-ignored-fields" not in response.headers, row
    plain = {"tools": [TOOL]} if "tools" in extra else said() if "assistant" in str(extra) else {}
    other, _ = await send(path, plain)
    assert harness.engine.requests[0].prompt == other.engine.requests[0].prompt


@pytest.mark.parametrize(("path", "extra", "names"), NAMED_IN_HEADER)
async def test_named_in_the_header(path: str, extra: dict[str, Any], names: str) -> None:
    _, response = await send(path, extra)
    assert response.status_code == 200, response.text
    assert response.headers["x-radix-ignored-fields"] == names


@pytest.mark.parametrize(("path", "extra", "param"), REFUSED)
async def test_refused(path: str, extra: dict[str, Any], param: str) -> None:
    harness, response = await send(path, extra)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["message"]
    if path == MESSAGES:
        assert param in error["message"]
    else:
        assert error["param"] == param
    assert harness.engine.requests == []


@pytest.mark.parametrize(
    "extra",
    [
        *({"tools": [TOOL], "tool_choice": c} for c in ("none", "auto", "required", NAMED)),
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [TOOL], "response_format": SCHEMA},
        {"tools": [TOOL], "n": 3, "logprobs": True, "stop": "x", "logit_bias": {"3": 1}},
    ],
)
async def test_what_is_no_text_leaves_the_prompt_alone(extra: dict[str, Any]) -> None:
    harness, _ = await send(CHAT, extra)
    plain, _ = await send(CHAT, {"tools": [TOOL]})
    assert harness.engine.requests[0].prompt == plain.engine.requests[0].prompt


@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES, MESSAGES])
async def test_response_format_reaches_the_engine_from_every_path(path: str) -> None:
    harness, _ = await send(path, {"response_format": SCHEMA})
    assert harness.engine.requests[0].params.grammar is not None


@pytest.mark.parametrize(
    "header", ["x-session-affinity", "session_id", "session-id", "X-OpenWebUI-Chat-Id"]
)
async def test_sessions_of_headers(header: str) -> None:
    harness = demo_app(says("Fine."))
    for _ in range(2):
        await harness.client.post(CHAT, json=LEAST[CHAT], headers={header: "one"})
    assert await harness.metric("radix_mla_prefix_cache_queries_total", turn="later") > 0
    first, second = harness.engine.requests
    assert first.namespace == second.namespace == ""  # a session isolates nothing


async def test_service_tier_is_told_back_as_default() -> None:
    _, response = await send(CHAT, {"service_tier": "flex"})
    assert response.json()["service_tier"] == "default"
