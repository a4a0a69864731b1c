"""POST /v1/responses: OpenAI's responses API over the same engine; the only one Codex speaks."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radix_mla.errors import InvalidRequest
from server.docs import OF_A_GENERATION, describe
from server.openai.chat_plan import plan_chat
from server.openai.common import answer, parse, service_of
from server.openai.logprobs import TokenNames
from server.responses.answers import ResponseAnswer
from server.responses.schemas import ResponsesRequest
from server.responses.stream import ResponseRenderer
from server.responses.translate import chat_request

router = APIRouter()


@router.post(
    "/v1/responses",
    **describe(ResponseAnswer, body=ResponsesRequest, stream=True, errors=OF_A_GENERATION),
)
async def responses(http: Request) -> Response:
    """Answers input items."""
    service = service_of(http)
    parsed = await parse(http, ResponsesRequest)
    fields = parsed.fields
    if fields.n != 1:
        raise InvalidRequest("n must be 1 on this path.", param="n", code="invalid_value")
    chat = parsed.translated(chat_request(fields, parsed.ignored))
    plan = await plan_chat(service, chat)
    response_id = f"resp_{fields.request_id or secrets.token_hex(16)}"
    names = TokenNames(service.tokenizer, as_ids=fields.return_tokens_as_token_ids)
    renderer = ResponseRenderer(response_id, parsed.model, fields, chat.fields, plan.prompt, names)
    return answer(service, chat, plan.job, renderer, response_id, dialect=renderer.dialect)
