"""A07 and the three lists of fields: honoured, ignored, refused; near misses; metadata."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.http_app import Harness

from radix_mla.text.tokenizer import Tokenizer
from server.openai.fields import near_miss
from server.openai.schemas import ChatRequest


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer=tokenizer)


OPENAI_SDK = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
LANGCHAIN = OPENAI_SDK | {"max_completion_tokens": 20, "stream": False, "temperature": 0.7, "n": 1}
AI_SDK = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "b"},
    ],
    "reasoning_effort": "medium",
    "verbosity": "low",
}
PROXY = OPENAI_SDK | {
    "user": "u",
    "metadata": {"trace_id": "1", "tags": ["a"]},
    "stream_options": {"include_usage": True},
    "safety_identifier": "x",
    "store": False,
    "parallel_tool_calls": True,
    "tools": [],
    "extra_proxy_field": {"a": 1},
}
AGENT = {
    "model": "demo",
    "messages": [
        {"role": "developer", "content": "d", "id": "m1", "name": "dev"},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "index": 0,
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "index": 0,
                    "extra": 1,
                    "function": {"name": "f", "arguments": "{}", "strict": True},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "r"}]},
    ],
}


@pytest.mark.parametrize("body", [OPENAI_SDK, LANGCHAIN, AI_SDK, PROXY, AGENT])
async def test_a07_bodies_of_real_clients(harness: Harness, body: dict[str, Any]) -> None:
    response = await harness.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text


async def test_a07_unknown_fields_are_named_in_a_header_and_logged_once(
    harness: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "radix_mla.server")
    for _ in range(3):
        response = await harness.complete(brand_new_thing=1, nvext={"a": 1}, user="u")
        assert response.headers["x-radix-ignored-fields"] == "brand_new_thing, nvext.a"
    assert len([line for line in caplog.messages if "brand_new_thing" in line]) == 1
    assert "x-radix-ignored-fields" not in (await harness.complete(user="u")).headers


async def test_the_header_cannot_be_split_or_flooded(harness: Harness) -> None:
    names = {"bad\r\nx-evil: 1": 1, "ü": 1} | {f"f{i}": i for i in range(50)}
    response = await harness.complete(**names)
    value = response.headers["x-radix-ignored-fields"]
    assert "x-evil" not in response.headers
    assert "\n" not in value
    assert value.endswith("and 32 more")


async def test_strict_fields(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer, strict_fields=True)
    response = await harness.complete(brand_new_thing=1)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "brand_new_thing"
    assert (await harness.complete(user="u", store=True)).status_code == 200


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("temprature", "temperature"),
        ("tempreature", "temperature"),
        ("stop_token_id", "stop_token_ids"),
        ("cache_slat", "cache_salt"),
        ("cache_anything", "cache_"),
        ("cache_storage", "cache_store"),
    ],
)
async def test_near_misses_are_refused_with_the_name_that_was_meant(
    harness: Harness, field: str, meant: str
) -> None:
    response = await harness.complete(**{field: 1})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unknown_parameter"
    assert error["param"] == field
    assert f"Did you mean `{meant}" in error["message"]


@pytest.mark.parametrize(
    "field",
    ["top_a", "models", "seeds", "max_new_tokens", "repeat_penalty", "provider", "mirostat"],
)
def test_other_servers_fields_are_no_near_misses(field: str) -> None:
    assert near_miss(field, ChatRequest.model_fields) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("truncate_prompt_tokens", 5),
        ("prompt_embeds", "x"),
        ("use_beam_search", True),
        ("lora_path", "x"),
        ("kv_transfer_params", {"a": 1}),
        ("explain_cache", True),
        ("web_search_options", {"a": 1}),
    ],
)
async def test_what_would_change_the_answer_is_refused(
    harness: Harness, field: str, value: Any
) -> None:
    response = await harness.complete(**{field: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("body", [{"use_beam_search": False}, {"suffix": ""}, {"lora_path": None}])
async def test_their_empty_values_are_fine(harness: Harness, body: dict[str, Any]) -> None:
    assert (await harness.complete(**body)).status_code == 200


async def test_fields_are_read_from_metadata_too(harness: Harness) -> None:
    await harness.chat(
        metadata={
            "radix_mla.cache_salt": "5",
            "radix_mla.priority": "3",
            "radix_mla.ignore_eos": "true",
            "radix_mla.top_k": "7",
            "other": "x",
        },
        top_k=9,
    )
    request = harness.engine.requests[0]
    assert (request.namespace, request.priority) == ("5", 3)
    assert (request.params.ignore_eos, request.params.top_k) == (True, 9)
    bad = await harness.chat(metadata={"radix_mla.priority": "many"})
    assert bad.status_code == 400
    near = await harness.chat(metadata={"radix_mla.cache_slat": "x"})
    assert near.status_code == 400
    assert (await harness.chat(metadata="text")).status_code == 200


@pytest.mark.parametrize(
    ("value", "code"),
    [('["a\\u0000b"]', "invalid_json"), ("[" * 65 + "]" * 65, "nesting_too_deep")],
)
async def test_metadata_does_not_bypass_the_limits_of_a_body(
    harness: Harness, value: str, code: str
) -> None:
    response = await harness.chat(metadata={"radix_mla.stop": value})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == code
    assert harness.engine.requests == []
