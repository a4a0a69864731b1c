"""The parser by itself: any cut of any text gives the same events, and text is never lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.openai.assistant import AssistantParser
from server.openai.assistant_events import (
    AssistantEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)
from server.openai.call_ids import CallIds, used_ids
from server.openai.reasoning import THINK
from server.openai.tool_formats import FORMATS, ToolFormat, find_tool_format
from server.openai.tool_reader_glm import json_value, value_types

SCHEMAS: dict[str, Any] = {
    "f": {
        "properties": {
            "s": {"type": "string"},
            "i": {"type": "integer"},
            "n": {"type": ["string", "null"]},
            "e": {"enum": ["a", "b"]},
            "u": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        }
    }
}
_PIECES = ["a", " ", "\n", "<", "｜", "|", "f", "function", "```json", "```", "{}", '{"a": 1}', "é"]


def _parse(tool_format: ToolFormat, pieces: list[str], **how: Any) -> list[AssistantEvent]:
    reader = tool_format.make_reader(SCHEMAS, CallIds())
    parser = AssistantParser(how.pop("reasoning", None), reader, **how)
    events: list[AssistantEvent] = []
    for piece in pieces:
        events += parser.push(piece)
    return [_plain(event) for event in merge_events([*events, *parser.finish()])]


def _plain(event: AssistantEvent) -> AssistantEvent:
    """Random ids are equal."""
    if isinstance(event, ToolCallStart) and event.id.startswith("call_"):
        return ToolCallStart(event.index, "call_", event.name)
    return event


def _texts(tool_format: ToolFormat) -> st.SearchStrategy[list[str]]:
    marks = [*tool_format.markers, *THINK, tool_format.shape.begin.replace("{name}", "f")]
    return st.lists(st.sampled_from([*marks, *marks, *_PIECES, tool_format.shape.end]), max_size=14)


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda found: found.name)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_cut_does_not_matter(tool_format: ToolFormat, data: st.DataObject) -> None:
    pieces = data.draw(_texts(tool_format))
    reasoning = data.draw(st.sampled_from([None, THINK]))
    text = "".join(pieces)
    size = data.draw(st.integers(1, 5))
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    whole = _parse(tool_format, [text], reasoning=reasoning)
    assert _parse(tool_format, pieces, reasoning=reasoning) == whole
    assert _parse(tool_format, cut, reasoning=reasoning) == whole


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda found: found.name)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_without_calls(tool_format: ToolFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(_texts(tool_format)))
    events = _parse(tool_format, [text])
    if not any(isinstance(event, ToolCallStart) for event in events):
        assert events == ([TextDelta(text)] if text else [])


@pytest.mark.parametrize("tool_format", FORMATS, ids=lambda found: found.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_events_are_well_formed(tool_format: ToolFormat, data: st.DataObject) -> None:
    """Calls are numbered, and arguments belong to the call that is open."""
    text = "".join(data.draw(_texts(tool_format)))
    limit = data.draw(st.sampled_from([None, 1]))
    last = -1
    for event in _parse(tool_format, list(text), reasoning=THINK, max_calls=limit):
        match event:
            case ToolCallStart(index, _, name):
                assert index == last + 1
                assert name
                last = index
            case ToolCallArguments(index, piece):
                assert index == last
                assert piece
            case TextDelta(piece) | ReasoningDelta(piece):
                assert piece
    assert limit is None or last < limit  # what comes behind the last permitted call is dropped


def test_find_tool_format() -> None:
    assert find_tool_format("{{ messages }}") is None
    for tool_format in FORMATS:
        assert find_tool_format("x".join(tool_format.sign)) is tool_format


def test_a_missing_end_marker_ends_the_call_at_the_next_one() -> None:
    v31 = FORMATS[1]
    begin, end, call, call_end, sep = v31.markers
    text = f"{begin}{call}f{sep}{{}}{call}g{sep}[1]{end}bye"
    for pieces in ([text], list(text)):
        assert _parse(v31, pieces) == [
            ToolCallStart(0, "call_", "f"),
            ToolCallArguments(0, "{}"),
            ToolCallStart(1, "call_", "g"),
            ToolCallArguments(1, "[1]"),
            TextDelta("bye"),
        ]
    assert call_end not in text


def test_text_between_calls_is_text() -> None:
    v31 = FORMATS[1]
    begin, end, call, call_end, sep = v31.markers
    text = f"{begin}{call}f{sep}{{}}{call_end} junk {call}two words{call_end}{end}"
    events = _parse(v31, list(text))
    assert events[2:] == [TextDelta(f" junk {call}two words{call_end}")]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("s", "12", "12"),
        ("s", 'a "b"\n\\', 'a "b"\n\\'),
        ("i", "12", 12),
        ("i", "twelve", "twelve"),
        ("n", "null", None),
        ("n", "12", "12"),
        ("e", "a", "a"),
        ("u", "12", 12),
        ("u", "x", "x"),
        ("other", '{"b": [1]}', {"b": [1]}),
        ("other", "plain", "plain"),
        ("other", "NaN", "NaN"),
    ],
)
def test_glm_values_follow_the_schema(key: str, written: str, value: object) -> None:
    glm = FORMATS[3]
    text = f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    for pieces in ([text], list(text)):
        events = _parse(glm, pieces)
        arguments = events[1]
        assert isinstance(arguments, ToolCallArguments)
        assert json.loads(arguments.text) == {key: value}


def test_glm_json_is_kept_verbatim() -> None:
    assert json_value(' {"b":1,  "a":2.50} ', frozenset()) == '{"b":1,  "a":2.50}'
    assert json_value("1", frozenset(("number",))) == "1"
    assert value_types({"properties": {"a": {"anyOf": [{"type": "null"}, {}]}}}, "a") == frozenset()
    assert value_types({"properties": {"a": {"const": 1}}}, "a") == {"integer"}
    assert value_types({"properties": []}, "a") == frozenset()


def test_ids_never_repeat() -> None:
    ids = CallIds(["functions.a:4", "call_x"])
    assert ids.take("a", "functions.a:4") == "functions.a:5"
    assert ids.take("b", "functions.b:6") == "functions.b:6"
    assert ids.take("b", "functions.b:6") == "functions.b:7"
    assert ids.take("c", "c") == "functions.c:8"
    made = {ids.take("a", None) for _ in range(100)}
    assert len(made) == 100
    assert all(len(made_id) == 29 and made_id.startswith("call_") for made_id in made)


def test_used_ids_of_a_conversation() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": None}, 3]},
        {"role": "assistant", "tool_calls": None},
        {"role": "user"},
    ]
    assert used_ids(messages) == {"a"}
