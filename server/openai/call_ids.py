"""Ids of tool calls: unique in an answer and against the conversation before it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

_NUMBERED = re.compile(r"(?P<stem>.*:)(?P<number>\d{1,9})")


class CallIds:
    """The ids of one choice. Models that write ids themselves (Kimi) keep theirs if unused."""

    __slots__ = ("_used",)

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = set(used)

    def take(self, name: str, written: str | None) -> str:
        """`written`, or the next number if it is taken; `call_...` where the model writes none."""
        call_id = f"call_{secrets.token_hex(12)}" if written is None else self._free(name, written)
        self._used.add(call_id)
        return call_id

    def _free(self, name: str, written: str) -> str:
        if written not in self._used and _NUMBERED.fullmatch(written):
            return written
        numbers = [
            int(match["number"])
            for match in map(_NUMBERED.fullmatch, self._used)
            if match is not None
        ]
        # Kimi numbers the calls of a conversation 0, 1, 2, ... whatever their names are.
        return f"functions.{name}:{max(numbers, default=-1) + 1}"


def used_ids(messages: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """The call ids in a conversation."""
    found: set[str] = set()
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                found.add(call["id"])
    return frozenset(found)
