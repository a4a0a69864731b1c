"""Agents' conversations, turn by turn, in the words of each client: bodies in tests/clients/bodies.

A `Conversation` sends what its client would send: history as that client writes it back, headers,
stream. The test adds `return_token_ids` (to count with), a short `max_tokens`, and a tool_choice
that makes even a random model call a tool; none of them is part of the prompt.
"""

from __future__ import annotations

import copy
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BODIES = Path(__file__).resolve().parents[1] / "clients" / "bodies"
CLIENTS = sorted(path.stem for path in BODIES.glob("*.json"))
LOOP_TOOL = "list_files"
_MAX_TOKENS = 40


@dataclass
class Answer:
    """One answer, as far as a client reads it, and what it was made of."""

    prompt_ids: list[int]
    token_ids: list[int]
    cached_tokens: int
    prompt_tokens: int
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)  # id, name, arguments (text)
    raw: Any = None


def load(client: str) -> dict[str, Any]:
    """{path, headers, body} of a client's first request."""
    value: dict[str, Any] = json.loads((BODIES / f"{client}.json").read_text())
    return value


def with_system(body: Any, text: str) -> Any:
    """`body` with its placeholder "SYSTEM" replaced."""
    if isinstance(body, dict):
        return {key: with_system(value, text) for key, value in body.items()}
    if isinstance(body, list):
        return [with_system(item, text) for item in body]
    return text if body == "SYSTEM" else body


def conversation(client: str, system: str, *, splice: bool) -> Conversation:
    """`splice`: answers go back as `token_ids`."""
    request = load(client)
    if request["path"].startswith("/v1/messages"):
        kind: type[Conversation] = _ClaudeCode
    elif request["path"] == "/v1/responses":
        kind = _Codex
    elif client == "cline":
        kind = _Cline
    else:
        kind = _Chat
    body = with_system(request["body"], system)
    return kind(client, request["path"], request["headers"], body, splice=splice)


class Conversation:
    """State of one conversation; `ask` sends the next request, `go_on` adds its answer."""

    def __init__(
        self, client: str, path: str, headers: dict[str, str], body: dict[str, Any], *, splice: bool
    ) -> None:
        self.client = client
        self.path = path
        self.headers = headers
        self.body = body
        self.splice = splice
        self.turn = 0

    def ask(self, url: str) -> Answer:
        """One streamed request. Raises AssertionError with the answer if it is not 200."""
        body = copy.deepcopy(self.body) | {"return_token_ids": True, "seed": self.turn}
        self.prepare(body, force=self.turn % 4 != 3)
        request = urllib.request.Request(
            url + self.path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", **self.headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as reply:
                return self.read(_events(reply.read().decode()))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"turn {self.turn}: {error.code} {error.read()!r}") from None

    def go_on(self, answer: Answer) -> None:
        """The answer and a tool's result, or the user's next words, join the history."""
        self.append(answer, f"result {self.turn}: " + f"{self.turn} lines of text, " * 12)
        self.turn += 1

    def prepare(self, body: dict[str, Any], *, force: bool) -> None:
        raise NotImplementedError

    def read(self, events: Iterator[dict[str, Any]]) -> Answer:
        raise NotImplementedError

    def append(self, answer: Answer, result: str) -> None:
        raise NotImplementedError


class _Chat(Conversation):
    """opencode, Continue, Open WebUI, LiteLLM's proxy."""

    def prepare(self, body: dict[str, Any], *, force: bool) -> None:
        body["max_tokens"] = _MAX_TOKENS
        if "tools" in body:
            named = {"type": "function", "function": {"name": LOOP_TOOL}}
            body["tool_choice"] = named if force else "none"

    def read(self, events: Iterator[dict[str, Any]]) -> Answer:
        answer = Answer([], [], -1, -1)
        for chunk in events:
            if chunk.get("usage"):
                answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
                answer.cached_tokens = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
            answer.prompt_ids += chunk.get("prompt_token_ids") or []
            for choice in chunk["choices"]:
                delta = choice["delta"]
                answer.token_ids += choice.get("token_ids") or []
                answer.text += delta.get("content") or ""
                answer.reasoning += delta.get("reasoning_content") or ""
                for piece in delta.get("tool_calls") or []:
                    if piece.get("id"):
                        name = piece["function"]["name"]
                        answer.calls.append({"id": piece["id"], "name": name, "arguments": ""})
                    answer.calls[-1]["arguments"] += piece["function"].get("arguments") or ""
        return answer

    def append(self, answer: Answer, result: str) -> None:
        messages = self.body["messages"]
        message = self._assistant(answer)
        if self.splice:
            message["token_ids"] = answer.token_ids
        messages.append(message)
        for call in answer.calls:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        if not answer.calls:
            messages.append({"role": "user", "content": "Go on. " + result})

    def _assistant(self, answer: Answer) -> dict[str, Any]:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": self._arguments(call["arguments"])},
            }
            for call in answer.calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if calls:
            message["tool_calls"] = calls
        match self.client:
            case "opencode" if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            case "litellm_proxy":
                message |= {"function_call": None, "provider_specific_fields": {"refusal": None}}
                message["content"] = answer.text or None
            case "open_webui":
                message["id"] = f"m{self.turn}"
        return message

    def _arguments(self, arguments: str) -> str:
        """opencode parses arguments and writes them anew, without blanks."""
        if self.client != "opencode":
            return arguments
        try:
            value = json.loads(arguments)
        except json.JSONDecodeError:
            return arguments
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


class _Cline(_Chat):
    """Tools live in the text; each user message ends with details that change."""

    def append(self, answer: Answer, result: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if self.splice:
            message["token_ids"] = answer.token_ids
        details = f"<environment_details>\n# Turn\n{self.turn}\n</environment_details>"
        parts = [f"[read_file for 'src/app.py'] Result:\n{result}", details]
        content = [{"type": "text", "text": part} for part in parts]
        self.body["messages"] += [message, {"role": "user", "content": content}]


class _ClaudeCode(Conversation):
    """The billing line changes and cache_control moves on with every turn."""

    def prepare(self, body: dict[str, Any], *, force: bool) -> None:
        body["max_tokens"] = _MAX_TOKENS
        line = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={:05x};"
        body["system"][0]["text"] = line.format(self.turn * 7919)
        kind = {"type": "tool", "name": LOOP_TOOL} if force else {"type": "none"}
        body["tool_choice"] = kind
        for message in body["messages"]:
            for block in message["content"]:
                block.pop("cache_control", None)
        body["messages"][-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}

    def read(self, events: Iterator[dict[str, Any]]) -> Answer:
        answer = Answer([], [], -1, -1, raw=[])
        for event in events:
            match event["type"]:
                case "message_start":
                    answer.prompt_ids = event["message"]["prompt_token_ids"]
                case "content_block_start":
                    answer.raw.append(dict(event["content_block"]))
                    self._json = ""
                case "content_block_delta":
                    self._extend(answer.raw[-1], event["delta"])
                case "message_delta":
                    usage = event["usage"]
                    answer.token_ids = event["token_ids"]
                    answer.cached_tokens = usage["cache_read_input_tokens"]
                    answer.prompt_tokens = (
                        usage["input_tokens"]
                        + usage["cache_read_input_tokens"]
                        + usage["cache_creation_input_tokens"]
                    )
        answer.calls = [block for block in answer.raw if block["type"] == "tool_use"]
        return answer

    def _extend(self, block: dict[str, Any], delta: dict[str, Any]) -> None:
        match delta["type"]:
            case "text_delta":
                block["text"] += delta["text"]
            case "thinking_delta":
                block["thinking"] += delta["thinking"]
            case "input_json_delta":
                self._json += delta["partial_json"]
                try:
                    block["input"] = json.loads(self._json)
                except json.JSONDecodeError:
                    block["input"] = {}

    def append(self, answer: Answer, result: str) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": answer.raw}
        if self.splice:
            message["token_ids"] = answer.token_ids
        blocks: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result}
            for call in answer.calls
        ]
        reminder = f"<system-reminder>\nTurn {self.turn}.\n</system-reminder>"
        blocks.append({"type": "text", "text": reminder if answer.calls else "Go on. " + result})
        self.body["messages"] += [message, {"role": "user", "content": blocks}]


class _Codex(Conversation):
    """Everything comes back as the items that it was sent as."""

    def prepare(self, body: dict[str, Any], *, force: bool) -> None:
        body["max_output_tokens"] = _MAX_TOKENS
        body["model"] = "demo"
        body["tool_choice"] = {"type": "function", "name": LOOP_TOOL} if force else "none"

    def read(self, events: Iterator[dict[str, Any]]) -> Answer:
        *_, last = events
        response = last["response"]
        usage = response["usage"]
        return Answer(
            response["prompt_token_ids"],
            response["token_ids"],
            usage["input_tokens_details"]["cached_tokens"],
            usage["input_tokens"],
            calls=[item for item in response["output"] if item["type"] == "function_call"],
            raw=response["output"],
        )

    def append(self, answer: Answer, result: str) -> None:
        items: list[dict[str, Any]] = []
        for item in answer.raw:
            names = ("type", "role", "content", "call_id", "name", "arguments", "summary")
            items.append({name: item[name] for name in names if name in item})
            if item["type"] == "reasoning":
                items[-1] |= {"encrypted_content": item["encrypted_content"], "content": None}
        if not items:
            items = [{"type": "message", "role": "assistant", "content": []}]
        if self.splice:
            items[0]["token_ids"] = answer.token_ids
        for call in answer.calls:
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": result}
            items.append(output)
        if not answer.calls:
            content = [{"type": "input_text", "text": "Go on. " + result}]
            items.append({"type": "message", "role": "user", "content": content})
        self.body["input"] += items


def _events(text: str) -> Iterator[dict[str, Any]]:
    for block in text.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))
