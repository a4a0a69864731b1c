"""Tool calls over HTTP on FakeEngine: every format, streamed and whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_app import Harness, events
from support.tool_models import (
    DEEPSEEK_V31,
    GLM,
    KIMI_K2,
    MODELS,
    ToolModel,
    assemble,
    harness,
    load,
    says,
)

from radix_mla.text.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
USER = {"role": "user", "content": "hi"}
# Key order, spaces and escapes are the model's: they come back as they are.
ARGUMENTS = '{"days": 3,"city": "Z\\u00fcrich \\"x\\" ☀"}'


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: load(tmp_path_factory.mktemp("model"), model) for name, model in MODELS.items()}


def _arguments(model: ToolModel, arguments: str) -> str:
    """As the model writes them; GLM has no JSON."""
    if model is not GLM:
        return arguments
    return "\n".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value)}</arg_value>"
        for key, value in json.loads(arguments).items()
    )


def _two_calls(model: ToolModel) -> str:
    calls = [("weather", _arguments(model, ARGUMENTS)), ("clock", _arguments(model, "{}"))]
    return "Let me see." + model.calls(calls)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("per_event", [1, 7, 10_000])
async def test_calls_streamed_and_whole(
    tokenizers: dict[str, Tokenizer], name: str, per_event: int
) -> None:
    """Markers are many tokens here, so they are cut everywhere."""
    model, tokenizer = MODELS[name], tokenizers[name]
    engine = says(tokenizer, _two_calls(model), per_event=per_event)
    app = harness(engine, tokenizer)
    body = (await app.chat(tools=TOOLS)).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    first, second = choice["message"]["tool_calls"]
    assert first["type"] == second["type"] == "function"
    assert first["function"]["name"] == "weather"
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    if model is GLM:
        assert json.loads(first["function"]["arguments"]) == json.loads(ARGUMENTS)
    else:
        assert first["function"]["arguments"] == ARGUMENTS
    assert first["id"] != second["id"]

    streamed = await app.chat(tools=TOOLS, stream=True)
    message = assemble(events(streamed))
    assert message["content"] == "Let me see."
    assert [call["arguments"] for call in message["tool_calls"]] == [
        first["function"]["arguments"],
        "{}",
    ]
    assert message["finish_reason"] == "tool_calls"
    ids = {first["id"], second["id"], *(call["id"] for call in message["tool_calls"])}
    assert len(ids) == (2 if model is KIMI_K2 else 4)


@pytest.mark.parametrize("name", MODELS)
async def test_arguments_stream_as_they_are_generated(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    model, tokenizer = MODELS[name], tokenizers[name]
    city = "x" * 40
    call = model.calls([("weather", _arguments(model, json.dumps({"city": city})))])
    app = harness(says(tokenizer, call), tokenizer)
    pieces = [
        piece["function"]["arguments"]
        for chunk in events(await app.chat(tools=TOOLS, stream=True))
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", [])
    ]
    assert json.loads("".join(pieces)) == {"city": city}
    num_tokens = len(tokenizer.encode(city, add_special_tokens=False))
    assert sum("x" in piece for piece in pieces) == num_tokens  # one piece a token


@pytest.mark.parametrize("name", MODELS)
async def test_a_call_cut_by_max_tokens_is_partial_and_ends_by_length(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    model, tokenizer = MODELS[name], tokenizers[name]
    text = model.calls([("weather", _arguments(model, '{"city": "Bern and more"}'))])
    text = text[: text.index("Bern") + 4]
    app = harness(says(tokenizer, text, finish="length"), tokenizer)
    choice = (await app.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern'


_MALFORMED = [
    "{begin}",
    "{begin} no call",
    "{begin}{call}two words and no end",
    "{begin}{call}",
    "a {begin}{begin}{end} b",
    "{call}<<>>{end} text",
]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", _MALFORMED)
async def test_what_is_no_call_comes_out_as_text_whole(
    tokenizers: dict[str, Tokenizer], name: str, shape: str
) -> None:
    model, tokenizer = MODELS[name], tokenizers[name]
    call = model.call("NAME", "", 0).partition("NAME")[0]
    text = shape.format(begin=model.begin or call, call=call, end=model.end or "</tool_call>")
    app = harness(says(tokenizer, text), tokenizer)
    choice = (await app.chat(tools=TOOLS)).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]
    message = assemble(events(await app.chat(tools=TOOLS, stream=True)))
    assert message["content"] == text


@pytest.mark.parametrize("name", MODELS)
async def test_without_tools_nothing_is_parsed(tokenizers: dict[str, Tokenizer], name: str) -> None:
    model, tokenizer = MODELS[name], tokenizers[name]
    text = _two_calls(model)
    app = harness(says(tokenizer, text), tokenizer)
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = (await app.chat(**extra)).json()["choices"][0]
        assert choice["message"]["content"] == text
        assert choice["finish_reason"] == "stop"


async def test_parallel_tool_calls_false_ends_before_the_second(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers[DEEPSEEK_V31.name]
    for per_event in (1, 10_000):
        app = harness(says(tokenizer, _two_calls(DEEPSEEK_V31), per_event=per_event), tokenizer)
        choice = (await app.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        if per_event == 1:  # the engine is told to stop
            assert app.engine.aborts[0][2] == "stop"
    one = harness(says(tokenizer, DEEPSEEK_V31.calls([("clock", "{}")])), tokenizer)
    body = (await one.chat(tools=TOOLS, parallel_tool_calls=False, return_token_ids=True)).json()
    # The end markers are part of the answer, as the template will write them.
    assert tokenizer.decode(body["choices"][0]["token_ids"]).endswith(DEEPSEEK_V31.end)
    assert one.engine.aborts == []


async def test_each_choice_has_its_own_calls(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[DEEPSEEK_V31.name]
    texts = [DEEPSEEK_V31.calls([("weather", "{}")]), "no call"]
    app = harness(says(tokenizer, *texts), tokenizer)
    first, second = (await app.chat(tools=TOOLS, n=2)).json()["choices"]
    assert (first["finish_reason"], second["finish_reason"]) == ("tool_calls", "stop")
    assert first["message"]["content"] is None
    assert second["message"]["content"] == "no call"
    chunks = events(await app.chat(tools=TOOLS, n=2, stream=True))
    assert assemble(chunks, 0)["tool_calls"][0]["name"] == "weather"
    assert assemble(chunks, 1)["tool_calls"] == []


async def test_kimi_ids_are_the_models_own_and_never_repeat(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers[KIMI_K2.name]
    app = harness(says(tokenizer, KIMI_K2.calls([("clock", "{}")])), tokenizer)
    first = (await app.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert first["tool_calls"][0]["id"] == "functions.clock:0"
    result = {"role": "tool", "tool_call_id": "functions.clock:0", "content": "noon"}
    again = await app.chat(tools=TOOLS, messages=[USER, first, result])
    call = again.json()["choices"][0]["message"]["tool_calls"][0]
    assert call["id"] == "functions.clock:1"


async def _prompts(app: Harness, bodies: list[dict[str, Any]]) -> set[bytes]:
    for body in bodies:
        response = await app.chat(max_tokens=1, **body)
        assert response.status_code == 200, response.text
    return {request.prompt for request in app.engine.requests}


async def test_prompt_normalisation_tool_choice_and_strict_never_change_the_prompt(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers[DEEPSEEK_V31.name]
    app = harness(FakeEngine(), tokenizer)
    named = {"type": "function", "function": {"name": "clock"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [named]},
    }
    extra = {**WEATHER["function"], "strict": True, "eager_input_streaming": True}  # type: ignore[dict-item]
    decorated = [{"type": "function", "function": extra, "defer_loading": True}, CLOCK]
    bodies: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": choice}
        for choice in (None, "auto", "none", "required", named, allowed)
    ]
    bodies += [{"tools": TOOLS, "parallel_tool_calls": False}, {"tools": decorated}]
    bodies += [{"tools": [*TOOLS, {"type": "web_search"}]}]
    assert len(await _prompts(app, bodies)) == 1
    decoded = tokenizer.decode(app.engine.requests[0].prompt_tokens.tolist())
    assert '"properties": {"city": {"type": "string"}, "days"' in decoded  # the sent key order


async def test_tool_types_of_codex_are_ignored_by_name(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[DEEPSEEK_V31.name]
    app = harness(FakeEngine(), tokenizer)
    tools = [{"type": "custom", "name": "apply_patch"}, WEATHER, {"type": "web_search"}]
    response = await app.chat(tools=tools, max_tokens=1)
    assert response.status_code == 200
    ignored = response.headers["x-radix-ignored-fields"]
    assert ignored == "tools[0]%3Acustom, tools[2]%3Aweb_search"
    alone = await app.chat(tools=[{"type": "namespace"}], max_tokens=1)
    assert alone.status_code == 200
    assert app.engine.requests[-1].params.grammar is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom", "name": "x"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}},
            "tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_contradicts_itself_is_refused(
    tokenizers: dict[str, Tokenizer], body: dict[str, Any], param: str
) -> None:
    app = harness(FakeEngine(), tokenizers[DEEPSEEK_V31.name])
    response = await app.chat(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert app.engine.requests == []


async def test_tool_choice_none_and_extra_keys_of_history_are_accepted(
    tokenizers: dict[str, Tokenizer],
) -> None:
    app = harness(FakeEngine(), tokenizers[DEEPSEEK_V31.name])
    call = {
        "id": "call_1",
        "index": 0,
        "type": "function",
        "function": {"name": "weather", "arguments": "{}", "extra": 1},
    }
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "id": "m"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sun", "name": "weather"},
    ]
    response = await app.chat(messages=messages, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert response.status_code == 200


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("arguments", [ARGUMENTS, '{"b": 1, "a": [2]}', "not json {", '"text"'])
async def test_arguments_of_history_reach_the_prompt_verbatim(
    tokenizers: dict[str, Tokenizer], name: str, arguments: str
) -> None:
    model, tokenizer = MODELS[name], tokenizers[name]
    call = {
        "id": "functions.weather:0",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    app = harness(FakeEngine(), tokenizer)
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    response = await app.chat(messages=messages, max_tokens=1)
    assert response.status_code == 200
    prompt = tokenizer.decode(app.engine.requests[0].prompt_tokens.tolist(), False)
    if model is GLM and arguments.startswith("{"):
        arguments = _arguments(model, arguments).replace("\n", "")
    assert arguments in prompt


@pytest.mark.parametrize("name", MODELS)
async def test_r22_a_tool_turn_extends_its_own_prompt(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    """Sent back as it came, the call is tokenised as it was generated."""
    model, tokenizer = MODELS[name], tokenizers[name]
    text = model.calls([("weather", _arguments(model, ARGUMENTS))])
    if model is GLM:
        text = "\n" + text.replace("\n", "")
    app = harness(says(tokenizer, text), tokenizer)
    answer = (await app.chat(tools=TOOLS, return_token_ids=True)).json()
    first = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
    messages = [USER, answer["choices"][0]["message"], {"role": "user", "content": "more"}]
    second = (await app.chat(tools=TOOLS, messages=messages, return_token_ids=True)).json()
    assert second["prompt_token_ids"][: len(first)] == first


async def test_the_format_is_shown_in_server_info(tokenizers: dict[str, Tokenizer]) -> None:
    for name, tokenizer in tokenizers.items():
        info = (await harness(FakeEngine(), tokenizer).get("/server_info")).json()
        assert info["tool_format"] == name
        assert info["reasoning_format"] == ["<think>", "</think>"]


async def test_the_demo_model_marks_are_tokens_and_still_seen() -> None:
    """Its markers are special tokens, which text leaves out otherwise."""
    folder = Path(__file__).parents[2] / "configs" / "demo"
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    text = "Sure." + DEEPSEEK_V31.calls([("weather", '{"city": "Bern"}')])
    app = harness(says(tokenizer, text), tokenizer)
    message = (await app.chat(tools=TOOLS)).json()["choices"][0]["message"]
    assert message["content"] == "Sure."
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    begin = tokenizer.token_to_id(DEEPSEEK_V31.begin)
    await app.chat(tools=TOOLS, tool_choice="none", logit_bias={"3": 1.0})
    assert app.engine.requests[-1].params.logit_bias == {3: 1.0, begin: float("-inf")}
    plain = (await app.chat()).json()["choices"][0]["message"]
    assert plain["content"] == 'Sure.weather{"city": "Bern"}'


async def test_the_grammar_of_tool_choice_reaches_the_engine(
    tokenizers: dict[str, Tokenizer],
) -> None:
    app = harness(FakeEngine(), tokenizers[DEEPSEEK_V31.name])
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    named = {"type": "function", "function": {"name": "clock"}}
    kinds = []
    for extra in (
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": named},
        {"tools": [strict, CLOCK]},
        {"tools": [strict, CLOCK], "tool_choice": "none"},
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}},
    ):
        response = await app.chat(max_tokens=1, **extra)
        assert response.status_code == 200, response.text
        grammar = app.engine.requests[-1].params.grammar
        kinds.append(None if grammar is None else grammar.kind)
    tag = "structural_tag"
    # The template has thinking, which may come before JSON: so that is a structural tag, too.
    assert kinds == [None, tag, tag, tag, None, tag, tag]
    assert len({request.prompt for request in app.engine.requests}) == 1


async def test_without_xgrammar_strict_is_named_in_the_header(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents send strict as routine: that is no reason to refuse them."""
    monkeypatch.setattr("server.openai.model_formats.find_spec", lambda name: None)
    app = harness(FakeEngine(), tokenizers[DEEPSEEK_V31.name])
    strict = {"type": "function", "function": {**CLOCK["function"], "strict": True}}  # type: ignore[dict-item]
    response = await app.chat(tools=[strict], max_tokens=1)
    assert response.headers["x-radix-ignored-fields"] == "tools[].function.strict"
    assert app.engine.requests[-1].params.grammar is None


async def test_a_strict_tool_that_cannot_be_enforced_is_a_400_that_names_why(
    tokenizers: dict[str, Tokenizer],
) -> None:
    app = harness(FakeEngine(), tokenizers[DEEPSEEK_V31.name])
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    function = {"name": "f", "strict": True, "parameters": parameters}
    response = await app.chat(tools=[{"type": "function", "function": function}], max_tokens=1)
    assert response.status_code == 400
    error = response.json()["error"]
    assert "uniqueItems is not supported (at properties/a)" in error["message"]
    assert error["param"] == "tools[0].function.parameters"
    loose = {"type": "function", "function": {**function, "strict": False}}
    assert (await app.chat(tools=[loose], max_tokens=1)).status_code == 200
