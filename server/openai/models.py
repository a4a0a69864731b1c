"""GET /v1/models, GET /v1/models/{id}, POST /tokenize, POST /detokenize."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from radix_mla.errors import InvalidRequest
from server.answers import ModelCard, ModelList, Text, Tokens
from server.body import read_object
from server.docs import describe
from server.openai.common import service_of
from server.openai.schemas import DetokenizeRequest, TokenizeRequest, validate
from server.openai.tool_calls import read_tools
from server.rendering import Conversation
from server.service import Service

router = APIRouter()


@router.get("/v1/models", **describe(ModelList))
async def list_models(http: Request) -> dict[str, Any]:
    """The served names."""
    service = service_of(http)
    return {"object": "list", "data": [_card(service, name) for name in service.model.names]}


@router.get("/v1/models/{name:path}", **describe(ModelCard, errors=(404,)))
async def get_model(http: Request, name: str) -> dict[str, Any]:
    """One of them, or 404."""
    service = service_of(http)
    return _card(service, service.check_model(name))


@router.post("/tokenize", **describe(Tokens, body=TokenizeRequest, errors=(404,)))
async def tokenize(http: Request) -> dict[str, Any]:
    """Token ids of a text, or of messages rendered as chat would render them."""
    service = service_of(http)
    fields = validate(TokenizeRequest, await _values(http, service))
    service.check_model(fields.model)
    tokenizer = service.need_tokenizer()
    ids = await service.in_pool(lambda: _tokenize(service, fields))
    strings = [tokenizer.id_to_token(token_id) for token_id in ids]
    return {
        "count": len(ids),
        "max_model_len": service.model.max_model_len,
        "tokens": ids,
        "token_strs": strings if fields.return_token_strs else None,
    }


@router.post("/detokenize", **describe(Text, body=DetokenizeRequest, errors=(404,)))
async def detokenize(http: Request) -> dict[str, Any]:
    """Text of token ids."""
    service = service_of(http)
    fields = validate(DetokenizeRequest, await _values(http, service))
    service.check_model(fields.model)
    tokenizer = service.need_tokenizer()
    ids = service.token_ids.check(fields.tokens, "tokens")
    text = await service.in_pool(lambda: tokenizer.decode(ids, fields.skip_special_tokens))
    return {"prompt": text}


async def _values(http: Request, service: Service) -> dict[str, Any]:
    body = await read_object(http, max_bytes=service.settings.max_body_bytes)
    return {name: value for name, value in body.items() if value is not None}


def _tokenize(service: Service, fields: TokenizeRequest) -> list[int]:
    if fields.messages is not None:
        return service.need_renderer().encode(
            Conversation(
                messages=fields.messages,
                tools=read_tools(fields.tools, None, parallel=True, ignored=[]).shown,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
                variables=fields.chat_template_kwargs,
            )
        )
    if fields.prompt is None:
        raise InvalidRequest("Send prompt or messages.", param="prompt", code="invalid_prompt")
    tokenizer = service.need_tokenizer()
    if fields.add_special_tokens:
        return tokenizer.encode_prompt(fields.prompt)
    return tokenizer.encode(fields.prompt, add_special_tokens=False)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.model.created,
        "owned_by": "radix-mla",
        "root": service.model.path,
        "parent": None,
        "max_model_len": service.model.max_model_len,
    }
