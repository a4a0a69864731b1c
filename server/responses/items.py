"""Output items built from what the assistant says; each change is an event of the stream.

    reasoning      content_part.added, reasoning_text.delta ..., reasoning_text.done
    message        content_part.added, output_text.delta ..., output_text.done, content_part.done
    function_call  function_call_arguments.delta ..., function_call_arguments.done
each between output_item.added and output_item.done
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from server.openai.assistant_events import (
    AssistantEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from server.responses.translate import seal

_PREFIX = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_PART = {"reasoning": "reasoning_text", "message": "output_text"}
_NO_LOGPROBS: list[Any] = []


class Items:
    """The output of one response, in order."""

    def __init__(self, *, seal_reasoning: bool) -> None:
        self.output: list[dict[str, Any]] = []
        self._seal = seal_reasoning
        self._is_open = False

    def feed(
        self, event: AssistantEvent, logprobs: list[Any] = _NO_LOGPROBS
    ) -> Iterator[dict[str, Any]]:
        """Events of one change, without sequence numbers. `logprobs`: of the text's tokens."""
        match event:
            case ReasoningDelta(text):
                yield from self._extend("reasoning", text, {})
            case TextDelta(text):
                yield from self._extend("message", text, {"logprobs": logprobs})
            case ToolCallStart(_, call_id, name):
                call = {"call_id": call_id, "name": name, "arguments": ""}
                yield from self._start("function_call", call)
            case ToolCallArguments(_, text):
                self.output[-1]["arguments"] += text
                yield self._event("response.function_call_arguments.delta", delta=text)

    def close(self, status: str = "completed") -> Iterator[dict[str, Any]]:
        """Ends the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield self._event("response.function_call_arguments.done", arguments=arguments)
        else:
            yield from self._close_part(item)
        yield self._item_event("response.output_item.done")

    def _close_part(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        (part,) = item["content"]
        kind = _PART[item["type"]]
        extra = {"logprobs": part["logprobs"]} if kind == "output_text" else {}
        if item["type"] == "reasoning" and self._seal:
            item["encrypted_content"] = seal(part["text"])
        text = part["text"]
        yield self._event(f"response.{kind}.done", content_index=0, text=text, **extra)
        yield self._event("response.content_part.done", content_index=0, part=dict(part))

    def _extend(self, kind: str, text: str, extra: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not text:
            return
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._start(kind, {})
        item = self.output[-1]
        if not item["content"]:
            part: dict[str, Any] = {"type": _PART[kind], "text": ""}
            if kind == "message":
                part |= {"annotations": [], "logprobs": []}
            item["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=dict(part))
        item["content"][0]["text"] += text
        if extra.get("logprobs"):
            item["content"][0]["logprobs"] = [*item["content"][0]["logprobs"], *extra["logprobs"]]
        yield self._event(f"response.{_PART[kind]}.delta", content_index=0, delta=text, **extra)

    def _start(self, kind: str, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self.close()
        item = {
            "id": f"{_PREFIX[kind]}_{secrets.token_hex(12)}",
            "type": kind,
            "status": "in_progress",
            **fields,
        }
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self.output.append(item)
        self._is_open = True
        yield self._item_event("response.output_item.added")

    def _item_event(self, name: str) -> dict[str, Any]:
        item = dict(self.output[-1])
        if "content" in item:
            item["content"] = list(item["content"])
        return {"type": name, "output_index": len(self.output) - 1, "item": item}

    def _event(self, name: str, **fields: Any) -> dict[str, Any]:
        item_id = self.output[-1]["id"]
        index = len(self.output) - 1
        return {"type": name, "item_id": item_id, "output_index": index, **fields}
