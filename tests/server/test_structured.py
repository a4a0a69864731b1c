"""Structured output at the HTTP edge: each spelling becomes one grammar; faults are 400s."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_app import Harness

from radix_mla.engine.ipc import SequenceOutput
from radix_mla.request import Grammar
from radix_mla.text.tokenizer import Tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AS_GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            AS_GRAMMAR,
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": False},
                }
            },
            AS_GRAMMAR,
        ),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG))),
        ({"structured_outputs": {"json": SCHEMA}}, AS_GRAMMAR),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, AS_GRAMMAR),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b", "a"]}}, Grammar("choice", '["a", "b"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("ebnf", "root ::= x")),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            Grammar("structural_tag", json.dumps(TAG)),
        ),
        ({"guided_json": SCHEMA}, AS_GRAMMAR),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["x"]}, Grammar("choice", '["x"]')),
        ({"guided_grammar": "root ::= x"}, Grammar("ebnf", "root ::= x")),
        ({"guided_regex": None, "response_format": None}, None),
    ],
)
async def test_spellings(harness: Harness, fields: dict[str, Any], grammar: Grammar | None) -> None:
    response = await harness.complete(**fields)
    assert response.status_code == 200, response.text
    assert harness.engine.requests[0].params.grammar == grammar


async def test_the_prompt_is_the_same_with_and_without_a_format(harness: Harness) -> None:
    await harness.chat()
    await harness.chat(response_format={"type": "json_object"})
    first, second = harness.engine.requests
    assert first.prompt == second.prompt
    assert second.params.grammar is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json_object": 3}}, "structured_outputs.json_object"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
async def test_faults_name_the_field(harness: Harness, fields: dict[str, Any], param: str) -> None:
    response = await harness.complete(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not harness.engine.requests


class RefusingEngine(FakeEngine):
    """Ends every choice before admission, as for a grammar that does not compile."""

    async def _play(self, request, stream) -> None:
        for index in range(request.n):
            self.open[request.request_id].discard(index)
            output = SequenceOutput(request.request_id, index, [], finish_reason="error")
            output.error, output.rejected = "This regex cannot be used: it is odd.", True
            stream.push(output)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engines_refusal_is_a_400_in_both_forms(
    tokenizer: Tokenizer, stream: bool
) -> None:
    harness = Harness(RefusingEngine(), tokenizer=tokenizer)
    response = await harness.complete(guided_regex="a(?!b)", n=2, stream=stream)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "This regex cannot be used: it is odd."
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert await harness.metric("radix_mla_requests_running") == 0


async def test_without_a_tokenizer_formats_are_refused() -> None:
    harness = Harness(tokenizer=None)
    response = await harness.post("/v1/completions", {"prompt": [1], "guided_regex": "a"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_tokenizer"
