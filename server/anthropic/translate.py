"""Anthropic's messages to OpenAI's chat form, in place: nothing is hoisted, merged or reordered.

system (text, blocks)            one system message at the head
user: text, tool_result          user and tool messages, in the order of the blocks
assistant: thinking, tool_use    reasoning_content, tool_calls
last message is an assistant's   it is continued
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from radix_mla.errors import InvalidRequest
from server.anthropic.schemas import MessagesRequest
from server.normalise import without_billing_line
from server.openai.schemas import ChatRequest, GenerationFields, validate

_SHARED = frozenset(GenerationFields.model_fields)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(fields: MessagesRequest, ignored: list[str], *, normalise: bool) -> ChatRequest:
    """The request in chat form. Raises InvalidRequest that names the message.

    Tools that run at Anthropic (web_search_..., bash_...) are added to `ignored`.
    """
    given = fields.model_dump(include=set(_SHARED), exclude_unset=True)
    chat = {
        **given,
        "messages": _messages(fields, normalise=normalise),
        "stop": [*fields.stop, *fields.stop_sequences],
        "tools": _tools(fields.tools, ignored),
        "chat_template_kwargs": fields.chat_template_kwargs,
    }
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat["continue_final_message"] = True
    choice = fields.tool_choice or {}
    if choice and chat["tools"]:
        chat["tool_choice"] = _tool_choice(choice)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
    if fields.thinking is not None:
        chat["thinking"] = fields.thinking
    return validate(ChatRequest, {key: value for key, value in chat.items() if value is not None})


def _messages(fields: MessagesRequest, *, normalise: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if fields.system:
        blocks = fields.system
        if normalise and isinstance(blocks, list):
            blocks = [block for block in map(_without_billing, blocks) if block.get("text") != ""]
        if blocks:
            messages.append({"role": "system", "content": blocks})
    for index, message in enumerate(fields.messages):
        messages += _message(message, index)
    return messages


def _without_billing(block: dict[str, Any]) -> dict[str, Any]:
    text = block.get("text")
    return {**block, "text": without_billing_line(text)} if isinstance(text, str) else block


def _message(message: Mapping[str, Any], index: int) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role == "assistant":
        return [_assistant(message, index)]
    if role not in ("user", "system"):
        raise InvalidRequest(
            f"messages[{index}].role is {role!r}; supported: user, assistant, system",
            param=f"messages[{index}].role",
            code="invalid_role",
        )
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    messages: list[dict[str, Any]] = []
    for place, block in enumerate(_blocks(content, index)):
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, index, place))
        elif messages and messages[-1]["role"] == role:
            messages[-1]["content"].append(block)
        else:
            messages.append({"role": role, "content": [block]})
    return messages or [{"role": role, "content": ""}]


def _tool_result(block: Mapping[str, Any], index: int, place: int) -> dict[str, Any]:
    result = block.get("content")
    if isinstance(result, list):
        for part in result:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind not in ("text", "tool_reference"):
                raise _unsupported(kind, f"messages[{index}].content[{place}].content")
        result = [part for part in result if part["type"] == "text"]
    return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}


def _assistant(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    content = message.get("content")
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if isinstance(content, list):
        texts, thoughts, calls = [], [], []
        for place, block in enumerate(_blocks(content, index)):
            match block.get("type"):
                case "text":
                    texts.append(block)
                case "thinking":
                    thoughts.append(str(block.get("thinking") or ""))
                case "tool_use":
                    calls.append(_call(block))
                case "redacted_thinking" | "fallback":
                    pass  # nothing in it that this model could read
                case kind:
                    raise _unsupported(kind, f"messages[{index}].content[{place}]")
        turn["content"] = texts
        if thoughts:
            turn["reasoning_content"] = "".join(thoughts)
        if calls:
            turn["tool_calls"] = calls
    if message.get("token_ids") is not None:
        turn["token_ids"] = message["token_ids"]
    return turn


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _blocks(content: Sequence[object], index: int) -> list[Mapping[str, Any]]:
    blocks = []
    for block in content:
        if not isinstance(block, Mapping):
            raise _unsupported(type(block).__name__, f"messages[{index}].content")
        blocks.append(block)
    return blocks


def _tools(tools: Sequence[Mapping[str, Any]], ignored: list[str]) -> list[dict[str, Any]]:
    functions = []
    for index, tool in enumerate(tools):
        if tool.get("type", "custom") != "custom":
            ignored.append(f"tools[{index}]")
            continue
        function = {"name": tool.get("name"), "description": tool.get("description")}
        function["parameters"] = tool.get("input_schema")
        function["strict"] = tool.get("strict")
        known = {key: value for key, value in function.items() if value is not None}
        functions.append({"type": "function", "function": known})
    return functions


def _tool_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if isinstance(kind, str) and kind in _CHOICES:
        return _CHOICES[kind]
    raise InvalidRequest(
        f"tool_choice.type is {kind!r}; supported: any, auto, none, tool",
        param="tool_choice.type",
        code="invalid_value",
    )


def _unsupported(kind: object, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"{param} has a block of type {kind!r}; this model takes text only",
        param=param,
        code="unsupported_content",
    )
