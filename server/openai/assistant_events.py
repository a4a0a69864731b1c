"""What an assistant says, piece by piece: thinking, text, tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Thinking text."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Answer text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Call `index` (0, 1, ... in one choice) begins; its arguments follow piece by piece."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call `index`'s arguments, as it was generated."""

    index: int
    text: str


AssistantEvent = ReasoningDelta | TextDelta | ToolCallStart | ToolCallArguments


def merge_events(events: Sequence[AssistantEvent]) -> list[AssistantEvent]:
    """Neighbours of one kind put together."""
    result: list[AssistantEvent] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, TextDelta) and isinstance(last, TextDelta):
            result[-1] = TextDelta(last.text + event.text)
        elif (
            isinstance(event, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and last.index == event.index
        ):
            result[-1] = ToolCallArguments(last.index, last.text + event.text)
        else:
            result.append(event)
    return result
