"""Markers in text that is still growing: where one is, and what could still become one."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Where the first of the markers begins, and which: the longest of those at that place."""
    best, found = len(text), None
    for marker in markers:
        at = text.find(marker)
        if at != -1 and (at < best or (at == best and len(marker) > len(found or ""))):
            best, found = at, marker
    return best, found


def held(text: str, markers: Sequence[str], *, newlines: bool = False, spaces: bool = False) -> int:
    """Length of the end of `text` that may be the beginning of a marker.

    `newlines` / `spaces`: newlines / any white space before that are held as well.
    """
    longest = 0
    for marker in markers:
        if marker[0] not in text[-len(marker) + 1 :]:
            continue
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    body = text[: len(text) - longest]
    stripped = body.rstrip() if spaces else body.rstrip("\n") if newlines else body
    return len(text) - len(stripped)
