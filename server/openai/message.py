"""An assistant's message in OpenAI's chat form, whole and in deltas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from server.openai.assistant_events import (
    AssistantEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)

ReasoningField = Literal["reasoning_content", "reasoning", "both"]


class MessageShape:
    """`reasoning_field`: the name, or both names, that thinking text goes under."""

    def __init__(self, reasoning_field: ReasoningField) -> None:
        both = ("reasoning_content", "reasoning")
        self._reasoning = both if reasoning_field == "both" else (reasoning_field,)

    def delta(self, event: AssistantEvent) -> dict[str, Any]:
        """One event as the `delta` of a chunk."""
        match event:
            case TextDelta(text):
                return {"content": text}
            case ReasoningDelta(text):
                return dict.fromkeys(self._reasoning, text)
            case ToolCallStart(index, call_id, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                return {"tool_calls": [call]}
            case ToolCallArguments(index, text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}

    def whole(self, events: Iterable[AssistantEvent]) -> dict[str, Any]:
        """The message; `content` is null beside tool calls without text."""
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for event in events:
            match event:
                case TextDelta(text):
                    content += text
                case ReasoningDelta(text):
                    reasoning += text
                case ToolCallStart(_, call_id, name):
                    function = {"name": name, "arguments": ""}
                    calls.append({"id": call_id, "type": "function", "function": function})
                case ToolCallArguments(index, text):
                    calls[index]["function"]["arguments"] += text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        if reasoning:
            message |= dict.fromkeys(self._reasoning, reasoning)
        if calls:
            message["tool_calls"] = calls
        return message
