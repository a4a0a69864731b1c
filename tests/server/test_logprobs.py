"""T11, T13, T14: the two shapes of logprobs, streamed and whole; -9999.0 is the floor."""

from __future__ import annotations

import math

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion import Completion
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness, events

from radix_mla.text.tokenizer import Tokenizer
from server.openai.logprobs import FLOOR, floored

TEXT = "a 🙂 fox"


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    return Harness(FakeEngine(lambda request, index: Script(ids)), tokenizer)


async def test_t11_completions_four_lists_of_equal_length(harness: Harness) -> None:
    body = (await harness.complete(logprobs=2, max_tokens=50)).json()
    Completion.model_validate(body, strict=True)
    logprobs = body["choices"][0]["logprobs"]
    lengths = {len(logprobs[key]) for key in logprobs}
    assert lengths == {body["usage"]["completion_tokens"]}
    assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][:3] == [0, 1, 2]
    assert "bytes:\\xf0" in logprobs["tokens"]


async def test_t11_streamed_completions_equal_whole_ones(harness: Harness) -> None:
    whole = (await harness.complete(logprobs=2, max_tokens=50)).json()["choices"][0]["logprobs"]
    chunks = events(await harness.complete(logprobs=2, max_tokens=50, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert {key: [item for part in parts for item in part[key]] for key in whole} == whole


async def test_t11_chat_objects_with_bytes(harness: Harness) -> None:
    body = (await harness.chat(logprobs=True, top_logprobs=3, max_tokens=50)).json()
    ChatCompletion.model_validate(body)
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == TEXT
    assert all(len(item["top_logprobs"]) == 3 for item in content)
    chunks = events(await harness.chat(logprobs=True, top_logprobs=3, max_tokens=50, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    streamed = [
        item
        for chunk in chunks
        for item in (chunk["choices"][0]["logprobs"] or {}).get("content") or []
    ]
    assert streamed == content


async def test_t11_chat_without_top_logprobs(harness: Harness) -> None:
    body = (await harness.chat(logprobs=True, max_tokens=50)).json()
    assert all(item["top_logprobs"] == [] for item in body["choices"][0]["logprobs"]["content"])
    assert harness.engine.requests[0].params.logprobs == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_t11_t14_echo_the_first_prompt_token_is_null(harness: Harness, stream: bool) -> None:
    response = await harness.complete(
        prompt="hi there", echo=True, logprobs=1, max_tokens=50, stream=stream
    )
    if stream:
        parts = [chunk["choices"][0] for chunk in events(response)]
        text = "".join(part["text"] for part in parts)
        logprobs = {
            key: [item for part in parts for item in part["logprobs"][key]]
            for key in parts[0]["logprobs"]
        }
    else:
        choice = response.json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
    num_prompt = len(harness.engine.requests[0].prompt_tokens)
    assert text == "hi there" + TEXT
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value is not None for value in logprobs["token_logprobs"][1:])
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["text_offset"][num_prompt] == len("hi there")
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


async def test_t13_minus_infinity_becomes_the_floor(harness: Harness) -> None:
    for stream in (True, False):
        response = await harness.chat(logprobs=True, top_logprobs=20, stream=stream)
        assert response.status_code == 200
        assert str(FLOOR) in response.text
        assert "Infinity" not in response.text
    assert floored(-math.inf) == floored(math.nan) == FLOOR
    assert floored(-1.5) == -1.5


async def test_tokens_as_ids(harness: Harness, tokenizer: Tokenizer) -> None:
    body = await harness.complete(logprobs=0, return_tokens_as_token_ids=True, max_tokens=1)
    first = tokenizer.encode(TEXT, False)[0]
    assert body.json()["choices"][0]["logprobs"]["tokens"] == [f"token_id:{first}"]
