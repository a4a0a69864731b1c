"""One choice's text, split into what an assistant message is made of, while it is generated.

    Choice ─ text of each token ─► AssistantParser ─ events ─► chat, responses, messages render them

    text:  <think> reasoning </think>  content  <calls> name, arguments, ... </calls>  content
    event:         ReasoningDelta      TextDelta        ToolCallStart, ToolCallArguments   TextDelta

Markers may be cut anywhere; what could still become one is held back. What looks like a tool call
and turns out not to be one comes out as text, every character of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from server.openai.assistant_events import (
    AssistantEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
    merge_events,
)
from server.openai.markers import first_of, held
from server.openai.reasoning import ReasoningFormat


class Read(NamedTuple):
    """What a reader made of a buffer: events, characters used, and whether it is done."""

    events: Sequence[AssistantEvent]
    used: int
    done: bool = False


class CallReader(Protocol):
    """Reads tool calls of one format from the text that begins at one of `triggers`."""

    num_calls: int

    @property
    def triggers(self) -> tuple[str, ...]:
        """The strings that a call may begin with."""

    @property
    def ends_reasoning(self) -> bool:
        """True when a trigger inside reasoning ends it (the model forgot the end tag)."""

    @property
    def trims_text(self) -> bool:
        """True when white space between text and calls belongs to the format."""

    def read(self, buffer: str, *, final: bool) -> Read:
        """One step; nothing used and no event: it needs more text. `final`: nothing follows.

        After `done` the rest is text, until the next trigger. At most one call begins in a step.
        """


class AssistantParser:
    """The events of one choice. `push` text, then `finish` once."""

    __slots__ = (
        "_buffer",
        "_calls",
        "_limit",
        "_reasoning",
        "_state",
        "_trim",
        "_trimmed",
        "full",
        "num_reasoning_tokens",
    )

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallReader | None,
        *,
        reasoning_open: bool = False,
        max_calls: int | None = None,
    ) -> None:
        """`reasoning_open`: the prompt ends in reasoning.

        After `max_calls` calls the next one is `full`: the choice ends before it.
        """
        self._reasoning = reasoning
        self._calls = calls
        self._limit = max_calls
        self._buffer = ""
        self._trim = False  # newlines at the front of the buffer belong to the tag before them
        self._trimmed = ""  # white space in front of what may be a call
        self.num_reasoning_tokens = 0
        self.full = False
        self._state: Callable[[bool], list[AssistantEvent] | None] = self._text
        if reasoning is not None:
            self._state = self._in_reasoning if reasoning_open else self._before
            self._trim = reasoning_open

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.num_calls > 0

    def count(self, num_tokens: int) -> None:
        """Counts generated tokens as reasoning while reasoning is open; call before `push`."""
        if self._reasoning is not None and self._state == self._in_reasoning:
            self.num_reasoning_tokens += num_tokens

    def push(self, text: str) -> list[AssistantEvent]:
        """The events that this text makes certain."""
        if not text:
            return []
        self._buffer += text
        return self._run(final=False)

    def finish(self) -> list[AssistantEvent]:
        """What is held when the text ends."""
        return self._run(final=True)

    def finish_reason(self, reason: str | None) -> str | None:
        """`stop` after tool calls is `tool_calls`; `length` stays `length`."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def _run(self, *, final: bool) -> list[AssistantEvent]:
        events: list[AssistantEvent] = []
        while not self.full:
            made = self._state(final)
            if made is None:
                break
            for event in made:
                if isinstance(event, ToolCallStart) and event.index == self._limit:
                    self.full = True
                    break
                events.append(event)
        return merge_events(events)

    # A state consumes from the buffer and returns its events; None: it needs more text.

    def _before(self, final: bool) -> list[AssistantEvent] | None:
        """Nothing but white space so far: a start tag opens reasoning."""
        assert self._reasoning is not None
        stripped = self._buffer.lstrip()
        start = self._reasoning.start
        if stripped.startswith(start):
            self._take(len(self._buffer) - len(stripped) + len(start))
            self._state, self._trim = self._in_reasoning, True
            return []
        if not final and start.startswith(stripped):
            return None
        self._state = self._text
        return []

    def _in_reasoning(self, final: bool) -> list[AssistantEvent] | None:
        assert self._reasoning is not None
        self._trim_front()
        triggers: tuple[str, ...] = ()
        if self._calls is not None and self._calls.ends_reasoning:
            triggers = self._calls.triggers
        end = self._reasoning.end
        at, marker = first_of(self._buffer, (end, *triggers))
        if marker is None:
            keep = 0 if final else held(self._buffer, (end, *triggers), newlines=True)
            text = self._take(len(self._buffer) - keep)
            return [ReasoningDelta(text)] if text else None
        text = self._take(at).rstrip("\n")
        if marker == end:
            self._take(len(end))
            self._state, self._trim = self._text, True
        else:
            self._state = self._in_calls
        return [ReasoningDelta(text)] if text else []

    def _text(self, final: bool) -> list[AssistantEvent] | None:
        self._trim_front()
        if self._calls is None:
            text = self._take(len(self._buffer))
            return [TextDelta(text)] if text else None
        trims = self._calls.trims_text
        at, marker = first_of(self._buffer, self._calls.triggers)
        if marker is None:
            if self.has_calls and not self._buffer.strip():
                return None  # nothing behind the calls yet
            keep = 0 if final else held(self._buffer, self._calls.triggers, spaces=trims)
            text = self._take(len(self._buffer) - keep)
            return [TextDelta(text)] if text else None
        text = self._take(at)
        shown = text.rstrip() if trims else text
        self._trimmed = text[len(shown) :]
        self._state = self._in_calls
        return [TextDelta(shown)] if shown else []

    def _in_calls(self, final: bool) -> list[AssistantEvent] | None:
        assert self._calls is not None
        read = self._calls.read(self._buffer, final=final)
        self._take(read.used)
        events = list(read.events)
        if events and self._trimmed:
            if isinstance(events[0], TextDelta):
                events.insert(0, TextDelta(self._trimmed))  # it was no call
            self._trimmed = ""
        if read.done:
            self._state = self._text
            return events
        return events if read.used or events else None

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _trim_front(self) -> None:
        if self._trim and self._buffer:
            self._buffer = self._buffer.lstrip("\n")
            self._trim = not self._buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantPlan:
    """How the choices of one request are parsed; `parser` makes one for each choice.

    keep_ids: marker tokens that stay in the text although the vocabulary calls them special.
    reasoning_possible: the answer may begin with thinking.
    """

    reasoning: ReasoningFormat | None = None
    reasoning_open: bool = False
    reasoning_possible: bool = False
    reader: Callable[[], CallReader] | None = None
    max_calls: int | None = None
    keep_ids: frozenset[int] = frozenset()

    def parser(self) -> AssistantParser:
        return AssistantParser(
            self.reasoning,
            self.reader() if self.reader is not None else None,
            reasoning_open=self.reasoning_open,
            max_calls=self.max_calls,
        )
