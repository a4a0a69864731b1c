"""Client packages against a real server on the demo model: the surface that people use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from support.server_process import ROOT, ServerProcess

# The packages warn about their own and each other's ways; that is not this project's business.
pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("default")]

FOX: Any = [{"role": "user", "content": "Write a short story about a brave fox."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA},
}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(demo_server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(demo_server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0)


# -- openai


def test_openai_completions(client: openai.OpenAI) -> None:
    asked: Any = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked, logprobs=2, echo=True)
    assert whole.choices[0].text.startswith("Once upon a time")
    assert whole.choices[0].logprobs is not None
    pieces = list(client.completions.create(**asked, stream=True))
    text = "".join(piece.choices[0].text for piece in pieces)
    assert whole.choices[0].text == "Once upon a time" + text


def test_openai_chat_tools_streamed(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="demo", messages=FOX, tools=[TOOL], tool_choice=NAMED, max_tokens=64
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    assert final.choices[0].finish_reason in ("tool_calls", "stop")
    assert "tool_calls.function.arguments.delta" in kinds


def test_openai_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo",
        messages=FOX,
        max_tokens=64,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Paris", "Rome")


def test_openai_responses(client: openai.OpenAI) -> None:
    whole = client.responses.create(
        model="demo", input="Write a story.", temperature=0, max_output_tokens=24
    )
    assert whole.output_text
    assert whole.usage is not None
    with client.responses.stream(
        model="demo", input="Write a story.", temperature=0, max_output_tokens=24
    ) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    again = client.responses.create(model="demo", input="Write a story.", max_output_tokens=1)
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1


def test_openai_responses_tools(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    items: Any = [{"role": "user", "content": "Weather?"}]
    asked: Any = {"model": "demo", "tools": [tool], "parallel_tool_calls": False}
    first = client.responses.create(
        **asked, input=items, tool_choice="required", max_output_tokens=64
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    second = client.responses.create(**asked, input=items, tool_choice="none", max_output_tokens=8)
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_openai_responses_structured(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model="demo", input="A city?", text=text, max_output_tokens=64)
    assert json.loads(answer.output_text)["city"] in ("Paris", "Rome")


# -- anthropic


def test_anthropic_messages(claude: anthropic.Anthropic) -> None:
    asked: Any = {"model": "demo", "max_tokens": 24, "messages": FOX}
    asked["extra_body"] = {"temperature": 0}  # the package itself has no such argument any more
    whole = claude.messages.create(**asked, system="You tell stories.")
    assert whole.content[0].type == "text"
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**asked, system="You tell stories.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    usage = final.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.cache_read_input_tokens > 0
    counted = claude.messages.count_tokens(model="demo", messages=FOX, system="You tell stories.")
    parts = (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert sum(part or 0 for part in parts) == counted.input_tokens


def test_anthropic_tools(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
    asked: Any = {"model": "demo", "max_tokens": 64, "tools": [tool]}
    with claude.messages.stream(
        **asked, messages=FOX, tool_choice={"type": "tool", "name": "get_weather"}
    ) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    messages: Any = [
        *FOX,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = claude.messages.create(**asked, messages=messages, tool_choice={"type": "none"})
    assert second.usage.cache_read_input_tokens is not None
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens


def test_anthropic_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="other", max_tokens=1, messages=FOX)
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(
            model="demo", max_tokens=1, messages=[{"role": "user", "content": "word " * 40_000}]
        )


# -- langchain


def _langchain(server: ServerProcess, **options: Any) -> Any:
    langchain_openai = pytest.importorskip("langchain_openai")
    return langchain_openai.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model="demo", max_retries=0, **options
    )


def test_langchain(demo_server: ServerProcess) -> None:
    model = _langchain(demo_server, temperature=0, max_tokens=24)
    whole = model.invoke("Tell a story.")
    assert whole.content
    assert whole.usage_metadata["input_token_details"]["cache_read"] >= 0
    assert "".join(piece.content for piece in model.stream("Tell a story.")) == whole.content


def test_langchain_tools_and_structure(demo_server: ServerProcess) -> None:
    model = _langchain(demo_server, max_tokens=64)
    bound = model.bind_tools([TOOL], tool_choice="get_weather")
    (call,) = bound.invoke("Weather?").tool_calls
    assert call["args"]["city"] in ("Paris", "Rome")
    for method in ("json_schema", "function_calling"):
        schema = {"title": "answer", "description": "A city.", **SCHEMA}
        value = model.with_structured_output(schema, method=method).invoke("A city?")
        assert value["city"] in ("Paris", "Rome")


def test_langchain_responses(demo_server: ServerProcess) -> None:
    model = _langchain(demo_server, max_tokens=24, use_responses_api=True)
    assert model.invoke("Tell a story.").text


# -- openai-agents


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_agents(demo_server: ServerProcess, api: str) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    asked: list[str] = []

    @agents.function_tool
    def get_weather(sure: bool) -> str:
        """The weather."""
        asked.append(str(sure))
        return "sunny"

    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    async with openai.AsyncOpenAI(
        base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0
    ) as client:
        agent = agents.Agent(
            name="a",
            instructions="Use the tool.",
            tools=[get_weather],
            model=kinds[api](model="demo", openai_client=client),
            model_settings=agents.ModelSettings(
                tool_choice="required", temperature=0, max_tokens=800
            ),
        )
        run = agents.Runner.run_streamed(agent, "Weather?", max_turns=3)
        async for _ in run.stream_events():
            pass
    assert len(asked) >= 1  # after the first call the package itself goes back to auto
    assert run.final_output is not None


# -- command lines


def test_llm_command(demo_server: ServerProcess, tmp_path: Path) -> None:
    pytest.importorskip("llm")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: radix\n  model_name: demo\n  api_base: {demo_server.url}/v1\n"
        "  api_key_name: radix\n"
    )
    (tmp_path / "keys.json").write_text('{"radix": "none"}')
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path)}
    for flags in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "radix", *flags, "-o", "max_tokens", "12"]
        done = subprocess.run(
            [*command, "Tell a story."],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_radix_mla_chat(demo_server: ServerProcess) -> None:
    command = [
        sys.executable,
        "-m",
        "server",
        "chat",
        "--url",
        demo_server.url,
        "--max-tokens",
        "9",
    ]
    done = subprocess.run(
        [*command, "Tell a story."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer, line = done.stdout.strip().rsplit("\n", 1)
    assert answer
    assert "prompt tokens cached" in line
    assert "ended by length" in line
