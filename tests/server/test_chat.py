"""POST /v1/chat/completions, /tokenize, /detokenize, /v1/models."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness

from radix_mla.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def _says(tokenizer: Tokenizer, text: str) -> FakeEngine:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    return FakeEngine(lambda request, index: Script(ids, "stop", 1))


async def test_the_whole_answer(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "Hello"), tokenizer)
    response = await harness.chat()
    body = response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 1,
        }
    ]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert response.headers["x-radix-max-tokens"] == str(128 - body["usage"]["prompt_tokens"])


@pytest.mark.parametrize("fixture", ["tokenizer", "tokenizer_without_bos_template"])
async def test_a11_exactly_one_bos(fixture: str, request: pytest.FixtureRequest) -> None:
    harness = Harness(tokenizer=request.getfixturevalue(fixture))
    await harness.chat(max_tokens=1)
    ids = harness.engine.requests[0].prompt_tokens.tolist()
    assert ids[0] == 0
    assert ids.count(0) == 1


async def test_a10_equal_text_gives_equal_ids(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    part = {"type": "text", "text": "h"}
    for content in ("hi", [{"type": "text", "text": "hi"}], [part, {"type": "text", "text": "i"}]):
        await harness.chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    prompts = {tuple(request.prompt_tokens.tolist()) for request in harness.engine.requests}
    assert len(prompts) == 1


@pytest.mark.parametrize(
    "content", [[{"type": "image_url", "image_url": {"url": "x"}}], [{"type": "text"}], 5, [3], {}]
)
async def test_a10_other_content_is_refused(tokenizer: Tokenizer, content: Any) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.chat(messages=[{"role": "user", "content": content}])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"


async def test_prompt_normalisation_sampling_fields_never_change_the_prompt(
    tokenizer: Tokenizer,
) -> None:
    harness = Harness(tokenizer=tokenizer)
    for extra in ({}, {"temperature": 0.1}, {"tool_choice": "none"}, {"stop": "x"}, {"seed": 1}):
        await harness.chat(max_tokens=1, **extra)
    assert len({request.prompt for request in harness.engine.requests}) == 1


async def test_r22_a_conversation_extends_its_own_prompt(tokenizer: Tokenizer) -> None:
    """The echoed answer is tokenised as it was generated, so turn 2 can hit all of turn 1."""
    harness = Harness(_says(tokenizer, "Hello world"), tokenizer)
    messages: list[dict[str, Any]] = [USER]
    answer = await harness.chat(messages=messages, return_token_ids=True)
    first = [*answer.json()["prompt_token_ids"], *answer.json()["choices"][0]["token_ids"]]
    messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = await harness.chat(messages=messages, return_token_ids=True)
    assert second.json()["prompt_token_ids"][: len(first)] == first


async def test_thinking_switches_reach_templates_that_have_them(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    plain = await harness.chat(max_tokens=1)
    on = await harness.chat(max_tokens=1, chat_template_kwargs={"enable_thinking": True})
    top = await harness.chat(max_tokens=1, enable_thinking=True)
    other = await harness.chat(
        max_tokens=1, reasoning_effort="low", chat_template_kwargs={"nope": 1}
    )
    plain_ids, on_ids, top_ids, other_ids = (
        request.prompt_tokens.tolist() for request in harness.engine.requests
    )
    assert on_ids == top_ids
    assert len(on_ids) > len(plain_ids) == len(other_ids)
    assert "x-radix-ignored-fields" not in plain.headers
    assert "x-radix-ignored-fields" not in on.headers
    assert top.status_code == 200
    assert other.headers["x-radix-ignored-fields"] == (
        "reasoning_effort, chat_template_kwargs.nope"
    )


async def test_the_smaller_of_two_limits_holds(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.chat(max_tokens=5, max_completion_tokens=3)
    await harness.chat(max_completion_tokens=-1, max_tokens=4)
    assert [request.params.max_tokens for request in harness.engine.requests] == [3, 4]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(
    tokenizer: Tokenizer, body: dict[str, Any], param: str
) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert harness.engine.requests == []


async def test_tools_with_tool_choice_none_are_accepted(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert (await harness.chat(tools=tools, tool_choice="none")).status_code == 200
    assert (await harness.chat(tools=[], response_format={"type": "text"})).status_code == 200


async def test_tokenize_agrees_with_chat(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.chat(max_tokens=1)
    body = (await harness.post("/tokenize", {"messages": [USER]})).json()
    assert body["tokens"] == harness.engine.requests[0].prompt_tokens.tolist()
    assert body["count"] == len(body["tokens"])
    assert body["max_model_len"] == 128


async def test_tokenize_and_detokenize(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    body = (await harness.post("/tokenize", {"prompt": "fox", "return_token_strs": True})).json()
    assert body["tokens"][0] == 0
    assert body["token_strs"][0] == "<|begin_of_sentence|>"
    bare = await harness.post("/tokenize", {"prompt": "fox", "add_special_tokens": False})
    back = await harness.post("/detokenize", {"tokens": bare.json()["tokens"]})
    assert back.json() == {"prompt": "fox"}
    for path, wrong in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": [400]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {}),
    ):
        assert (await harness.post(path, wrong)).status_code == 400


async def test_models_are_listed_by_all_their_names(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    cards = (await harness.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["demo", "demo-alias"]
    assert cards[0]["max_model_len"] == 128
    assert (await harness.get("/v1/models/demo-alias")).json()["id"] == "demo-alias"
    missing = await harness.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
