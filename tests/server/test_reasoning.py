"""Thinking split from the answer: streamed and whole, opened by the prompt or by the model."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_app import events
from support.tool_models import DEEPSEEK_V31, assemble, harness, load, says

from radix_mla.text.tokenizer import Tokenizer
from server.openai.assistant import AssistantParser
from server.openai.assistant_events import ReasoningDelta, TextDelta, merge_events
from server.openai.reasoning import THINK

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Its template opens thinking with `thinking: true` and closes it with false."""
    return load(tmp_path_factory.mktemp("thinker"), DEEPSEEK_V31)


CASES = [
    (None, "<think>\nhm, so\n</think>\n\nYes", "hm, so", "Yes"),
    (None, "\n<think>hm</think>Yes", "hm", "Yes"),
    (None, "Yes, <think> is a tag </think>", "", "Yes, <think> is a tag </think>"),
    (None, "<thi", "", "<thi"),
    (None, "<think>never closed", "never closed", ""),
    (True, "hm</think>Yes", "hm", "Yes"),
    (True, "\nhm < b </thin\n</think>\nYes</think>", "hm < b </thin", "Yes</think>"),
    (True, "never closed", "never closed", ""),
    (True, "</think>Yes", "", "Yes"),
    (False, "Yes", "", "Yes"),
]


@pytest.mark.parametrize(("thinking", "text", "reasoning", "content"), CASES)
@pytest.mark.parametrize("per_event", [1, 5, 1000])
async def test_split(
    thinker: Tokenizer,
    thinking: bool | None,
    text: str,
    reasoning: str,
    content: str,
    per_event: int,
) -> None:
    app = harness(says(thinker, text, per_event=per_event), thinker)
    message = (await app.chat(thinking=thinking)).json()["choices"][0]["message"]
    assert message.get("reasoning_content", "") == reasoning
    assert message["content"] == content
    streamed = assemble(events(await app.chat(thinking=thinking, stream=True)))
    assert (streamed["reasoning_content"], streamed["content"]) == (reasoning, content)
    assert streamed["finish_reason"] == "stop"


@pytest.mark.parametrize("text", [case[1] for case in CASES])
@pytest.mark.parametrize("is_open", [False, True])
def test_every_cut_gives_the_same_events(text: str, is_open: bool) -> None:
    whole: list[Any] = []
    for size in (len(text), 1, 2, 3):
        parser = AssistantParser(THINK, None, reasoning_open=is_open)
        found = []
        for start in range(0, len(text), size):
            found += parser.push(text[start : start + size])
        found += parser.finish()
        whole.append(merge_events(found))
    assert all(found == whole[0] for found in whole)
    assert {type(event) for event in whole[0]} <= {ReasoningDelta, TextDelta}


async def test_reasoning_tokens_are_counted(thinker: Tokenizer) -> None:
    text = "hm, so it is</think>Yes"
    app = harness(says(thinker, text), thinker)
    usage = (await app.chat(thinking=True)).json()["usage"]
    inside = len(thinker.encode("hm, so it is", add_special_tokens=False))
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    # The tokens of the end tag are still inside until the tag is complete.
    assert inside <= counted <= inside + len("</think>")
    assert usage["completion_tokens"] > counted
    plain = harness(says(thinker, "Yes"), thinker)
    usage = (await plain.chat()).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
async def test_the_field_has_the_name_that_was_asked_for(
    thinker: Tokenizer, setting: str, names: set[str]
) -> None:
    app = harness(says(thinker, "<think>hm</think>Yes"), thinker, reasoning_field=setting)
    message = (await app.chat()).json()["choices"][0]["message"]
    assert dict.fromkeys(names, "hm") == {
        name: message[name] for name in ("reasoning_content", "reasoning") if name in message
    }
    deltas = [
        choice["delta"]
        for chunk in events(await app.chat(stream=True))
        for choice in chunk["choices"]
    ]
    for name in ("reasoning_content", "reasoning"):
        text = "".join(delta.get(name, "") for delta in deltas)
        assert text == ("hm" if name in names else "")


async def test_it_is_accepted_back_under_both_names(thinker: Tokenizer) -> None:
    app = harness(FakeEngine(), thinker)
    for name in ("reasoning_content", "reasoning"):
        answer = {"role": "assistant", "content": "Yes", name: "hm"}
        await app.chat(messages=[USER, answer, USER], max_tokens=1)
    first, second = app.engine.requests
    assert first.prompt == second.prompt
    assert "<think>hm</think>Yes" in thinker.decode(first.prompt_tokens.tolist())


async def test_a_call_inside_thinking_ends_it(thinker: Tokenizer) -> None:
    text = "hm" + DEEPSEEK_V31.calls([("clock", "{}")])
    app = harness(says(thinker, text), thinker)
    tools = [{"type": "function", "function": {"name": "clock"}}]
    choice = (await app.chat(thinking=True, tools=tools)).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stop_string_in_thinking_ends_the_answer(thinker: Tokenizer) -> None:
    app = harness(says(thinker, "one two three</think>Yes"), thinker)
    choice = (await app.chat(thinking=True, stop=" three")).json()["choices"][0]
    assert choice["message"]["reasoning_content"] == "one two"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " three")


async def test_a_continued_message_may_be_in_the_middle_of_thinking(thinker: Tokenizer) -> None:
    app = harness(says(thinker, "more</think>Yes"), thinker)
    messages = [USER, {"role": "assistant", "content": "<think>so far, "}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    message = (await app.chat(**body)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("more", "Yes")


async def test_completions_are_not_split(thinker: Tokenizer) -> None:
    app = harness(says(thinker, "<think>hm</think>Yes"), thinker)
    choice = (await app.complete(max_tokens=64)).json()["choices"][0]
    assert choice["text"] == "<think>hm</think>Yes"
