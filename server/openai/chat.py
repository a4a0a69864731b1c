"""POST /v1/chat/completions: messages through the model's chat template."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radix_mla.errors import InvalidRequest
from radix_mla.text.chat_template import ChatTemplate
from server.choice import Choice, Delta
from server.generation import Generation
from server.lengths import check_zero, requested_max_tokens
from server.openai.common import (
    Head,
    answer,
    cut_lengths,
    make_head,
    make_job,
    parse,
    service_of,
    wants_usage,
)
from server.openai.docs import body_of
from server.openai.logprobs import TokenNames, chat_logprobs
from server.openai.sampling import check_min_tokens, sampling_params
from server.openai.schemas import ChatRequest
from server.openai.stream import DONE, sse

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest))
async def chat_completions(http: Request) -> Response:
    """Answers a conversation."""
    service = service_of(http)
    parsed = await parse(http, ChatRequest)
    fields = parsed.fields
    _check_unsupported(fields)
    template = service.need_template()
    requested = requested_max_tokens(
        fields.max_completion_tokens, fields.max_tokens, fields.n_predict
    )
    check_zero(requested, echo=False)
    check_min_tokens(fields, requested)
    variables = _template_variables(fields, template, parsed.ignored)
    prompt = await service.in_pool(lambda: _encode(template, fields, variables))
    lengths = cut_lengths(service, [prompt], requested, default=None, param="messages")
    params = sampling_params(
        fields,
        service.defaults,
        service.token_ids,
        max_tokens=lengths[0],
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    job = make_job(fields, [prompt], lengths, params)
    kind = "chat.completion.chunk" if fields.stream else "chat.completion"
    head = make_head(parsed, kind, "chatcmpl", int(time.time()))
    names = TokenNames(service.tokenizer, as_ids=fields.return_tokens_as_token_ids)
    renderer = ChatRenderer(head, fields, prompt, names, usage=wants_usage(service, fields))
    return answer(service, parsed, job, renderer, head.id)


def _check_unsupported(fields: ChatRequest) -> None:
    def refuse(param: str, why: str) -> InvalidRequest:
        return InvalidRequest(why, param=param, code="unsupported_parameter")

    if fields.top_logprobs is not None and not fields.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs: true.")
    if fields.modalities and set(fields.modalities) != {"text"}:
        raise refuse("modalities", "This model has text only.")
    if fields.tools and fields.tool_choice != "none":
        raise refuse(
            "tools", "This version does not make tool calls; send tool_choice: none, or no tools."
        )
    if fields.tool_choice not in (None, "none", "auto"):
        raise refuse("tool_choice", "This version does not make tool calls.")


def _template_variables(
    fields: ChatRequest, template: ChatTemplate, ignored: list[str]
) -> dict[str, Any]:
    """Thinking switches and chat_template_kwargs that the template reads; the rest is ignored."""
    effort = fields.reasoning_effort or (fields.reasoning or {}).get("effort")
    given: Mapping[str, Any] = {
        "reasoning_effort": effort,
        "thinking": fields.thinking,
        "enable_thinking": fields.enable_thinking,
    }
    variables = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in template.variables:
            variables[name] = value
        else:
            ignored.append(name)
    for name, value in fields.chat_template_kwargs.items():
        if name in template.variables:
            variables[name] = value
        else:
            ignored.append(f"chat_template_kwargs.{name}")
    return variables


def _encode(template: ChatTemplate, fields: ChatRequest, variables: Mapping[str, Any]) -> list[int]:
    text = template.render(
        fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt and not fields.continue_final_message,
        continue_final_message=fields.continue_final_message,
        variables=variables,
    )
    return template.encode(text)


class ChatRenderer:
    """`chat.completion` objects and their chunks."""

    def __init__(
        self,
        head: Head,
        fields: ChatRequest,
        prompt: list[int],
        names: TokenNames,
        *,
        usage: bool,
    ) -> None:
        self._head = head.as_dict()
        self._fields = fields
        self._prompt = prompt
        self._names = names
        self._usage = usage
        self._begun: set[int] = set()
        self._kept: dict[int, list[Delta]] = {}

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        return b"".join(sse(chunk) for delta in deltas for chunk in self._chunks(delta, generation))

    def end(self, generation: Generation) -> bytes:
        if not self._usage:
            return DONE
        return sse({**self._head, "choices": [], "usage": generation.usage.as_dict()}) + DONE

    def collect(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._kept.setdefault(delta.choice, []).append(delta)

    def body(self, generation: Generation) -> dict[str, Any]:
        body = {
            **self._head,
            "choices": [self._whole(choice) for choice in generation.choices],
            "usage": generation.usage.as_dict(),
        }
        if self._fields.return_token_ids:
            body["prompt_token_ids"] = self._prompt
        return body

    def _whole(self, choice: Choice) -> dict[str, Any]:
        parts = self._kept.get(choice.index, [])
        message = {
            "role": "assistant",
            "content": "".join(part.text for part in parts),
            "refusal": None,
        }
        whole: dict[str, Any] = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(parts),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._fields.return_token_ids:
            whole["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
        return whole

    def _chunks(self, delta: Delta, generation: Generation) -> list[dict[str, Any]]:
        """First the role, then content, at the end the reason with an empty delta."""
        chunks: list[dict[str, Any]] = []
        first = delta.choice not in self._begun
        if first:
            self._begun.add(delta.choice)
            chunk = self._chunk(delta.choice, {"role": "assistant", "content": ""}, generation)
            if self._fields.return_token_ids and not chunks:
                chunk["prompt_token_ids"] = self._prompt
            chunks.append(chunk)
        if delta.text or self._fields.logprobs or self._fields.return_token_ids:
            chunk = self._chunk(delta.choice, {"content": delta.text}, generation)
            chunk["choices"][0]["logprobs"] = self._logprobs([delta])
            if self._fields.return_token_ids:
                chunk["choices"][0]["token_ids"] = delta.token_ids
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunk = self._chunk(delta.choice, {}, generation)
            chunk["choices"][0]["finish_reason"] = delta.finish_reason
            chunk["choices"][0]["stop_reason"] = generation.choices[delta.choice].stop_reason
            chunks.append(chunk)
        return chunks

    def _chunk(self, index: int, delta: dict[str, Any], generation: Generation) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._head, "choices": [choice]}
        if self._fields.stream_options.continuous_usage_stats:
            chunk["usage"] = generation.usage.as_dict()
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, parts: list[Delta]) -> dict[str, Any] | None:
        if not self._fields.logprobs:
            return None
        return chat_logprobs((entry for part in parts for entry in part.entries), self._names)
