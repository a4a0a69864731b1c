"""Reads GLM's calls, which have no JSON: keys and values between tags become a JSON object.

    <tool_call>name <arg_key>k</arg_key> <arg_value>v</arg_value> ... </tool_call>

Values of parameters that the tool's schema says are strings stream as they are generated; others
come whole, verbatim where they are JSON, as a string where they are not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from server.openai.assistant import Read
from server.openai.assistant_events import TextDelta, ToolCallArguments, ToolCallStart
from server.openai.call_ids import CallIds
from server.openai.markers import first_of, held

BEGIN, END = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>]{1,256})\s*")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
_MAX_NAME_CHARS = 512


class GlmReader:
    """`CallReader` of GLM-4.5 and later; `schemas`: parameters of the tools by name."""

    triggers = (BEGIN,)
    ends_reasoning = False  # the tag is also written in thinking, about tools
    trims_text = True

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], ids: CallIds) -> None:
        self.num_calls = 0
        self._schemas = schemas
        self._ids = ids
        self._name = ""
        self._types: frozenset[str] = frozenset()
        self._num_pairs = 0
        self._state: Callable[[str, bool], Read | None] = self._header

    def read(self, buffer: str, *, final: bool) -> Read:
        read = self._state(buffer, final) or Read((), 0)
        if read.done:
            self._state = self._header
        return read

    def _header(self, text: str, final: bool) -> Read | None:
        body = text[len(BEGIN) :]
        at, marker = first_of(body, (KEY, END, BEGIN))
        if marker is None and not final and len(body) <= _MAX_NAME_CHARS:
            return None
        match = _NAME.fullmatch(body[:at]) if marker in (KEY, END) else None
        if match is None:
            return Read([TextDelta(BEGIN)], len(BEGIN), done=True)
        self._name = match.group(1)
        self._num_pairs = 0
        self.num_calls += 1
        self._state = self._between
        start = ToolCallStart(self.num_calls - 1, self._ids.take(self._name, None), self._name)
        return Read([start], len(BEGIN) + at)

    def _between(self, text: str, final: bool) -> Read | None:
        body = text.lstrip()
        if body.startswith(END):
            return self._close(len(text) - len(body) + len(END))
        match = _PAIR.match(text)
        if match is not None:
            key = match.group(1)
            self._types = value_types(self._schemas.get(self._name, {}), key)
            front = "{" if self._num_pairs == 0 else ", "
            front += json.dumps(key, ensure_ascii=False) + ": "
            self._num_pairs += 1
            self._state = self._string if self._types == {"string"} else self._other
            front += '"' if self._types == {"string"} else ""
            return Read([self._piece(front)], match.end())
        if not final and (KEY.startswith(body) or END.startswith(body) or body.startswith(KEY)):
            return None
        if final and (not body or body.startswith(KEY)):
            return Read((), len(text)) if text else None  # cut off in the middle
        return self._close(0)  # what follows is not an argument: it is text

    def _string(self, text: str, final: bool) -> Read | None:
        at = text.find(VALUE_END)
        if at != -1:
            self._state = self._between
            return Read([self._piece(_escaped(text[:at]) + '"')], at + len(VALUE_END))
        count = len(text) if final else len(text) - held(text, (VALUE_END,))
        return Read([self._piece(_escaped(text[:count]))], count) if count else None

    def _other(self, text: str, final: bool) -> Read | None:
        at = text.find(VALUE_END)
        if at != -1:
            self._state = self._between
            return Read([self._piece(json_value(text[:at], self._types))], at + len(VALUE_END))
        return Read([self._piece(text)], len(text)) if final and text else None

    def _close(self, used: int) -> Read:
        return Read([self._piece("}" if self._num_pairs else "{}")], used, done=True)

    def _piece(self, text: str) -> ToolCallArguments:
        return ToolCallArguments(self.num_calls - 1, text)


def json_value(text: str, types: frozenset[str]) -> str:
    """A value as JSON: verbatim if it is JSON of a permitted type, else as a string."""
    try:
        kind = _kind(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    permitted = not types or kind in types or (kind == "integer" and "number" in types)
    if not permitted and "string" in types:
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The JSON types that a tool's schema permits for a parameter; empty when it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return _types(found) if isinstance(found, Mapping) else frozenset()


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(item for item in kind if isinstance(item, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(map(_kind, values))
    for name in ("anyOf", "oneOf"):
        options = schema.get(name)
        if isinstance(options, list):
            parts = [_types(option) for option in options if isinstance(option, Mapping)]
            return frozenset().union(*parts) if all(parts) else frozenset()
    return frozenset()


def _kind(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
        case _:
            return "object"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
