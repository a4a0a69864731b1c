"""Request bodies: bounded bytes, then JSON with bounded depth and clean text.

Never on trust: size (413), silence (408), media type (415), encoding, nesting and control
characters (400) are all checked before any field is looked at.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from radix_mla.errors import InvalidRequest
from server.errors import HttpError

MAX_DEPTH = 64
_BODY_SILENCE_S = 30.0
_PARSE_ON_LOOP_BYTES = 262_144  # about a millisecond
_SAID_BY_MODEL = ("function_call", "reasoning")  # items of /v1/responses without a role


async def read_object(request: Request, *, max_bytes: int) -> dict[str, Any]:
    """The body as a JSON object.

    Raises HttpError (408, 413, 415) and InvalidRequest.
    """
    _check_media_type(request.headers.get("content-type"))
    body = await read_bytes(request, max_bytes=max_bytes)
    if len(body) > _PARSE_ON_LOOP_BYTES:
        return await asyncio.to_thread(parse_object, body)
    return parse_object(body)


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """The whole body. Raises HttpError 413 as soon as it is over `max_bytes`, 408 on silence."""
    announced = request.headers.get("content-length")
    if announced is not None and announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(_BODY_SILENCE_S):
                piece = await anext(stream, None)
        except (TimeoutError, ClientDisconnect):  # who is gone will not read this
            raise HttpError(408, "The request body did not arrive.", code="timeout") from None
        if piece is None:
            return bytes(body)
        body += piece
        if len(body) > max_bytes:
            raise _too_large(max_bytes)


def parse_object(body: bytes) -> dict[str, Any]:
    """JSON (UTF-8, no BOM, no NaN, no lone surrogates, no NUL) to a dict.

    Raises InvalidRequest, code "invalid_json".
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            f"The body is not valid JSON in UTF-8: {error}", code="invalid_json"
        ) from None
    check_nesting_and_nul(body, value)
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    return value


def check_nesting_and_nul(text: bytes, value: object) -> None:
    """Checks what `text` was decoded to. Raises InvalidRequest."""
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and _depth_exceeds(value, MAX_DEPTH):
        raise _too_deep()
    if b"\\u0000" in text and _has_nul(value):
        raise InvalidRequest("The body has text with a NUL character.", code="invalid_json")


def _check_media_type(content_type: str | None) -> None:
    if content_type is None:
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "application/json" or media_type.endswith("+json"):
        return
    raise HttpError(
        415,
        f"Content-Type is {media_type!r}; send application/json.",
        code="unsupported_media_type",
    )


def _too_large(max_bytes: int) -> HttpError:
    return HttpError(
        413,
        f"The request body is larger than {max_bytes} bytes (--max-body-bytes).",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _too_deep() -> InvalidRequest:
    return InvalidRequest(
        f"The body is nested deeper than {MAX_DEPTH} levels.", code="nesting_too_deep"
    )


def _depth_exceeds(value: object, limit: int) -> bool:
    """Level by level, without recursion."""
    level: list[object] = [value]
    for _ in range(limit):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else _items(parent))
            if type(child) in (dict, list)
        ]
        if not level:
            return False
    return True


def _items(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _has_nul(value: object) -> bool:
    """Exact check; the caller saw the escape somewhere (it may be an escaped backslash).

    What a model has said is not looked at: it may say NUL, and comes back with the next turn.
    """
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "\x00" in item:
                return True
        elif isinstance(item, dict):
            if item.get("role") == "assistant" or item.get("type") in _SAID_BY_MODEL:
                continue
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False
