"""Messages as Anthropic writes them: content blocks, and their events in a stream.

message_start ─ (block_start ─ block_delta ... ─ block_stop) ... ─ message_delta ─ message_stop
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from server.choice import Choice, Delta
from server.errors import Problem
from server.generation import Generation
from server.openai.assistant_events import (
    AssistantEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.openai.stream import Dialect

_SIGNATURE = "unsigned"  # clients drop thinking blocks whose signature is empty
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def sse(event: Mapping[str, Any]) -> bytes:
    """One event, named as its type."""
    name = str(event["type"]).encode()
    return b"event: " + name + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


PING = sse({"type": "ping"})


def failure(problem: Problem) -> bytes:
    """The event of a stream that fails."""
    return b"event: error\ndata: " + problem.anthropic_body() + b"\n\n"


class Blocks:
    """Builds content blocks from what the assistant says; each change is an event."""

    def __init__(self) -> None:
        self.content: list[dict[str, Any]] = []
        self._arguments = ""
        self._is_open = False

    def feed(self, event: AssistantEvent) -> Iterator[dict[str, Any]]:
        match event:
            case ReasoningDelta(text):
                yield from self._extend("thinking", "thinking", text)
            case TextDelta(text):
                yield from self._extend("text", "text", text)
            case ToolCallStart(_, call_id, name):
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                yield from self._start(block)
            case ToolCallArguments(_, text):
                self._arguments += text
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[dict[str, Any]]:
        """Ends the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.content[-1]
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            yield self._delta({"type": "signature_delta", "signature": _SIGNATURE})
        elif block["type"] == "tool_use":
            block["input"] = _parsed(self._arguments)
            self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _extend(self, kind: str, key: str, text: str) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if not self._is_open or self.content[-1]["type"] != kind:
            empty = {"type": kind, key: ""}
            yield from self._start(empty | ({"signature": ""} if kind == "thinking" else {}))
        self.content[-1][key] += text
        yield self._delta({"type": f"{kind}_delta", key: text})

    def _start(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        self.content.append(block)
        self._is_open = True
        index = len(self.content) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        index = len(self.content) - 1
        return {"type": "content_block_delta", "index": index, "delta": delta}


def _parsed(arguments: str) -> dict[str, Any]:
    """Arguments as an object; what is not JSON (cut by max_tokens) is kept under one key."""
    try:
        value = msgspec.json.decode(arguments.encode()) if arguments else {}
    except msgspec.MsgspecError:
        value = None
    return value if isinstance(value, dict) else {"invalid_json": arguments}


class MessageRenderer:
    """One `message`, whole or as events."""

    def __init__(
        self, message_id: str, model: str, prompt: list[int], *, return_token_ids: bool
    ) -> None:
        self._id = message_id
        self._model = model
        self._prompt = prompt
        self._return_token_ids = return_token_ids
        self._token_ids: list[int] = []
        self._blocks = Blocks()
        self._begun = False

    @property
    def dialect(self) -> Dialect:
        return Dialect(PING, failure, self.opening)

    def opening(self, generation: Generation) -> bytes:
        """`message_start`, once the prompt is admitted: then its cached tokens are known."""
        if self._begun:
            return b""
        self._begun = True
        message = self._message(generation) | {"content": []}
        return sse({"type": "message_start", "message": message})

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        body = self.opening(generation)
        for delta in deltas:
            body += b"".join(map(sse, self._feed(delta)))
            if delta.finish_reason is not None:
                body += sse(self._last_delta(generation))
        return body

    def end(self, generation: Generation) -> bytes:
        return sse({"type": "message_stop"})

    def collect(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            for _ in self._feed(delta):
                pass

    def body(self, generation: Generation) -> dict[str, Any]:
        message = self._message(generation)
        if self._return_token_ids:
            message["token_ids"] = self._token_ids
        return message | self._stop(generation.choices[0])

    def _feed(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self._token_ids += delta.token_ids
        for event in delta.parts:
            yield from self._blocks.feed(event)
        if delta.finish_reason is not None:
            yield from self._blocks.close()

    def _message(self, generation: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_of(generation),
        }
        if self._return_token_ids:
            message["prompt_token_ids"] = self._prompt
        return message

    def _last_delta(self, generation: Generation) -> dict[str, Any]:
        delta = self._stop(generation.choices[0])
        event: dict[str, Any] = {"type": "message_delta", "delta": delta}
        event["usage"] = usage_of(generation)
        if self._return_token_ids:
            event["token_ids"] = self._token_ids
        return event

    @staticmethod
    def _stop(choice: Choice) -> dict[str, Any]:
        """`stop_reason` and, where one of stop_sequences ended the answer, which."""
        reason = _STOP_REASONS.get(choice.finish_reason or "", choice.finish_reason)
        sequence = choice.stop_reason if isinstance(choice.stop_reason, str) else None
        if reason == "end_turn" and sequence is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}


def usage_of(generation: Generation) -> dict[str, Any]:
    """input + cache_read + cache_creation == the prompt's tokens."""
    usage = generation.usage
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "output_tokens": usage.completion_tokens,
    }
