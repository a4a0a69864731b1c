"""/openapi.json: what FastAPI cannot see, because routes read bodies and write answers themselves.

`describe` says it for one route; `DocumentedApp` puts the document together.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from pydantic import BaseModel

from server.answers import ErrorAnswer
from server.auth import OPEN_PATHS

_OF_A_BODY = (400, 408, 413, 415)
OF_A_GENERATION = (404, 429, 503)
_EVENT = {
    "type": "object",
    "description": "With `stream: true`; `data` is JSON, or [DONE] at the end.",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
# Pydantic leaves its own names of limits beside a validator that runs before.
_LIMITS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
}
_HEADERS = {
    "x-request-id": "Id of the answer.",
    "x-radix-cached-tokens": "Prompt tokens whose rows were there already.",
    "x-radix-max-tokens": "The output limit that was applied.",
    "x-radix-ignored-fields": "Fields of the body without effect.",
}


def describe(
    answer: type[BaseModel] | None,
    *,
    body: type[BaseModel] | None = None,
    stream: bool = False,
    errors: Sequence[int] = (),
    error: type[BaseModel] = ErrorAnswer,
    text: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a route.

    answer: the JSON of status 200; None: `text`, a media type. stream: it may be events as well.
    errors: statuses beside those that every route has (401, 431, 500), and a body (400 ...).
    error: their shape.
    """
    success: dict[str, Any] = {"description": "OK"}
    if answer is not None:
        success["model"] = answer
    if text is not None:
        success["content"] = {text: {"schema": {"type": "string"}}}
    if stream:
        success["content"] = {"text/event-stream": {"itemSchema": _EVENT}}
        success["headers"] = {
            name: {"description": said, "schema": {"type": "string"}}
            for name, said in _HEADERS.items()
        }
    statuses = {401, 431, 500, *errors, *(_OF_A_BODY if body is not None else ())}
    responses: dict[int | str, dict[str, Any]] = {200: success}
    for status in sorted(statuses):
        # 431 comes from below the routes, in one shape for all of them.
        model = ErrorAnswer if status == 431 else error
        responses[status] = {"model": model, "description": HTTPStatus(status).phrase}
    described: dict[str, Any] = {"response_model": None, "responses": responses}
    if answer is None:
        described["response_class"] = Response  # of no type, or FastAPI adds JSON
    if body is not None:
        described["openapi_extra"] = _body_of(body)
    return described


def _body_of(schema: type[BaseModel]) -> dict[str, Any]:
    whole = schema.model_json_schema()
    content = {"application/json": {"schema": _inline(whole, whole.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """References replaced by what they name (our schemas do not nest in themselves).

    A property that may be absent may be null as well: the two are the same here.
    """
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    inlined = {_LIMITS.get(key, key): _inline(item, definitions) for key, item in node.items()}
    if isinstance(node.get("properties"), dict):
        inlined["properties"] = {
            name: item if name in node.get("required", ()) else _or_null(item)
            for name, item in inlined["properties"].items()
        }
    return inlined


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    options = schema.get("anyOf", [schema])
    if {"type": "null"} in options or not schema.keys() - {"title", "default", "description"}:
        return schema
    return {"anyOf": [*options, {"type": "null"}]}


class DocumentedApp(FastAPI):
    """`with_keys`: the server takes API keys."""

    with_keys = False

    def openapi(self) -> dict[str, Any]:
        """The document, made once, without the 422s that no route answers."""
        if self.openapi_schema is None:
            document = super().openapi()
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    if path in OPEN_PATHS:
                        del operation["responses"]["401"]
                    elif self.with_keys:
                        operation["security"] = [{"bearer": []}, {"x-api-key": []}]
            schemas = document["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            if self.with_keys:
                document["components"]["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
            self.openapi_schema = document
        return self.openapi_schema
