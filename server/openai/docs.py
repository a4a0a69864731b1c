"""Request bodies for /openapi.json: the routes read bodies themselves, so FastAPI cannot know."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


def body_of(schema: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON body is `schema`."""
    whole = schema.model_json_schema()
    definitions = whole.pop("$defs", {})
    content = {"application/json": {"schema": _inline(whole, definitions)}}
    return {"requestBody": {"required": True, "content": content}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """References replaced by what they name (our schemas do not nest in themselves)."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(item, definitions) for key, item in node.items()}
