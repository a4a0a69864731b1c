"""Structured output: from request fields to a `Grammar`. Nothing is added to the prompt.

    response_format     text, json_object, json_schema, structural_tag   (OpenAI)
    structured_outputs  {json | regex | choice | grammar | json_object | structural_tag}   (vLLM)
    guided_json, guided_regex, guided_choice, guided_grammar   (older vLLM)

`strict` of a json_schema makes no difference: the schema is enforced either way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from radix_mla.errors import InvalidRequest
from radix_mla.request import Grammar
from server.openai.json_schema import prepare_schema
from server.openai.schemas import GenerationFields

MAX_CHOICES = 4096


def grammar_of(fields: GenerationFields) -> Grammar | None:
    """What the answer must match; None: anything. Raises InvalidRequest that names the field."""
    found = {
        name: make(value, name)
        for name, make in _FIELDS.items()
        if (value := getattr(fields, name)) is not None
    }
    found = {name: grammar for name, grammar in found.items() if grammar is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise _invalid(f"{second} and {first} cannot both be given.", second)
    return next(iter(found.values()), None)


def _response_format(value: Mapping[str, Any], param: str) -> Grammar | None:
    kind = value.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind == "json_schema":
        holder = value.get("json_schema")
        if not isinstance(holder, dict):
            raise _invalid(f"{param}.json_schema is missing.", f"{param}.json_schema")
        # Some clients send the schema itself in the place of {name, schema, strict}.
        schema = holder.get("schema", holder.get("json_schema"))
        if schema is None:
            raise _invalid(f"{param}.json_schema.schema is missing.", f"{param}.json_schema")
        return _json(schema, f"{param}.json_schema.schema")
    if kind == "structural_tag":
        return _structural_tag(value, param)
    raise _invalid(
        f"{param}.type {str(kind)[:64]!r} is not one of text, json_object, json_schema, "
        "structural_tag.",
        param,
    )


def _json(value: object, param: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise _invalid(f"{param} is not JSON.", param) from None
    return Grammar("json_schema", prepare_schema(value, param))


def _json_object(value: object, param: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise _invalid(f"{param} must be true or false.", param)
    return Grammar("json_object") if value else None


def _regex(value: object, param: str) -> Grammar:
    return Grammar("regex", _text(value, param))


def _grammar(value: object, param: str) -> Grammar:
    return Grammar("ebnf", _text(value, param))


def _choice(value: object, param: str) -> Grammar:
    if (
        not isinstance(value, list)
        or not 1 <= len(value) <= MAX_CHOICES
        or not all(isinstance(item, str) and item for item in value)
    ):
        raise _invalid(f"{param} must be a list of 1 to {MAX_CHOICES} non-empty strings.", param)
    return Grammar("choice", json.dumps(list(dict.fromkeys(value)), ensure_ascii=False))


def _structural_tag(value: object, param: str) -> Grammar:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return Grammar("structural_tag", text)


def _text(value: object, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid(f"{param} must be a non-empty string.", param)
    return value


Maker = Callable[[Any, str], Grammar | None]

_OF_VLLM: Mapping[str, Maker] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}


def _structured_outputs(value: Mapping[str, Any], param: str) -> Grammar | None:
    given = [name for name in value if name in _OF_VLLM and value[name] is not None]
    if len(given) != 1:
        names = ", ".join(_OF_VLLM)
        raise _invalid(f"{param} must have exactly one of {names}.", param)
    name = given[0]
    return _OF_VLLM[name](value[name], f"{param}.{name}")


_FIELDS: Mapping[str, Maker] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
}


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
