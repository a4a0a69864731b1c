"""Cache-safe rendering: turn n + 1 starts with the ids of turn n and its answer."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from support.byte_tokenizer import make_byte_tokenizer
from support.demo_app import demo_app, demo_tokenizer, prompt_text, says
from support.fake_engine import FakeEngine
from support.http_app import Harness

from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer
from server.normalise import without_billing_line
from server.openai.prompts import TokenIds
from server.rendering import Conversation, PromptRenderer

USER = {"role": "user", "content": "hi"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch=%s;"
HOISTING = (
    "{%- set ns = namespace(system='') -%}"
    "{%- for m in messages if m.role == 'system' -%}{%- set ns.system = ns.system + m.content -%}"
    "{%- endfor -%}{{ bos_token + ns.system }}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}"
    "{%- elif m.role == 'assistant' -%}{{ '<|Assistant|>' + m.content + eos_token }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|Assistant|>' }}{%- endif -%}"
)
REFUSING = HOISTING.replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}"
    "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('first!') }}{%- endif -%}",
)
THINKING = (  # as R1's: the prompt opens thinking, and the history shows none of it
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{ '<|User|>' + m.content }}"
    "{%- else -%}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|Assistant|><think>\n' }}{%- endif -%}"
)
PLAIN = (  # no special token at the border
    "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'assistant: ' }}{%- endif -%}"
)
TRIMMING = PLAIN.replace("m.content", "(m.content | trim)")


def _renderer(folder: Path, template: str, *, normalise: bool = True) -> PromptRenderer:
    tokenizer = Tokenizer.from_dir(make_byte_tokenizer(folder, chat_template=template))
    assert tokenizer is not None
    return PromptRenderer(ChatTemplate(tokenizer), tokenizer, TokenIds(320), normalise=normalise)


def _tokenizer(renderer: PromptRenderer) -> Tokenizer:
    return renderer._tokenizer


def _ids(renderer: PromptRenderer, *messages: dict[str, Any], **options: Any) -> list[int]:
    return renderer.encode(Conversation(messages=messages, **options))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (BILLING % "1" + "\nYou are", "You are"),
        (BILLING % "1" + "You are", "You are"),
        (BILLING % "1", ""),
        ("x-anthropic-billing-header: a=b\nYou", "You"),
        ("head\n" + BILLING % "1" + "\ntail", "head\ntail"),
        ("about x-anthropic-billing-header: a=b;", "about x-anthropic-billing-header: a=b;"),
    ],
)
def test_the_billing_line_is_dropped_and_nothing_else(text: str, left: str) -> None:
    assert without_billing_line(text) == left


async def test_the_billing_line_never_reaches_the_prompt() -> None:
    harness = demo_app(says("a"))
    for count in ("1", "22", "333"):
        system = {"role": "system", "content": BILLING % count + "\nBe brief."}
        await harness.chat(messages=[system, USER], max_tokens=1)
    assert len({request.prompt for request in harness.engine.requests}) == 1
    assert prompt_text(harness).startswith(
        "<｜begin▁of▁sentence｜><｜System｜>Be brief.<｜User｜>hi"
    )


async def test_prompt_normalise_off_leaves_it() -> None:
    harness = demo_app(says("a"), prompt_normalise="off")
    system = {"role": "system", "content": BILLING % "1"}
    await harness.chat(messages=[system, USER], max_tokens=1)
    assert "billing" in prompt_text(harness)
    info = (await harness.get("/server_info")).json()
    assert info["settings"]["prompt_normalise"] == "off"


async def test_a_system_message_between_turns_stays_in_its_place() -> None:
    harness = demo_app(says("a"))
    late = {"role": "system", "content": "late"}
    await harness.chat(messages=[{"role": "system", "content": "s"}, USER, late, USER])
    text = prompt_text(harness)
    assert "<｜System｜>s<｜User｜>hi<｜System｜>late<｜User｜>hi" in text


@pytest.mark.parametrize("template", [HOISTING, REFUSING])
def test_templates_that_hoist_or_refuse_it_get_a_user_turn(tmp_path: Path, template: str) -> None:
    renderer = _renderer(tmp_path / "a", template)
    system, late = {"role": "system", "content": "s"}, {"role": "system", "content": "late"}
    answer = {"role": "assistant", "content": "a"}
    first = _ids(renderer, system, USER)
    later = _ids(renderer, system, USER, answer, late, USER)
    assert later[: len(first)] == first
    text = _tokenizer(renderer).decode(later, skip_special_tokens=False)
    assert "<|User|>late<|User|>hi" in text
    if template == HOISTING:
        as_is = _renderer(tmp_path / "b", template, normalise=False)
        assert _ids(as_is, system, USER, answer, late, USER)[: len(first)] != first


async def test_token_ids_of_answers_are_spliced_verbatim() -> None:
    """Ids that no tokenizer would make of the text: "Hello" letter by letter."""
    tokenizer = demo_tokenizer()
    letters = [
        token_id
        for letter in "Hello"
        for token_id in tokenizer.encode(letter, add_special_tokens=False)
    ]
    harness = demo_app(says("a"))
    await harness.chat(messages=[USER], max_tokens=1)
    first = harness.engine.requests[0].prompt_tokens.tolist()
    eos = tokenizer.eos_token_id
    for ids in (letters, [*letters, eos]):
        answer = {"role": "assistant", "content": "Hello", "token_ids": ids}
        await harness.chat(messages=[USER, answer, USER], max_tokens=1)
        later = harness.engine.requests[-1].prompt_tokens.tolist()
        assert later[: len(first) + len(letters)] == first + letters
        assert later.count(eos) == 1
        assert prompt_text(harness).endswith(
            "Hello<｜end▁of▁sentence｜><｜User｜>hi<｜Assistant｜>"
        )


async def test_token_ids_stand_for_calls_and_reasoning_too() -> None:
    harness = demo_app(says("a"))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "token_ids": [20, 21, 22]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    response = await harness.chat(messages=[USER, answer, result], max_tokens=1)
    assert response.status_code == 200
    ids = harness.engine.requests[-1].prompt_tokens.tolist()
    assert any(ids[i : i + 3] == [20, 21, 22] for i in range(len(ids)))
    assert "tool▁calls" not in prompt_text(harness)


@pytest.mark.parametrize("ids", [[-1], [10**6], ["a"], "abc", [1.5]])
async def test_bad_token_ids_are_refused_by_place(ids: Any) -> None:
    harness = demo_app(says("a"))
    answer = {"role": "assistant", "content": "x", "token_ids": ids}
    response = await harness.chat(messages=[USER, answer, USER])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[1].token_ids"


def test_splices_stand_behind_the_prompt_that_they_came_from(tmp_path: Path) -> None:
    renderer = _renderer(tmp_path / "a", THINKING)
    tokenizer = _tokenizer(renderer)
    first = _ids(renderer, USER)
    ids = [*tokenizer.encode("deep</think>Hello", add_special_tokens=False), 1]
    answer = {"role": "assistant", "content": "Hello", "token_ids": ids}
    later = _ids(renderer, USER, answer, USER)
    assert later[: len(first) + len(ids)] == first + ids
    again = {**answer, "token_ids": [7, 8, 1]}
    last = _ids(renderer, USER, answer, USER, again, USER)
    assert last[: len(later) + 3] == [*later, 7, 8, 1]


@pytest.mark.parametrize("template", [PLAIN, TRIMMING])
def test_text_is_cut_where_generation_began(tmp_path: Path, template: str) -> None:
    """Without a special token at the border "assistant: " and "  x" would merge their blanks."""
    renderer = _renderer(tmp_path / "a", template)
    first = _ids(renderer, USER)
    content = "  brave fox" if template == PLAIN else "brave fox"
    answer = {"role": "assistant", "content": content}
    later = _ids(renderer, USER, answer, USER)
    assert later[: len(first)] == first
    text = _tokenizer(renderer).decode(later, skip_special_tokens=False)
    assert text.endswith(f"user: hi\nassistant: {content}\nuser: hi\nassistant: ")


async def test_continue_final_message() -> None:
    harness = demo_app(says("a"))
    answer = {"role": "assistant", "content": "Once upon"}
    await harness.chat(messages=[USER, answer], continue_final_message=True)
    assert prompt_text(harness).endswith("<｜User｜>hi<｜Assistant｜>Once upon")
    spliced = {**answer, "token_ids": [20, 21]}
    await harness.chat(messages=[USER, spliced], continue_final_message=True)
    assert harness.engine.requests[-1].prompt_tokens.tolist()[-2:] == [20, 21]
    await harness.chat(messages=[USER], add_generation_prompt=False)
    assert prompt_text(harness).endswith("<｜User｜>hi")


async def test_what_is_not_text_never_changes_the_prompt() -> None:
    """cache_control, tool_choice, response_format and sampling."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    marked = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    harness = demo_app(says("a"))
    extras: list[dict[str, Any]] = [
        {},
        {"tool_choice": "none"},
        {"tool_choice": "auto", "temperature": 0.3, "seed": 5, "stop": "x"},
        {"messages": [{"role": "user", "content": [marked]}]},
        {"parallel_tool_calls": False, "prompt_cache_key": "k", "store": False},
    ]
    for extra in extras:
        body = {"messages": [USER], "tools": tools, "max_tokens": 1, **extra}
        response = await harness.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
    assert len({request.prompt for request in harness.engine.requests}) == 1


async def test_key_order_of_schemas_and_arguments_is_kept() -> None:
    schema = {"type": "object", "properties": {"zeta": {}, "alpha": {}, "mid": {}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    arguments = '{"zeta": 1,  "alpha": [ ]}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    harness = demo_app(says("a"))
    await harness.chat(messages=messages, tools=tools, tool_choice="none")
    text = prompt_text(harness)
    assert text.index("zeta") < text.index("alpha") < text.index("mid")
    assert arguments in text


async def test_return_progress() -> None:
    from radix_mla.engine.ipc import PrefillProgress

    engine = says("a b", cached=3)
    harness = demo_app(engine)
    plain = FakeEngine.admitted

    def admitted(request: Any, index: int, script: Any) -> Any:
        stream = engine.streams[request.request_id]
        event = plain(request, index, script)
        stream.push(event)
        stream.push(PrefillProgress(request.request_id, index, 5))
        return event

    engine.admitted = admitted  # type: ignore[method-assign]
    response = await harness.chat(stream=True, return_progress=True)
    from support.http_app import events

    chunks = events(response)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    total = len(engine.requests[0].prompt_tokens)
    assert progress[-1]["processed"] == progress[-1]["total"] == total
    assert {entry["cache"] for entry in progress} == {3}
    assert all(
        left["processed"] <= right["processed"] for left, right in itertools.pairwise(progress)
    )
    first_text = next(i for i, c in enumerate(chunks) if c["choices"][0]["delta"].get("content"))
    assert all("prompt_progress" not in chunk for chunk in chunks[first_text:])
    assert not any("prompt_progress" in c for c in events(await harness.chat(stream=True)))


async def test_model_alias() -> None:
    harness = demo_app(says("a"), model_alias=["claude-*", "gpt-5"])
    for name, status in (("claude-sonnet-4-5", 200), ("gpt-5", 200), ("gpt-50", 404)):
        response = await harness.chat(model=name)
        assert response.status_code == status
        if status == 200:
            assert response.json()["model"] == name
    assert [card["id"] for card in (await harness.get("/v1/models")).json()["data"]] == ["demo"]


async def test_the_fake_tokenizers_harness_renders_the_same(tokenizer: Tokenizer) -> None:
    """The renderer and the template agree where nothing needs normalising."""
    harness = Harness(tokenizer=tokenizer)
    messages = [USER, {"role": "assistant", "content": "a"}, USER]
    await harness.chat(messages=messages, max_tokens=1)
    template = ChatTemplate(tokenizer)
    assert harness.engine.requests[0].prompt_tokens.tolist() == template.encode(
        template.render(messages)
    )
