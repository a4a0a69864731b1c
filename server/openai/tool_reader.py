"""Reads calls written as markers around a header and JSON: DeepSeek V3, R1, V3.1, Kimi-K2.

    <calls begin> <call begin> header <header end> arguments <call end> ... <calls end>

A header that cannot be one, or a section without a call, is text: everything since its first
marker. Between two calls of a section anything but white space is text, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from server.openai.assistant import Read
from server.openai.assistant_events import (
    AssistantEvent,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.openai.call_ids import CallIds
from server.openai.markers import first_of, held

_MAX_HEADER_CHARS = 512
_FENCE = re.compile(r"\s*```\s*\Z")
_FENCE_TAIL = re.compile(r"\s*`{0,3}\s*\Z")
_OPEN_FENCE = re.compile(r"\n```\s*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """The strings of one format. `header` has the group `name`, and `id` where ids are written."""

    section_begin: str
    section_end: str
    call_begin: str
    call_end: str
    header_end: str
    header: re.Pattern[str]
    fenced: bool = False  # arguments stand in a ```json block

    @property
    def between(self) -> tuple[str, ...]:
        """What may follow a call."""
        return (self.call_begin, self.section_end)


class MarkedReader:
    """`CallReader` of the formats above; one for each choice."""

    ends_reasoning = True
    trims_text = False

    def __init__(self, markers: Markers, ids: CallIds) -> None:
        self.triggers = (markers.section_begin, markers.call_begin)
        self.num_calls = 0
        self._markers = markers
        self._ids = ids
        self._raw = ""  # consumed, not yet known to be a call
        self._calls_before = 0  # when the section began
        self._has_arguments = False
        self._state: Callable[[str, bool], Read | None] = self._begin

    def read(self, buffer: str, *, final: bool) -> Read:
        state = self._state
        read = state(buffer, final) or Read((), 0)
        if read.done:
            self._state, self._raw = self._begin, ""
        elif not read.used and not read.events and self._state != state:
            return self.read(buffer, final=final)  # a call whose end marker is missing
        return read

    @property
    def _is_first(self) -> bool:
        return self.num_calls == self._calls_before

    def _begin(self, text: str, final: bool) -> Read | None:
        self._calls_before = self.num_calls
        self._state = self._between
        if text.startswith(self._markers.section_begin):
            self._raw = self._markers.section_begin
            return Read((), len(self._raw))
        return self._between(text, final)

    def _between(self, text: str, final: bool) -> Read | None:
        body = text.lstrip()
        start = len(text) - len(body)
        markers = self._markers
        if body.startswith(markers.call_begin):
            used = start + len(markers.call_begin)
            self._raw += text[:used]
            self._state = self._header
            return Read((), used)
        if not self._is_first and body.startswith(markers.section_end):
            return Read((), start + len(markers.section_end), done=True)
        if not final and any(marker.startswith(body) for marker in markers.between):
            return None
        if self._is_first:
            return Read([TextDelta(self._raw)], 0, done=True)
        if not body:
            return Read((), len(text), done=True)
        return self._stray(text, final)

    def _stray(self, text: str, final: bool) -> Read | None:
        """Text between calls, up to the next marker."""
        at, marker = first_of(text, self._markers.between)
        if marker is None and not final:
            at -= held(text, self._markers.between, spaces=True)
        elif marker is not None:
            at = len(text[:at].rstrip())
        return Read([TextDelta(text[:at])], at) if at else None

    def _header(self, text: str, final: bool) -> Read | None:
        markers = self._markers
        at, marker = first_of(
            text,
            (markers.header_end, markers.call_end, markers.section_begin, *markers.between),
        )
        if marker is None and not final and len(text) <= _MAX_HEADER_CHARS:
            return None
        match = markers.header.fullmatch(text[:at]) if marker == markers.header_end else None
        if match is None:
            raw, self._raw = self._raw, ""
            self._state = self._between
            return Read([TextDelta(raw)], 0, done=self._is_first)
        self._raw = ""
        self._has_arguments = False
        self._state = self._arguments
        groups = match.groupdict()
        call_id = self._ids.take(groups["name"], groups.get("id"))
        self.num_calls += 1
        return Read(
            [ToolCallStart(self.num_calls - 1, call_id, groups["name"])],
            at + len(markers.header_end),
        )

    def _arguments(self, text: str, final: bool) -> Read | None:
        markers = self._markers
        skipped = 0
        if markers.fenced and not self._has_arguments:
            skipped = len(text) - len(text.lstrip())
            text = text[skipped:]
        ends = (markers.call_end, *markers.between)
        at, marker = first_of(text, ends)
        if marker is not None:
            return self._close(text[:at], skipped + at, marker)
        if final:
            piece = _OPEN_FENCE.sub("", text) if markers.fenced else text
            return Read(self._piece(piece), skipped + len(text)) if skipped + len(text) else None
        keep = held(text, ends)
        if markers.fenced:
            tail = _FENCE_TAIL.search(text[: len(text) - keep])
            keep += len(tail.group()) if tail else 0
        piece = text[: len(text) - keep]
        return Read(self._piece(piece), skipped + len(piece)) if skipped or piece else None

    def _close(self, text: str, at: int, marker: str) -> Read:
        """The end of a call; a marker that begins what comes next is left for that."""
        piece = _FENCE.sub("", text) if self._markers.fenced else text
        events = self._piece(piece)
        if not self._has_arguments:
            events.append(ToolCallArguments(self.num_calls - 1, "{}"))
        self._state = self._between
        return Read(events, at + len(marker) if marker == self._markers.call_end else at)

    def _piece(self, text: str) -> list[AssistantEvent]:
        self._has_arguments = self._has_arguments or bool(text.strip())
        return [ToolCallArguments(self.num_calls - 1, text)] if text else []
