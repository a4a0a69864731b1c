"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API over the same engine."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radix_mla.errors import InvalidRequest
from server.answers import AnthropicError
from server.anthropic.answers import Message, TokenCount
from server.anthropic.schemas import MessagesRequest
from server.anthropic.stream import MessageRenderer
from server.anthropic.translate import chat_request
from server.docs import OF_A_GENERATION, describe
from server.openai.chat_plan import conversation_of, plan_chat
from server.openai.common import Parsed, answer, parse, service_of
from server.openai.schemas import ChatRequest
from server.service import Service

router = APIRouter()


@router.post(
    "/v1/messages",
    **describe(
        Message,
        body=MessagesRequest,
        stream=True,
        errors=OF_A_GENERATION,
        error=AnthropicError,
    ),
)
async def messages(http: Request) -> Response:
    """Answers a conversation."""
    service = service_of(http)
    parsed = await _parse(http, service)
    plan = await plan_chat(service, parsed)
    fields = parsed.fields
    message_id = f"msg_{fields.request_id or secrets.token_hex(12)}"
    renderer = MessageRenderer(
        message_id, parsed.model, plan.prompt, return_token_ids=fields.return_token_ids
    )
    return answer(service, parsed, plan.job, renderer, message_id, dialect=renderer.dialect)


@router.post(
    "/v1/messages/count_tokens",
    **describe(TokenCount, body=MessagesRequest, errors=(404, 503), error=AnthropicError),
)
async def count_tokens(http: Request) -> dict[str, int]:
    """Tokens of the prompt that the same body would have; nothing runs."""
    service = service_of(http)
    parsed = await _parse(http, service)
    renderer = service.need_renderer()
    conversation = conversation_of(parsed.fields, renderer.template, parsed.ignored)
    prompt = await service.in_pool(lambda: renderer.encode(conversation))
    return {"input_tokens": len(prompt)}


async def _parse(http: Request, service: Service) -> Parsed[ChatRequest]:
    parsed = await parse(http, MessagesRequest)
    if parsed.fields.n != 1:
        raise InvalidRequest("n must be 1 on this path.", param="n", code="invalid_value")
    chat = chat_request(
        parsed.fields, parsed.ignored, normalise=service.settings.prompt_normalise == "auto"
    )
    return parsed.translated(chat)
