"""Typed access to a JSON object of a checkpoint; what is missing or malformed is named."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from radix_mla.errors import CheckpointError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises CheckpointError: missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} not found in {path.parent}") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, an object is needed")
    return value


class ConfigReader:
    """Reads typed values; `null` counts as missing. Every error is a CheckpointError with the key.

    A key without a default must be there. `read` gathers the keys that were asked for, those of
    sections as "section.key".
    """

    __slots__ = ("_prefix", "_raw", "_source", "read")

    def __init__(self, raw: Mapping[str, Any], *, source: str = "config.json") -> None:
        self._raw = raw
        self._source = source
        self._prefix = ""
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """The value as it is; None where it is missing."""
        self.read.add(self._prefix + key)
        return self._raw.get(key)

    def section(self, key: str) -> ConfigReader:
        """The object under `key`; an empty one where it is missing."""
        value = self.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._malformed(key, value, "an object")
        section = ConfigReader(value, source=f"{self._source}: {key}")
        section.read, section._prefix = self.read, f"{self._prefix}{key}."
        return section

    def size(self, key: str) -> int:
        """An integer ≥ 1."""
        value = self.count(key)
        if value < 1:
            raise self._malformed(key, value, "at least 1")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """An integer ≥ 0."""
        value = self.optional_count(key)
        return self._present(key, default) if value is None else value

    def optional_count(self, key: str) -> int | None:
        """An integer ≥ 0, or None where the key is missing."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._malformed(key, value, "a non-negative integer")
        return value

    def number(self, key: str) -> float:
        return self._present(key, self.optional_number(key))

    def optional_number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key)
        if value is None:
            return self._present(key, default)
        if not isinstance(value, bool):
            raise self._malformed(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._malformed(key, value, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self._malformed(key, value, "a token id or a list of them")
        return tuple(ids)

    def _present(self, key: str, value: T | None) -> T:
        if value is None:
            raise CheckpointError(f"{self._source} has no {key}")
        return value

    def _malformed(self, key: str, value: object, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {key} is {value!r}, it must be {wanted}")


def merge_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with the values of `overrides`; objects are merged key by key."""
    merged = dict(raw)
    for key, value in overrides.items():
        old = merged.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[key] = merge_overrides(old, value) if both else value  # type: ignore[arg-type]
    return merged


def flat_keys(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of `raw`; those of objects in it as "section.key"."""
    for key, value in raw.items():
        if isinstance(value, Mapping) and value:
            yield from flat_keys(value, f"{prefix}{key}.")
        else:
            yield prefix + key
