"""Typed access to a JSON object of a checkpoint; what is missing or malformed is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

    A key without a default must be there.
    """

    __slots__ = ("_source", "raw")

    def __init__(self, raw: Mapping[str, Any], *, source: str = "config.json") -> None:
        self.raw = raw
        self._source = source

    def section(self, key: str) -> ConfigReader:
        """The object under `key`; an empty one where it is missing."""
        value = self.raw.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._malformed(key, value, "an object")
        return ConfigReader(value, source=f"{self._source}: {key}")

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
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._malformed(key, value, "a non-negative integer")
        return value

    def number(self, key: str) -> float:
        return self._present(key, self.optional_number(key))

    def optional_number(self, key: str) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._malformed(key, value, "a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.raw.get(key)
        if value is None:
            return self._present(key, default)
        if not isinstance(value, bool):
            raise self._malformed(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._malformed(key, value, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id, a list of ids, or nothing."""
        value = self.raw.get(key)
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
