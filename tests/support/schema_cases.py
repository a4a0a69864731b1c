"""Random JSON schemas of the kinds that clients send, all bounded: a model can always end."""

from __future__ import annotations

from random import Random
from typing import Any

_WORDS = ("name", "age", "city", "status", "items", "total", "kind", "note", "größe", 'a "b"')
_VALUES = ("red", "green", "light blue", "naïve", "a\nb", "", "None", 'say "hi"')
_PATTERNS = (
    "^[a-z]{2,6}$",
    "^[A-Z]{3}-[0-9]{2,4}$",
    "^(yes|no|maybe)$",
    "^#[0-9a-f]{6}$",
    r"^\d{4}-\d{2}-\d{2}$",
    r"^\w{1,8}@(foo|bar)\.com$",
    "^[^x]{1,5}$",
    "ab?c",
)


def random_schema(rng: Random) -> dict[str, Any]:
    """An object at the root, three levels at most; `$defs` that it may refer to."""
    defs = {f"def{i}": _leaf(rng) for i in range(rng.randrange(3))}
    schema = _object(rng, 2, list(defs))
    if defs:
        schema["$defs"] = defs
    return schema


def _object(rng: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    names = rng.sample(_WORDS, rng.randrange(1, 5))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth, refs) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.7:
        schema["additionalProperties"] = False
    if rng.random() < 0.3:
        schema["title"] = "Thing"
    return schema


def _any(rng: Random, depth: int, refs: list[str]) -> dict[str, Any]:
    kinds = ["leaf", "leaf", "anyOf", "null"] + (["object", "array"] if depth else [])
    kind = rng.choice(kinds + (["ref"] if refs else []))
    match kind:
        case "object":
            return _object(rng, depth - 1, refs)
        case "array":
            low = rng.randrange(3)
            items = _any(rng, depth - 1, refs)
            return {"type": "array", "items": items, "minItems": low, "maxItems": low + 2}
        case "anyOf":
            return {"anyOf": [_leaf(rng) for _ in range(rng.randrange(2, 4))]}
        case "null":
            return {"anyOf": [_leaf(rng), {"type": "null"}], "default": None}
        case "ref":
            return {"$ref": f"#/$defs/{rng.choice(refs)}"}
        case _:
            return _leaf(rng)


def _leaf(rng: Random) -> dict[str, Any]:
    low = rng.randrange(-50, 50)
    return rng.choice(
        [
            {"enum": rng.sample(_VALUES, rng.randrange(1, 5))},
            {"enum": [1, "one", None, True, 2.5, ["x"]]},
            {"const": rng.choice(_VALUES)},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 12)},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1000)},
            {"type": "number", "minimum": low, "maximum": low + 10},
            {"type": "boolean"},
            {"type": ["string", "null"], "maxLength": 8},
            {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])},
        ]
    )
