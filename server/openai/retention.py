"""Which fields ask to keep a request's rows longer: ours, and the hints of others' APIs.

ours      cache_ttl, cache_priority; checked by the schema; where given, they outrank all hints
OpenAI    prompt_cache_retention, prompt_cache_options.ttl
Anthropic cache_control, at the top or on a block: a message's, the system's, a tool's
NVIDIA    nvext.cache_control, nvext.agent_hints.priority

The longest time of the hints counts. A hint of an unknown form is ignored, and named as such.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Any

from radix_mla.cache.retention import MAX_RANK, MAX_TTL_S, Retention

# Seconds, minutes or hours, up to 24 h; no match is out of range.
TTL_PATTERN = r"^(?:[1-9][0-9]{0,3}s|[1-9][0-9]{0,2}m|(?:[1-9]|1[0-9]|2[0-4])h)$"
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_EPHEMERAL_S = 300.0  # what Anthropic's `ephemeral` means without a ttl


def ttl_seconds(value: Any) -> Any:
    """A time such as "5m" in seconds; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(TTL_PATTERN, value):
        return float(value[:-1]) * _UNIT_S[value[-1]]
    return value


def checked_ttl(value: Any) -> Any:
    """`ttl_seconds` of our own field. Raises ValueError for other texts."""
    seconds = ttl_seconds(value)
    if isinstance(seconds, str):
        raise ValueError('a time is a number of seconds, or a text such as "90s", "5m" or "24h"')
    return seconds


class Hints:
    """Collects the hints of one request; `ignored` gets the names of those of unknown form."""

    def __init__(self, ignored: list[str]) -> None:
        self._ignored = ignored
        self._ttl_s = 0.0
        self._priority = 0

    def retention(self, *, ttl_s: float | None, priority: int | None) -> Retention:
        """With our own fields, which win."""
        return Retention.of(
            self._priority if priority is None else priority,
            self._ttl_s if ttl_s is None else ttl_s,
        )

    def openai(self, retention: object, options: object) -> None:
        """`prompt_cache_retention` and `prompt_cache_options`."""
        if retention not in (None, "in_memory", "in-memory"):
            self._ttl(retention, "prompt_cache_retention")
        for name, value in self._items(options, "prompt_cache_options"):
            if name == "ttl":
                self._ttl(value, "prompt_cache_options.ttl")
            else:
                self._ignore(f"prompt_cache_options.{name}")

    def nvidia(self, nvext: object) -> None:
        """`nvext`."""
        for name, value in self._items(nvext, "nvext"):
            if name == "cache_control":
                self.mark(value, "nvext.cache_control")
            elif name == "agent_hints":
                for hint, given in self._items(value, "nvext.agent_hints"):
                    if hint == "priority" and _is_number(given, int):
                        self._priority = min(max(self._priority, given), MAX_RANK)
                    else:
                        self._ignore(f"nvext.agent_hints.{hint}")
            else:
                self._ignore(f"nvext.{name}")

    def blocks(self, items: Iterable[object]) -> None:
        """The marks on messages, tools or blocks, and on the blocks of their content."""
        for item in items:
            if isinstance(item, Mapping):
                self.mark(item.get("cache_control"), "cache_control")
                content = item.get("content")
                if isinstance(content, list):
                    self.blocks(content)

    def mark(self, mark: object, name: str) -> None:
        """`cache_control`: {"type": "ephemeral", "ttl": "1h"}."""
        if mark is None:
            return
        if not isinstance(mark, Mapping) or mark.get("type", "ephemeral") != "ephemeral":
            self._ignore(name)
        elif mark.get("ttl") is not None:
            self._ttl(mark["ttl"], name)
        elif "type" in mark:
            self._ttl(_EPHEMERAL_S, name)
        else:
            self._ignore(name)

    def _items(self, value: object, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping):
            yield from ((key, item) for key, item in value.items() if item is not None)
        elif value is not None:
            self._ignore(name)

    def _ttl(self, value: Any, name: str) -> None:
        seconds = ttl_seconds(value)
        if _is_number(seconds, int | float) and 0 < seconds <= MAX_TTL_S:
            self._ttl_s = max(self._ttl_s, float(seconds))
        else:
            self._ignore(name)

    def _ignore(self, name: str) -> None:
        if name not in self._ignored:
            self._ignored.append(name)


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
