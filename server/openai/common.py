"""Steps that completions and chat share: read, sort, validate, cut, answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import Request

from radix_mla.cache.retention import Retention
from radix_mla.errors import InvalidRequest
from radix_mla.request import SamplingParams
from server.body import read_object
from server.choice import OutputOptions
from server.lengths import effective_max_tokens
from server.openai.assistant import AssistantPlan
from server.openai.fields import header_value, sort_fields
from server.openai.schemas import ChatRequest, GenerationFields, validate
from server.openai.stream import OPENAI, Dialect, GenerationResponse, Renderer
from server.openai.structured import grammar_of
from server.service import Caller, Job, Service

Fields = TypeVar("Fields", bound=GenerationFields)
Other = TypeVar("Other", bound=GenerationFields)


@dataclass(slots=True)
class Parsed(Generic[Fields]):
    """A validated body, what was ignored in it, and who sent it."""

    fields: Fields
    ignored: list[str]
    caller: Caller
    model: str
    retention: Retention

    def translated(self, fields: Other) -> Parsed[Other]:
        """The same request with its fields in another API's form."""
        return Parsed(fields, self.ignored, self.caller, self.model, self.retention)


def service_of(http: Request) -> Service:
    """The app's service."""
    service: Service = http.app.state.service
    return service


async def parse(http: Request, schema: type[Fields]) -> Parsed[Fields]:
    """Body to fields. Raises InvalidRequest, ModelNotFound, HttpError, Overloaded."""
    service = service_of(http)
    body = await read_object(http, max_bytes=service.settings.max_body_bytes)
    sorted_fields = sort_fields(
        body,
        schema.model_fields,
        strict=service.settings.strict_fields,
        also_ignored=schema.also_ignored,
        also_refused=schema.also_refused,
    )
    fields = validate(schema, sorted_fields.values)
    caller = service.caller(http, fields.session)
    ignored = list(sorted_fields.ignored)
    retention = fields.retention(ignored)
    service.ignored_fields.note(caller.address, ignored)
    model = service.check_model(fields.model)
    service.check_accepting()
    if service.tokenizer is None:
        check_needs_no_text(fields)
    return Parsed(fields, ignored, caller, model, retention)


def check_needs_no_text(fields: GenerationFields) -> None:
    """For a model without a tokenizer. Raises InvalidRequest."""
    if fields.stop:
        raise InvalidRequest(
            "stop needs a tokenizer, which this model lacks; use stop_token_ids.",
            param="stop",
            code="no_tokenizer",
        )
    if grammar_of(fields) is not None:
        raise InvalidRequest(
            "Structured output needs a tokenizer, which this model lacks.", code="no_tokenizer"
        )


def cut_lengths(
    service: Service,
    prompts: Sequence[Sequence[int]],
    requested: int | None,
    *,
    default: int | None,
    param: str,
) -> list[int]:
    """max_tokens of each prompt. Raises ContextOverflow."""
    return [
        effective_max_tokens(
            requested,
            num_prompt_tokens=len(prompt),
            max_model_len=service.model.max_model_len,
            default=default,
            strict=service.settings.strict_max_tokens,
            param=param,
        )
        for prompt in prompts
    ]


def make_job(
    parsed: Parsed[Fields],
    prompts: Sequence[Sequence[int]],
    max_tokens: Sequence[int],
    params: SamplingParams,
    *,
    assistant: AssistantPlan | None = None,
) -> Job:
    """What runs for a parsed body.

    `cache_prompt: false` (llama.cpp) skips the lookup: it runs in a namespace of its own.

    `assistant`: how answers are split into thinking, content and tool calls.
    """
    fields = parsed.fields
    return Job(
        prompts=prompts,
        max_tokens=max_tokens,
        params=params,
        options=OutputOptions(
            stops=tuple(dict.fromkeys(fields.stop)),
            include_stop=fields.include_stop_str_in_output,
            skip_special_tokens=fields.skip_special_tokens,
            min_tokens=fields.min_tokens,
            discard=max(max_tokens) == 0,
            assistant=assistant,
        ),
        n=fields.n,
        cache_salt=fields.cache_salt,
        store=fields.cache_store and fields.cache_prompt,
        priority=fields.priority,
        retention=parsed.retention,
    )


def answer(
    service: Service,
    parsed: Parsed[Fields],
    job: Job,
    renderer: Renderer,
    request_id: str,
    *,
    dialect: Dialect = OPENAI,
) -> GenerationResponse:
    """The response; nothing is submitted before the server runs it."""
    headers = {"x-request-id": request_id, "x-radix-max-tokens": str(min(job.max_tokens))}
    if parsed.ignored:
        headers["x-radix-ignored-fields"] = header_value(parsed.ignored)
    return GenerationResponse(
        lambda: service.start(job, parsed.caller),
        renderer,
        stream=parsed.fields.stream,
        keepalive_s=service.settings.sse_keepalive,
        headers=headers,
        dialect=dialect,
        progress=_progress_chunk(parsed, request_id) if parsed.fields.return_progress else None,
    )


def _progress_chunk(parsed: Parsed[Fields], request_id: str) -> dict[str, Any]:
    """The chunk of a stream that `prompt_progress` is put into."""
    chat = isinstance(parsed.fields, ChatRequest)
    content: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
    return {
        "id": request_id,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": int(time.time()),
        "model": parsed.model,
        "choices": [{"index": 0, **content, "logprobs": None, "finish_reason": None}],
    }


def wants_usage(service: Service, fields: GenerationFields) -> bool:
    """True when a stream ends with its usage."""
    return fields.stream_options.include_usage or service.settings.force_include_usage
