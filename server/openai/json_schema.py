"""JSON schemas for constrained output: what cannot be enforced exactly is refused by name.

`prepare_schema` checks a client's schema and rewrites it into the form that the grammar compiler
enforces: enforced means that every text it lets through is valid under the client's schema. It may
let through less (bounded strings without escapes, properties in the schema's order).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radix_mla.errors import InvalidRequest
from server.openai.json_pattern import unsupported_in_pattern

MAX_DEPTH = 64
MAX_SCHEMAS = 10_000  # subschemas in one schema

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
# What says which values are valid; every other keyword is an annotation and is dropped.
_OF_TYPE = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "minItems",
        "maxItems",
    ),
    "string": ("minLength", "maxLength", "pattern"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_COMBINED = ("anyOf", "oneOf", "allOf")
_VALIDATING = frozenset(
    ("type", "enum", "const", "format", "$ref", *_COMBINED, *sum(_OF_TYPE.values(), ()))
)
_FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uri",
    "uri-reference",
    "uuid",
    "json-pointer",
    "relative-json-pointer",
)
_PYTHON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def prepare_schema(schema: object, param: str = "response_format") -> str:
    """The schema's enforceable form, as JSON. Raises InvalidRequest that names what cannot be."""
    return json.dumps(_Preparer(param).root(schema), ensure_ascii=False)


class _Preparer:
    def __init__(self, param: str) -> None:
        self._param = param
        self._num_schemas = 0

    def root(self, schema: object) -> object:
        if not isinstance(schema, dict | bool):
            raise self._error("a schema is an object", [])
        return self._schema(schema, [])

    def _error(self, why: str, path: Sequence[str]) -> InvalidRequest:
        place = f" (at {'/'.join(path)[-200:]})" if path else ""
        return InvalidRequest(
            f"The JSON schema cannot be enforced: {why}{place}.",
            param=self._param,
            code="invalid_json_schema",
        )

    def _schema(self, schema: object, path: list[str]) -> Any:
        self._num_schemas += 1
        if len(path) > MAX_DEPTH:
            raise self._error(f"it is nested deeper than {MAX_DEPTH}", path[:8])
        if self._num_schemas > MAX_SCHEMAS:
            raise self._error(f"it has more than {MAX_SCHEMAS} subschemas", [])
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise self._error("a schema is an object or a boolean", path)
        for name in _REFUSED:
            if name in schema:
                raise self._error(f"{name} is not supported", path)
        if schema.get("uniqueItems") is True:
            raise self._error("uniqueItems is not supported", path)
        known = {name: value for name, value in schema.items() if name in _VALIDATING}
        prepared = self._known(known, path)
        for name in ("$defs", "definitions"):
            if isinstance(schema.get(name), dict):
                prepared[name] = self._each(schema[name], [*path, name])
        return prepared

    def _each(self, schemas: Mapping[str, object], path: list[str]) -> dict[str, Any]:
        return {name: self._schema(item, [*path, name]) for name, item in schemas.items()}

    def _known(self, schema: dict[str, Any], path: list[str]) -> dict[str, Any]:
        combined = [name for name in ("$ref", *_COMBINED) if name in schema]
        if combined:
            return self._combined(schema, combined, path)
        if "enum" in schema or "const" in schema:
            return self._values(schema, path)
        types = self._types(schema, path)
        self._check_multiple(types, schema, path)
        prepared: dict[str, Any] = {}
        if types:
            prepared["type"] = types if len(types) > 1 else types[0]
        for kind, names in _OF_TYPE.items():
            if kind in types or (kind == "number" and "integer" in types):
                part = {name: schema[name] for name in names if name in schema}
                prepared |= getattr(self, f"_{kind}")(part, path)
        if "string" in types and schema.get("format") in _FORMATS:
            if {"pattern", "minLength", "maxLength"} & prepared.keys():
                raise self._error("format beside pattern or a length is not supported", path)
            prepared["format"] = schema["format"]
        return prepared

    def _types(self, schema: dict[str, Any], path: list[str]) -> list[str]:
        """As given, else those that the keywords are about, so that these are enforced."""
        given = schema.get("type")
        if given is None:
            return [kind for kind, names in _OF_TYPE.items() if any(n in schema for n in names)]
        types = given if isinstance(given, list) else [given]
        for name in types:
            if name not in _TYPES:
                raise self._error(f"type {str(name)[:40]!r} is unknown", path)
        return types

    def _combined(
        self, schema: dict[str, Any], combined: list[str], path: list[str]
    ) -> dict[str, Any]:
        """`$ref` or one combinator. Other keywords beside a combinator go into its branches."""
        name = combined[0]
        beside = {key: value for key, value in schema.items() if key != name}
        if name == "$ref":
            reference = schema[name]
            if beside:
                raise self._error(f"{next(iter(beside))} beside $ref is not supported", path)
            if not isinstance(reference, str) or not (
                reference == "#" or reference.startswith("#/")
            ):
                raise self._error("a $ref outside the schema is not supported", path)
            return {"$ref": reference}
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise self._error(f"{name} must be a list of schemas", path)
        if name == "allOf" and len(branches) > 1:
            raise self._error("allOf of several schemas is not supported", path)
        if len(combined) > 1:
            raise self._error(f"{combined[1]} beside {name} is not supported", path)
        merged = [self._merge(beside, branch, [*path, name]) for branch in branches]
        return {name: [self._schema(branch, [*path, name]) for branch in merged]}

    def _merge(self, beside: dict[str, Any], branch: object, path: list[str]) -> object:
        if not beside or branch is False:
            return branch
        if branch is True:
            return beside
        if not isinstance(branch, dict) or any(name in branch for name in ("$ref", *_COMBINED)):
            raise self._error(f"{next(iter(beside))} beside it is not supported", path)
        merged = {**beside, **branch}
        for name in beside.keys() & branch.keys() & _VALIDATING:
            if name == "required" and _are_names(beside[name]) and _are_names(branch[name]):
                merged[name] = list(dict.fromkeys([*beside[name], *branch[name]]))
            elif beside[name] != branch[name]:
                raise self._error(f"{name} both here and beside it is not supported", path)
        return merged

    def _values(self, schema: dict[str, Any], path: list[str]) -> dict[str, Any]:
        """enum or const, of which `type` may leave some out."""
        name = "const" if "const" in schema else "enum"
        others = schema.keys() - {name, "type", "format"}
        if others:
            raise self._error(f"{min(others)} beside {name} is not supported", path)
        values = [schema["const"]] if name == "const" else schema["enum"]
        if not isinstance(values, list):
            raise self._error("enum must be a list", path)
        if "type" in schema:
            types = self._types(schema, path)
            values = [value for value in values if any(_is(value, kind) for kind in types)]
        if not values:
            raise self._error(f"{name} leaves no value", path)
        return {"enum": values}

    def _object(self, part: dict[str, Any], path: list[str]) -> dict[str, Any]:
        prepared = dict(part)
        for name in ("properties", "patternProperties"):
            if name in part:
                if not isinstance(part[name], dict):
                    raise self._error(f"{name} must be an object", path)
                prepared[name] = self._each(part[name], [*path, name])
        for pattern in part.get("patternProperties", {}):
            self._check_pattern(pattern, path)
        for name in ("additionalProperties", "unevaluatedProperties", "propertyNames"):
            if name in part:
                prepared[name] = self._schema(part[name], [*path, name])
        closed = False in (part.get("additionalProperties"), part.get("unevaluatedProperties"))
        required = part.get("required", [])
        if not _are_names(required):
            raise self._error("required must be a list of names", path)
        missing = [name for name in required if name not in prepared.get("properties", {})]
        if missing and (closed or "patternProperties" in part):
            raise self._error(f"required property {missing[0][:64]!r} is not in properties", path)
        if missing:
            # The compiler takes only declared properties for required ones.
            other = prepared.get("additionalProperties", True)
            own = prepared.get("properties", {})
            prepared["properties"] = {**own, **dict.fromkeys(missing, other)}
        return prepared

    def _array(self, part: dict[str, Any], path: list[str]) -> dict[str, Any]:
        prepared = dict(part)
        rest = prepared.pop("additionalItems", None)
        if isinstance(part.get("items"), list):  # the older spelling of prefixItems
            prepared["prefixItems"] = prepared.pop("items")
            if rest is not None:
                prepared["items"] = rest
        for name in ("items", "unevaluatedItems"):
            if name in prepared:
                prepared[name] = self._schema(prepared[name], [*path, name])
        if "prefixItems" in prepared:
            if not isinstance(prepared["prefixItems"], list):
                raise self._error("prefixItems must be a list", path)
            prepared["prefixItems"] = [
                self._schema(item, [*path, "prefixItems"]) for item in prepared["prefixItems"]
            ]
        return prepared

    def _string(self, part: dict[str, Any], path: list[str]) -> dict[str, Any]:
        if "pattern" in part:
            if {"minLength", "maxLength"} & part.keys():
                raise self._error("pattern beside a length is not supported", path)
            self._check_pattern(part["pattern"], path)
        return part

    def _number(self, part: dict[str, Any], path: list[str]) -> dict[str, Any]:
        return part

    def _check_multiple(
        self, types: Sequence[str], schema: dict[str, Any], path: list[str]
    ) -> None:
        if "multipleOf" in schema and "number" in types:
            raise self._error("multipleOf of type number is not supported", path)

    def _check_pattern(self, pattern: object, path: list[str]) -> None:
        """A pattern is matched against the text between the quotes, where JSON escapes stand."""
        if not isinstance(pattern, str):
            raise self._error("pattern must be a string", path)
        why = unsupported_in_pattern(pattern)
        if why is not None:
            raise self._error(f"pattern {pattern[:64]!r} has {why}", path)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is(value: object, kind: str) -> bool:
    """JSON Schema's types: true is no number, 1.0 is an integer."""
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES[kind])
