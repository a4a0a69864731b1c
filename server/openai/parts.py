"""JSON schemas, for /openapi.json, of those parts of a body that are not checked by Pydantic.

Prompts, messages and tools have their own checks, whose texts are clearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

JsonSchema = dict[str, Any]

TEXT: JsonSchema = {"type": "string"}
_SOME_TEXT: JsonSchema = {"type": "string", "minLength": 1}
TOKEN_IDS: JsonSchema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_SOME_IDS: JsonSchema = {**TOKEN_IDS, "minItems": 1}


def either(*schemas: JsonSchema) -> JsonSchema:
    return {"anyOf": list(schemas)}


def or_null(schema: JsonSchema) -> JsonSchema:
    return either(schema, {"type": "null"})


def list_of(schema: JsonSchema) -> JsonSchema:
    return {"type": "array", "items": schema}


def tagged(kinds: Sequence[str], **properties: JsonSchema) -> JsonSchema:
    """An object with one of these in `type`, and these properties."""
    return {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, **properties},
        "required": ["type", *properties],
    }


PROMPT = either(_SOME_TEXT, list_of(_SOME_TEXT), _SOME_IDS, list_of(_SOME_IDS))
for _options in PROMPT["anyOf"][1:]:
    _options["minItems"] = 1

_TEXT_PART = tagged(["text", "input_text", "output_text"], text=TEXT)
_CONTENT = or_null(either(TEXT, list_of(_TEXT_PART)))
_TOOL_CALL: JsonSchema = {
    "type": "object",
    "properties": {
        "function": {
            "type": "object",
            "properties": {"name": TEXT},
            "required": ["name"],
        },
    },
    "required": ["function"],
}


def _message(roles: Sequence[str], content: JsonSchema, **more: JsonSchema) -> JsonSchema:
    properties = {"role": {"enum": list(roles)}, "content": content, **more}
    return {"type": "object", "properties": properties, "required": ["role"]}


def _messages(*options: JsonSchema) -> JsonSchema:
    return {**list_of(either(*options)), "minItems": 1}


MESSAGES = _messages(
    _message(["system", "developer", "user", "tool"], _CONTENT),
    _message(["assistant"], _CONTENT, tool_calls=list_of(_TOOL_CALL), token_ids=TOKEN_IDS),
)
_FUNCTION_TOOL = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": r"^[A-Za-z0-9_.-]{1,256}$"},
                "description": TEXT,
                "parameters": {"type": "object"},
                "strict": {"type": "boolean"},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_OTHER_TOOL = {  # named in x-radix-ignored-fields
    "type": "object",
    "properties": {"type": {"not": {"enum": ["function"]}}},
    "required": ["type"],
}
TOOLS = list_of(either(_FUNCTION_TOOL, _OTHER_TOOL))

_TEXT_BLOCK = tagged(["text"], text=TEXT)
_RESULT_BLOCK = tagged(["tool_result"])
_USE_BLOCK = tagged(["tool_use"], name=TEXT)
_THOUGHT_BLOCK = tagged(["thinking", "redacted_thinking", "fallback"])
ANTHROPIC_MESSAGES = _messages(
    _message(
        ["user", "system"], or_null(either(TEXT, list_of(either(_TEXT_BLOCK, _RESULT_BLOCK))))
    ),
    _message(
        ["assistant"],
        or_null(either(TEXT, list_of(either(_TEXT_BLOCK, _USE_BLOCK, _THOUGHT_BLOCK)))),
        token_ids=TOKEN_IDS,
    ),
)
