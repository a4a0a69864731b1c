"""tool_choice, strict and response_format as one grammar, checked with xgrammar itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tool_models import DEEPSEEK_V3, DEEPSEEK_V31, GLM, KIMI_K2, MODELS, ToolModel

from radix_mla.errors import InvalidRequest
from radix_mla.request import Grammar
from radix_mla.text.tokenizer import Tokenizer
from server.openai import tool_formats
from server.openai.reasoning import THINK
from server.openai.tool_calls import read_tools
from server.openai.tool_grammar import GrammarBuilder

xgrammar = pytest.importorskip("xgrammar")

STRICT = {
    "type": "function",
    "function": {
        "name": "f",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
LOOSE = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
FORMATS = {tool_format.name: tool_format for tool_format in tool_formats.FORMATS}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(Path(__file__).parents[2] / "configs" / "demo")
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Any:
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer.hf, vocab_size=tokenizer.size)
    return xgrammar.GrammarCompiler(info, max_threads=1)


class Check:
    """Which texts a grammar accepts as a whole answer."""

    def __init__(self, tokenizer: Tokenizer, compiler: Any) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler

    def build(
        self,
        model: ToolModel,
        choice: Any,
        *,
        tools: Any = (STRICT, LOOSE),
        content: Grammar | None = None,
        parallel: bool = True,
        as_tokens: bool = True,
        is_open: bool = False,
        possible: bool = False,
    ) -> Grammar | None:
        use = read_tools(tools, choice, parallel=parallel, ignored=[])
        builder = GrammarBuilder(
            tools=FORMATS[model.name],
            reasoning=THINK,
            token_id=self._tokenizer.token_to_id if as_tokens else lambda text: None,
        )
        return builder.build(use, content, reasoning_open=is_open, reasoning_possible=possible)

    def accepts(self, grammar: Grammar | None, text: str) -> bool:
        assert grammar is not None
        assert grammar.kind == "structural_tag"
        matcher = xgrammar.GrammarMatcher(self._compiler.compile_structural_tag(grammar.text))
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.accept_token(token_id) for token_id in [*ids, 1])


@pytest.fixture(scope="module")
def check(tokenizer: Tokenizer, compiler: Any) -> Check:
    return Check(tokenizer, compiler)


def _write(model: ToolModel, *calls: tuple[str, dict[str, Any]]) -> str:
    def arguments(value: dict[str, Any]) -> str:
        if model is not GLM:
            return json.dumps(value)
        pairs = value.items()
        return "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in pairs)

    text = model.calls([(name, arguments(value)) for name, value in calls])
    return text.replace("\n", "") if model is GLM else text


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_required(check: Check, model: ToolModel, as_tokens: bool) -> None:
    grammar = check.build(model, "required", as_tokens=as_tokens)
    assert check.accepts(grammar, _write(model, ("f", {"a": 1})))
    assert check.accepts(grammar, _write(model, ("g", {"x": 2}), ("f", {"a": 1})))
    assert not check.accepts(grammar, "Hello")
    assert not check.accepts(grammar, "")
    assert not check.accepts(grammar, _write(model, ("f", {"b": 1})))
    assert not check.accepts(grammar, _write(model, ("other", {})))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_one_call_where_one_is_asked_for(check: Check, model: ToolModel) -> None:
    one, two = _write(model, ("g", {})), _write(model, ("g", {}), ("g", {}))
    for grammar in (check.build(model, NAMED), check.build(model, "required", parallel=False)):
        assert check.accepts(grammar, one)
        assert not check.accepts(grammar, two)
    assert not check.accepts(check.build(model, NAMED), _write(model, ("f", {"a": 1})))


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("as_tokens", [True, False])
def test_strict_under_auto(check: Check, model: ToolModel, as_tokens: bool) -> None:
    grammar = check.build(model, "auto", as_tokens=as_tokens)
    assert check.accepts(grammar, "Hello, no call.")
    assert check.accepts(grammar, "Look: " + _write(model, ("f", {"a": 1})))
    assert check.accepts(grammar, _write(model, ("g", {"any": 1}), ("f", {"a": 1})))
    assert not check.accepts(grammar, _write(model, ("f", {"b": 1})))


def test_allowed_tools(check: Check) -> None:
    grammar = check.build(DEEPSEEK_V31, ALLOWED)
    assert check.accepts(grammar, "Hello")
    assert check.accepts(grammar, _write(DEEPSEEK_V31, ("g", {})))
    assert not check.accepts(grammar, _write(DEEPSEEK_V31, ("f", {"a": 1})))


def test_what_needs_no_grammar_gets_none(check: Check) -> None:
    assert check.build(DEEPSEEK_V31, "auto", tools=[LOOSE]) is None
    assert check.build(DEEPSEEK_V31, "none") is None
    content = Grammar("json_object")
    assert check.build(DEEPSEEK_V31, "none", content=content) is content


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (Grammar("json_object"), '{"k": 1}', "[1]"),
        (Grammar("json_schema", '{"type": "integer"}'), "12", '"a"'),
        (Grammar("regex", "[ab]+"), "abba", "abc"),
        (Grammar("choice", '["yes", "no"]'), "yes", "maybe"),
        (Grammar("ebnf", 'root ::= "x" | "y"'), "y", "z"),
    ],
)
def test_response_format_beside_tools(check: Check, content: Grammar, good: str, bad: str) -> None:
    grammar = check.build(DEEPSEEK_V31, "auto", content=content)
    assert check.accepts(grammar, good)
    assert check.accepts(grammar, _write(DEEPSEEK_V31, ("f", {"a": 1})))
    assert not check.accepts(grammar, bad)


@pytest.mark.parametrize("as_tokens", [True, False])
def test_thinking_comes_first(check: Check, as_tokens: bool) -> None:
    call = _write(DEEPSEEK_V31, ("g", {}))
    is_open = check.build(DEEPSEEK_V31, "required", is_open=True, as_tokens=as_tokens)
    assert check.accepts(is_open, "hm { <x> </think>\n\n" + call)
    assert check.accepts(is_open, "</think>" + call)
    assert not check.accepts(is_open, "hm</think>Yes")
    possible = check.build(DEEPSEEK_V31, "required", possible=True, as_tokens=as_tokens)
    assert check.accepts(possible, "<think>hm</think>" + call)
    assert check.accepts(possible, call)
    content = check.build(
        DEEPSEEK_V31, "none", content=Grammar("json_object"), is_open=True, as_tokens=as_tokens
    )
    assert check.accepts(content, 'hm</think>{"a": 1}')
    assert not check.accepts(content, "hm</think>Yes")


def test_forced_calls_follow_the_schema_without_strict(check: Check) -> None:
    tool = {"type": "function", "function": {**STRICT["function"], "strict": False}}  # type: ignore[dict-item]
    for model in (DEEPSEEK_V3, KIMI_K2):
        grammar = check.build(model, "required", tools=[tool])
        assert check.accepts(grammar, _write(model, ("f", {"a": 1})))
        assert not check.accepts(grammar, _write(model, ("f", {"a": "x"})))


def test_a_schema_that_cannot_be_enforced(check: Check) -> None:
    """Under strict it is refused by name; otherwise any object will do."""
    function = {"name": "f", "parameters": {"type": "array", "uniqueItems": True}}
    loose = {"type": "function", "function": function}
    grammar = check.build(DEEPSEEK_V31, "required", tools=[loose])
    assert check.accepts(grammar, _write(DEEPSEEK_V31, ("f", {"x": 1})))
    strict = {"type": "function", "function": {**function, "strict": True}}
    with pytest.raises(InvalidRequest) as refused:
        check.build(DEEPSEEK_V31, "auto", tools=[LOOSE, strict])
    assert refused.value.param == "tools[1].function.parameters"


RICH = {
    "type": "function",
    "function": {
        "name": "book",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {
                "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
                "seat": {"$ref": "#/$defs/seat"},
                "note": {"anyOf": [{"type": "integer"}, {"type": "null"}], "title": "Note"},
            },
            "required": ["code", "seat", "note"],
            "additionalProperties": False,
            "$defs": {"seat": {"type": "string", "enum": ["aisle", "window"]}},
        },
    },
}
BOOKED = {"code": "AB-123", "seat": "aisle", "note": None}


@pytest.mark.parametrize("model", [DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2], ids=lambda m: m.name)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_with_ref_any_of_and_pattern(
    check: Check, model: ToolModel, choice: str
) -> None:
    grammar = check.build(model, choice, tools=[STRICT, RICH])
    for change in ({}, {"note": 7}, {"seat": "window"}):
        assert check.accepts(grammar, _write(model, ("book", {**BOOKED, **change})))
    for change in ({"code": "ab-123"}, {"seat": "roof"}, {"note": "x"}, {"extra": 1}):
        assert not check.accepts(grammar, _write(model, ("book", {**BOOKED, **change})))
    assert check.accepts(grammar, _write(model, ("book", BOOKED), ("f", {"a": 1})))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"allOf": [{}, {}]}, "allOf"),
        ({"$ref": "https://example.com/a"}, "ref"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"type": "string", "pattern": "^a$", "maxLength": 3}, "length"),
    ],
)
def test_what_a_strict_tool_cannot_have_is_named(
    check: Check, part: dict[str, Any], named: str
) -> None:
    parameters = {"type": "object", "properties": {"deep": {"type": "array", "items": part}}}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}
    with pytest.raises(InvalidRequest, match=named) as refused:
        check.build(DEEPSEEK_V31, "auto", tools=[LOOSE, tool])
    assert refused.value.param == "tools[1].function.parameters"
    assert "properties/deep/items" in refused.value.message
