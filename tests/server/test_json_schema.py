"""What a JSON schema becomes before it is compiled, and what is refused by name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_mla.errors import InvalidRequest
from server.openai.json_pattern import unsupported_in_pattern
from server.openai.json_schema import MAX_DEPTH, prepare_schema


def prepared(schema: Any) -> Any:
    return json.loads(prepare_schema(schema))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer", "title": "N", "default": 1, "x-own": 2}, {"type": "integer"}),
        ({"minimum": 3}, {"type": "number", "minimum": 3}),
        ({"const": 1}, {"enum": [1]}),
        ({"type": "integer", "enum": [1, "a", True, 2.0]}, {"enum": [1, 2.0]}),
        ({"type": ["string", "null"], "enum": ["a", None, 3]}, {"enum": ["a", None]}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"type": "string", "format": "colour"}, {"type": "string"}),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        ),
        (
            {"type": "object", "required": ["b"], "properties": {"a": True}},
            {"type": "object", "required": ["b"], "properties": {"a": True, "b": True}},
        ),
        (
            {"type": "integer", "anyOf": [{"minimum": 3}, {"maximum": -3}]},
            {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": -3}]},
        ),
        (
            {"allOf": [{"$ref": "#/$defs/a"}], "description": "d"},
            {"allOf": [{"$ref": "#/$defs/a"}]},
        ),
        (True, True),
        ({"uniqueItems": False}, {}),
    ],
)
def test_the_enforceable_form(schema: Any, expected: Any) -> None:
    assert prepared(schema) == expected


def test_the_order_of_properties_is_kept() -> None:
    names = ["z", "a", "m"]
    schema = {"type": "object", "properties": {name: {"type": "null"} for name in names}}
    assert list(prepared(schema)["properties"]) == names


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"not": {}}, "not is"),
        ({"if": {}, "then": {}}, "if is"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"dependentRequired": {}}, "dependentRequired"),
        ({"properties": {"a": {"properties": {"b": {"not": {}}}}}}, "at properties/a/properties/b"),
        ({"$defs": {"a": {"not": {}}}}, "at \\$defs/a"),
        ({"$ref": "#/$defs/a", "minimum": 3}, "minimum beside \\$ref"),
        ({"$ref": "http://example.org/schema"}, "outside the schema"),
        ({"allOf": [{}, {}]}, "allOf of several"),
        ({"anyOf": []}, "anyOf must be a list"),
        ({"minimum": 1, "anyOf": [{"$ref": "#"}]}, "minimum beside"),
        ({"minimum": 1, "anyOf": [{"minimum": 2}]}, "minimum both"),
        ({"anyOf": [{}], "oneOf": [{}]}, "oneOf beside anyOf"),
        ({"type": "integer", "enum": ["a"]}, "no value"),
        ({"enum": [1], "minimum": 3}, "minimum beside enum"),
        ({"type": "text"}, "'text' is unknown"),
        ({"multipleOf": 2}, "multipleOf of type number"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern beside a length"),
        ({"type": "string", "format": "date", "maxLength": 3}, "format beside"),
        ({"type": "string", "pattern": 'a"'}, "quote"),
        ({"required": ["a"], "additionalProperties": False}, "'a' is not in properties"),
        ({"required": "a"}, "list of names"),
        ({"properties": []}, "properties must be"),
        ({"properties": {"a": 3}}, "object or a boolean"),
        ([], "a schema is an object"),
        ("text", "a schema is an object"),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        prepare_schema(schema, "guided_json")
    assert caught.value.param == "guided_json"


def test_depth_and_size_have_limits() -> None:
    deep: Any = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    prepare_schema(deep)
    with pytest.raises(InvalidRequest, match="nested deeper"):
        prepare_schema({"items": deep})
    with pytest.raises(InvalidRequest, match="subschemas"):
        prepare_schema({"anyOf": [True] * 20_000})


@pytest.mark.parametrize(
    "pattern", ["^[a-z]+$", r"\d{3}", "(?:a|b)", r'["\\]', r"\/", r"\x41", r"[\n]", "é", r"\."]
)
def test_patterns_that_can_be_enforced(pattern: str) -> None:
    assert unsupported_in_pattern(pattern) is None


@pytest.mark.parametrize(
    "pattern",
    ['"', r"\"", r"\\", "\n", r"\n", r"\x22", r"\u005c", "(?=a)", "(?<n>a)", r"\Aa", r"[a]\\"],
)
def test_patterns_that_cannot(pattern: str) -> None:
    assert unsupported_in_pattern(pattern) is not None


_KEYWORDS = st.sampled_from(
    [
        *("type", "enum", "const", "format", "$ref", "anyOf", "allOf", "items", "prefixItems"),
        *("properties", "required", "additionalProperties", "patternProperties", "pattern"),
        *("minLength", "minimum", "multipleOf", "uniqueItems", "not", "$defs", "additionalItems"),
    ]
)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["string", "object", "array", "number", "a", "date", "#", "#/$defs/a", "("]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYWORDS, inner, max_size=4),
    max_leaves=12,
)


@given(schema=st.dictionaries(_KEYWORDS, _VALUES, max_size=4))
@settings(max_examples=1000)
def test_whatever_comes_is_prepared_or_refused(schema: Any) -> None:
    """Nothing else: another exception would be a 500."""
    with contextlib.suppress(InvalidRequest):
        json.loads(prepare_schema(schema))
