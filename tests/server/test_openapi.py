"""/openapi.json: every route says what it takes and answers, errors included."""

from __future__ import annotations

from typing import Any

import pytest
from support.demo_app import demo_app, says

from server.errors import GENERATION_PATHS


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = demo_app(says("a"), api_key=["k"]).app.openapi()
    return found


def test_every_answer_has_a_shape(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert {"200", "431", "500"} <= operation["responses"].keys(), path
            for response in operation["responses"].values():
                for content in response["content"].values():
                    assert content.get("schema") or content.get("itemSchema"), path


HINTS = {"cache_control", "prompt_cache_retention", "prompt_cache_options", "nvext"}


@pytest.mark.parametrize("path", sorted(GENERATION_PATHS))
def test_generations(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "408", "413", "415", "429", "431", "500", "503"} < set(responses)
    shape = "AnthropicError" if path == "/v1/messages" else "ErrorAnswer"
    error = responses["400"]["content"]["application/json"]["schema"]
    assert error == {"$ref": f"#/components/schemas/{shape}"}


def test_what_may_be_absent_may_be_null(document: dict[str, Any]) -> None:
    operation = document["paths"]["/v1/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    for name, item in schema["properties"].items():
        if name in HINTS:
            assert not {"type", "anyOf"} & item.keys(), "any form is taken"
            continue
        assert ({"type": "null"} in item["anyOf"]) is (name != "prompt"), name
    n = schema["properties"]["n"]["anyOf"][0]
    assert (n["minimum"], n["maximum"]) == (1, 16)


def test_keys_are_asked_for_only_where_there_are_keys(document: dict[str, Any]) -> None:
    assert document["paths"]["/v1/models"]["get"]["security"]
    assert "security" not in document["paths"]["/health"]["get"]
    without = demo_app(says("a")).app.openapi()
    assert "securitySchemes" not in without["components"]
