"""Chat templates: equal conversations give equal ids, one BOS, what tool calls look like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.byte_tokenizer import (
    TEMPLATE_WITH_BOS,
    TEMPLATE_WITHOUT_BOS,
    make_byte_tokenizer,
)

from radix_mla.errors import InvalidRequest
from radix_mla.text.chat_template import ChatTemplate
from radix_mla.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,"a":2}'}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = Tokenizer.from_dir(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert loaded is not None
    return loaded


@pytest.fixture
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(tokenizer)


def _ids(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    return template.encode(template.render(messages, **options))


@pytest.mark.parametrize("source", [TEMPLATE_WITH_BOS, TEMPLATE_WITHOUT_BOS])
def test_a11_exactly_one_bos(tokenizer: Tokenizer, source: str) -> None:
    ids = _ids(ChatTemplate(tokenizer, source), [USER])
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(0) == 1


def test_a10_all_spellings_of_content_give_the_same_ids(template: ChatTemplate) -> None:
    whole = _ids(template, [{"role": "user", "content": "ab"}])
    for content in (
        [{"type": "text", "text": "ab"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}],
    ):
        assert _ids(template, [{"role": "user", "content": content}]) == whole


def test_a10_null_missing_and_empty_content_are_the_same(template: ChatTemplate) -> None:
    spellings = [{"content": ""}, {"content": None}, {}, {"content": []}]
    texts = [
        template.render([USER, {"role": "assistant", "tool_calls": [CALL], **spelling}])
        for spelling in spellings
    ]
    assert len(set(texts)) == 1
    assert "None" not in texts[0]


def test_a10_other_parts_are_refused_with_their_place(template: ChatTemplate) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(InvalidRequest, match="image_url") as caught:
        template.render([USER, {"role": "user", "content": [part]}])
    assert caught.value.param == "messages[1].content"


def test_a07_extra_keys_change_nothing(template: ChatTemplate) -> None:
    extra = {
        "name": "bob",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "id": "x",
        "index": 0,
    }
    assert template.render([USER | extra]) == template.render([USER])


def test_developer_is_system_in_place(template: ChatTemplate) -> None:
    system = template.render([USER, {"role": "system", "content": "s"}, USER])
    assert template.render([USER, {"role": "developer", "content": "s"}, USER]) == system
    assert system.index("hi") < system.index("<|System|>")


@pytest.mark.parametrize("role", ["function", "robot", None])
def test_unknown_roles_are_refused(template: ChatTemplate, role: str | None) -> None:
    with pytest.raises(InvalidRequest, match="role"):
        template.render([{"role": role, "content": "x"}])


def test_reasoning_is_given_back_under_both_names(template: ChatTemplate) -> None:
    texts = {
        template.render([USER, {"role": "assistant", "content": "a", name: "because"}])
        for name in ("reasoning_content", "reasoning")
    }
    assert len(texts) == 1
    assert "<think>because</think>" in texts.pop()


def test_tool_call_arguments_stay_verbatim(template: ChatTemplate) -> None:
    text = template.render([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert '<call>f {"b":1,"a":2}</call>' in text
    assert not template.needs_dict_arguments


DICT_TEMPLATE = (
    "{%- for m in messages -%}{{ m.role }}:{{ m.content }}"
    "{%- for c in m.tool_calls or [] -%}<{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}>{%- endfor -%}{%- endfor -%}"
)
ITEMS_TEMPLATE = DICT_TEMPLATE.replace(
    "{{ c.function.arguments | tojson }}",
    "{%- for k, v in c.function.arguments.items() -%}{{ k }}={{ v }};{%- endfor -%}",
)


@pytest.mark.parametrize(
    ("source", "expected"), [(DICT_TEMPLATE, '<f {"b": 1, "a": 2}>'), (ITEMS_TEMPLATE, "b=1;a=2;")]
)
def test_arguments_are_parsed_for_templates_that_need_it(
    tokenizer: Tokenizer, source: str, expected: str
) -> None:
    template = ChatTemplate(tokenizer, source)
    assert template.needs_dict_arguments
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert expected in template.render([USER, message])


def test_invalid_arguments_are_shown_as_text(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, DICT_TEMPLATE)
    call = {"function": {"name": "f", "arguments": "{broken"}}
    text = template.render([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert "{broken" in text


NONE_TEMPLATE = (
    "{%- for m in messages -%}{%- if m.content is none -%}"
    "{%- for c in m.tool_calls -%}[{{ c.function.name }}]{%- endfor -%}"
    "{%- else -%}{{ m.content }}{%- endif -%}{%- endfor -%}"
)


def test_templates_that_ask_for_none_get_none(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, NONE_TEMPLATE)
    for content in ("", None):
        message = {"role": "assistant", "content": content, "tool_calls": [CALL]}
        assert template.render([USER, message]) == "hi[f]"


@pytest.mark.parametrize(
    "calls", ["text", [{}], [{"function": {"arguments": "{}"}}], [3], [{"function": {"name": 1}}]]
)
def test_malformed_tool_calls_are_refused(template: ChatTemplate, calls: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_calls"):
        template.render([USER, {"role": "assistant", "content": "", "tool_calls": calls}])


def test_the_templates_own_complaint_is_a_400(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([USER])


def test_the_sandbox_holds(tokenizer: Tokenizer) -> None:
    template = ChatTemplate(tokenizer, "{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        template.render([USER])


def test_variables_reach_the_template_if_it_has_them(template: ChatTemplate) -> None:
    assert template.variables == frozenset({"enable_thinking"})
    assert template.render([USER], variables={"enable_thinking": True}).endswith("<think>")
    plain = template.render([USER])
    assert template.render([USER], variables={"messages": [], "other": 1}) == plain


def test_a_tokenizer_without_template_is_a_value_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_byte_tokenizer(tmp_path, chat_template=None))
    assert tokenizer is not None
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(tokenizer)


def test_continue_final_message(template: ChatTemplate) -> None:
    text = template.render(
        [USER, {"role": "assistant", "content": "Once upon"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith("Once upon")
