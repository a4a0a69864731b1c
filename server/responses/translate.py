"""The responses API's input items to OpenAI's chat form, in place.

instructions                      system message at the head
message                           message of its role
reasoning, message, *_call ...    one assistant message, until something else comes
*_call_output                     tool message
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from radix_mla.errors import InvalidRequest
from server.openai.schemas import ChatRequest, GenerationFields, validate
from server.responses.schemas import ResponsesRequest

_SHARED = frozenset(GenerationFields.model_fields) - {"response_format", "max_tokens"}
_SEALED = "radix-mla:"  # what this server returns as encrypted_content starts so
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def chat_request(fields: ResponsesRequest, ignored: list[str]) -> ChatRequest:
    """The request in chat form. Raises InvalidRequest that names the item.

    Tools and items that only OpenAI's own servers know are added to `ignored`.
    """
    tools = _tools(fields.tools, ignored)
    chat: dict[str, Any] = {
        **fields.model_dump(include=set(_SHARED), exclude_unset=True),
        "messages": _Messages(ignored).read(fields),
        "max_completion_tokens": fields.max_output_tokens,
        "max_tokens": fields.max_tokens,
        "tools": tools,
        "tool_choice": _tool_choice(fields.tool_choice, ignored) if tools else None,
        "parallel_tool_calls": fields.parallel_tool_calls,
        "reasoning_effort": fields.reasoning.effort,
        "response_format": _response_format(fields.text.format) or fields.response_format,
        "chat_template_kwargs": fields.chat_template_kwargs,
    }
    if fields.wants_logprobs or fields.top_logprobs is not None:
        chat |= {"logprobs": True, "top_logprobs": fields.top_logprobs or 0}
    return validate(ChatRequest, {key: value for key, value in chat.items() if value is not None})


def seal(reasoning: str) -> str:
    """`encrypted_content` of a reasoning item: its text in a form that clients pass back."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


class _Messages:
    """Collects messages; assistant items in a row become one message."""

    def __init__(self, ignored: list[str]) -> None:
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None
        self._ignored = ignored

    def read(self, fields: ResponsesRequest) -> list[dict[str, Any]]:
        if fields.instructions:
            self._messages.append({"role": "system", "content": fields.instructions})
        if isinstance(fields.input, str):
            self._messages.append({"role": "user", "content": fields.input})
            return self._messages
        for index, item in enumerate(fields.input):
            self._add(item, index)
        if not self._messages:
            raise InvalidRequest("input is empty.", param="input", code="invalid_value")
        return self._messages

    def _add(self, item: Mapping[str, Any], index: int) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._add_message(item, index)
        elif kind == "reasoning":
            turn = self._assistant(item)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + _reasoning(item)
        elif kind in _CALLS:
            self._assistant(item).setdefault("tool_calls", []).append(_call(item))
        elif kind in _OUTPUTS:
            self._turn = None
            output = _text(item.get("output"), f"input[{index}].output")
            self._messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            )
        elif kind == "item_reference":
            raise InvalidRequest(
                f"input[{index}] refers to a stored item; this server stores none.",
                param=f"input[{index}]",
                code="unsupported_parameter",
            )
        else:
            self._ignored.append(f"input[{index}].type")

    def _add_message(self, item: Mapping[str, Any], index: int) -> None:
        content = _text(item.get("content"), f"input[{index}].content")
        if item.get("role") != "assistant":
            self._turn = None
            self._messages.append({"role": item.get("role"), "content": content})
            return
        turn = self._assistant(item)
        turn["content"] = turn["content"] + content

    def _assistant(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """The assistant message that `item` belongs to."""
        if self._turn is None:
            self._turn = {"role": "assistant", "content": ""}
            self._messages.append(self._turn)
        if item.get("token_ids") is not None:
            self._turn["token_ids"] = item["token_ids"]
        return self._turn


def _text(content: object, param: str) -> str:
    """Content as one string, parts joined without separator."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        given: Mapping[str, Any] = part if isinstance(part, Mapping) else {}
        kind = given.get("type", type(part).__name__)
        text = given.get("refusal" if kind == "refusal" else "text")
        if kind not in ("input_text", "output_text", "text", "refusal") or not isinstance(
            text, str
        ):
            raise InvalidRequest(
                f"{param} has a part of type {kind!r}; this model takes text parts only",
                param=param,
                code="unsupported_content",
            )
        texts.append(text)
    return "".join(texts)


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: its content, or what `seal` made of it."""
    content = item.get("content")
    if isinstance(content, list) and content:
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str) and sealed.startswith(_SEALED):
        try:
            return base64.b64decode(sealed.removeprefix(_SEALED), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _call(item: Mapping[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input")}, ensure_ascii=False)
    function = {"name": item.get("name"), "arguments": arguments}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _tools(tools: list[dict[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            ignored.append(f"tools[{index}]")
            continue
        nested = tool.get("function")  # chat's form, which some clients send here too
        given: Mapping[str, Any] = nested if isinstance(nested, dict) else tool
        names = ("name", "description", "parameters", "strict")
        function = {name: given[name] for name in names if given.get(name) is not None}
        functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(
    choice: str | dict[str, Any] | None, ignored: list[str]
) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        allowed = [
            {"type": "function", "function": {"name": tool.get("name")}}
            for tool in choice.get("tools") or []
            if isinstance(tool, dict) and tool.get("type") == "function"
        ]
        mode = choice.get("mode", "auto")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": allowed}}
    ignored.append("tool_choice")
    return None


def _response_format(text_format: Mapping[str, Any]) -> dict[str, Any] | None:
    """`text.format` in chat's shape; None for plain text."""
    kind = text_format.get("type")
    if kind == "text":
        return None
    if kind == "json_schema":
        schema = {key: value for key, value in text_format.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return {"type": kind}
