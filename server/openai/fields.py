"""Which request fields are honoured, ignored or refused, and what happens to the rest.

honoured   fields of the endpoint's schema
ignored    known, without effect on the answer; silent
inert      ours or a peer's, without effect in this version; named in the header
refused    would change the answer and is not implemented: 400 with the reason
unknown    named in x-radix-ignored-fields and logged once a client; 400 under --strict-fields,
           for a near miss of a honoured field, and for every unknown `cache_*`
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import msgspec

from radix_mla.errors import InvalidRequest
from server.body import check_nesting_and_nul

IGNORED = frozenset(
    (
        "store",
        "metadata",
        "user",
        "safety_identifier",
        "verbosity",
        "moderation",
        "prediction",
        "parallel_tool_calls",
        "id_slot",
        "keep_alive",
        "num_ctx",
        "spaces_between_special_tokens",
    )
)
INERT = frozenset(("prompt_cache_breakpoint",))
_NOT_YET = "this version does not implement it"
_ANSWER = "it would change the answer and is not implemented"

REFUSED: Mapping[str, str] = {
    "suffix": _ANSWER,
    "functions": "it was replaced by tools",
    "function_call": "it was replaced by tool_choice",
    "audio": "this model has text only",
    "web_search_options": "this server does not search the web",
    "truncate_prompt_tokens": _ANSWER,
    "prompt_embeds": _ANSWER,
    "kv_transfer_params": _ANSWER,
    "use_beam_search": _ANSWER,
    "lora_path": _ANSWER,
    "explain_cache": _NOT_YET,
}
METADATA_PREFIX = "radix_mla."
_TEXT_FIELDS = frozenset(("cache_salt", "prompt_cache_key", "request_id"))
_MIN_NEAR_MISS = 6
_MAX_HEADER_NAMES = 20


@dataclass(frozen=True, slots=True)
class Sorted:
    """`values` goes to the schema; `ignored` to the header."""

    values: dict[str, Any]
    ignored: tuple[str, ...]


def sort_fields(
    body: Mapping[str, Any],
    honoured: Collection[str],
    *,
    strict: bool,
    also_ignored: Collection[str] = (),
    also_refused: Mapping[str, str] = MappingProxyType({}),
) -> Sorted:
    """Splits a body's fields by the lists above; null is absent.

    Raises InvalidRequest for refused fields, near misses, unknown `cache_*`, and under `strict`
    for every unknown field.
    """
    refused = {**REFUSED, **also_refused}
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in _with_metadata(body).items():
        if value is None:
            continue
        if name in honoured:
            values[name] = value
        elif name in INERT:
            ignored.append(name)
        elif name in refused:
            if value not in (False, "", [], {}):
                raise InvalidRequest(
                    f"{name} is not supported: {refused[name]}.",
                    param=name,
                    code="unsupported_parameter",
                )
        elif name not in IGNORED and name not in also_ignored:
            _check_unknown(name, honoured, strict=strict)
            ignored.append(name)
    return Sorted(values, tuple(ignored))


def header_value(names: Collection[str]) -> str:
    """Field names as one header value: at most 20 names, percent-encoded beyond plain ASCII."""
    shown = [quote(name[:64], safe="[]") for name in list(names)[:_MAX_HEADER_NAMES]]
    if len(names) > _MAX_HEADER_NAMES:
        shown.append(f"and {len(names) - _MAX_HEADER_NAMES} more")
    return ", ".join(shown)


def _with_metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Adds `metadata["radix_mla.NAME"]` as NAME where NAME is absent.

    Routers in front drop unknown fields of chat requests, but pass metadata on. Its values are
    strings by OpenAI's rules, so numbers and booleans are read from their JSON form.
    """
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        return body
    merged = dict(body)
    for key, value in metadata.items():
        if not key.startswith(METADATA_PREFIX):
            continue
        name = key.removeprefix(METADATA_PREFIX)
        if isinstance(value, str) and name not in _TEXT_FIELDS:
            # Text that is no JSON stays text: the schema will say what is wrong with it.
            with contextlib.suppress(msgspec.MsgspecError, RecursionError):
                text = value.encode()
                value = msgspec.json.decode(text)
                check_nesting_and_nul(text, value)
        merged.setdefault(name, value)
    return merged


def _check_unknown(name: str, honoured: Collection[str], *, strict: bool) -> None:
    if name.startswith("cache_"):
        known = sorted(field for field in {*honoured, *INERT} if field.startswith("cache_"))
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise _unknown(name, close[0] if close else None)
    near = near_miss(name, honoured)
    if near is not None:
        raise _unknown(name, near)
    if strict:
        raise _unknown(name, None)


def _unknown(name: str, near: str | None) -> InvalidRequest:
    hint = f" Did you mean `{near}`?" if near else ""
    shown = name[:64]
    return InvalidRequest(f"Unknown field `{shown}`.{hint}", param=shown, code="unknown_parameter")


def near_miss(name: str, honoured: Collection[str]) -> str | None:
    """The honoured field that `name` misspells: case, dashes, or one edit (two in long names)."""
    plain = _plain(name)
    for field in honoured:
        target = _plain(field)
        if plain == target:
            return field
        if min(len(plain), len(target)) < _MIN_NEAR_MISS:
            continue
        allowed = 2 if min(len(plain), len(target)) >= 10 else 1
        if abs(len(plain) - len(target)) <= allowed and _distance(plain, target) <= allowed:
            return field
    return None


def _plain(name: str) -> str:
    return name[:64].lower().replace("_", "").replace("-", "")


def _distance(left: str, right: str) -> int:
    """Edits between two short strings, swaps of neighbours counted once (restricted Damerau)."""
    before: list[int] = []
    previous = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        current = [i]
        for j, b in enumerate(right, 1):
            cost = min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            current.append(cost)
        before, previous = previous, current
    return previous[-1]


class SeenOnce:
    """Remembers (client, field) pairs, the newest few thousand, so that each is logged once."""

    def __init__(self, capacity: int = 4096, log: Callable[[str, str], None] | None = None) -> None:
        self._seen: dict[tuple[str, str], None] = {}
        self._capacity = capacity
        self._log = log

    def note(self, client: str, names: Collection[str]) -> None:
        for name in names:
            key = (client, name[:64])
            if key in self._seen:
                continue
            self._seen[key] = None
            if len(self._seen) > self._capacity:
                del self._seen[next(iter(self._seen))]
            if self._log is not None:
                self._log(client, name[:64])
