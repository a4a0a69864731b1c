"""The documents say what the code does: fields, metrics, flags."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.demo_app import demo_app, says

from server.anthropic.schemas import MessagesRequest
from server.openai.fields import IGNORED, INERT, REFUSED
from server.openai.schemas import ChatRequest, CompletionRequest, GenerationFields
from server.responses.schemas import ResponsesRequest
from server.settings import PEER_NAMES, Settings

DOCS = Path(__file__).resolve().parents[2] / "docs"
_CODE = re.compile(r"`([^`\n]+)`")


def _names(paragraph: str) -> set[str]:
    return set(_CODE.findall(paragraph))


def _section(text: str, title: str) -> str:
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0].strip()


def _paragraph(section: str, start: str) -> str:
    (found,) = [part for part in section.split("\n\n") if part.startswith(start)]
    return found.removeprefix(start)


@pytest.mark.parametrize(
    ("start", "schema"),
    [
        ("`/v1/completions`:", CompletionRequest),
        ("`/v1/chat/completions`:", ChatRequest),
        ("`/v1/responses`:", ResponsesRequest),
        ("`/v1/messages`:", MessagesRequest),
    ],
)
def test_honoured_fields(start: str, schema: type[GenerationFields]) -> None:
    section = _section((DOCS / "api.md").read_text(), "Fields: honoured")
    shared = set(GenerationFields.model_fields)
    assert _names(_paragraph(section, "All generation paths:")) == shared
    assert _names(_paragraph(section, start)) == set(schema.model_fields) - shared


def test_ignored_and_refused_fields() -> None:
    text = (DOCS / "api.md").read_text()
    ignored = _section(text, "Fields: accepted and ignored")
    assert _names(_paragraph(ignored, "Everywhere:")) == set(IGNORED)
    own = ResponsesRequest.also_ignored | MessagesRequest.also_ignored
    assert own <= _names(ignored)
    assert set(INERT) <= _names(ignored)
    refused = _names(_section(text, "Fields: refused"))
    assert set(REFUSED) <= refused
    assert {*ResponsesRequest.also_refused, *MessagesRequest.also_refused} <= refused


async def test_every_metric_is_named() -> None:
    harness = demo_app(says("a"))
    text = (await harness.get("/metrics")).text
    exposed = set(re.findall(r"^# TYPE (radix_mla_\w+)", text, re.MULTILINE))
    table = (DOCS / "metrics.md").read_text().partition("## All\n")[2]
    assert set(re.findall(r"^\| `(radix_mla_\w+)` \|", table, re.MULTILINE)) == exposed


def test_flags_of_peers() -> None:
    rows: set[str] = set()
    for name in ("from-vllm.md", "from-sglang.md"):
        text = (DOCS / name).read_text()
        rows |= set(re.findall(r"^\| `--([\w-]+)` \|", text, re.MULTILINE))
        same = next(line for line in text.splitlines() if line.startswith("Called the same:"))
        for flag in re.findall(r"`--([\w-]+)`", same):
            assert flag.replace("-", "_") in Settings.model_fields
    assert rows == set(PEER_NAMES)


@pytest.mark.parametrize("name", ["from-vllm.md", "from-sglang.md"])
async def test_what_the_tables_of_peers_name_exists(name: str) -> None:
    """Our flags, our metrics, and the aliases of theirs."""
    text = (DOCS / name).read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    for row in rows:
        for flag in re.findall(r"--([a-z][\w-]+)", " ".join(row[1:])):
            assert flag.replace("-", "_") in {*Settings.model_fields, "tp", "dcp"}, row
    exposed = (await demo_app(says("a"), metrics_aliases="vllm").get("/metrics")).text
    names = set(re.findall(r"^# TYPE ([\w:]+)", exposed, re.MULTILINE))
    named = set(re.findall(r"\b(radix_mla_[a-z_]+)", text))
    assert named
    assert named <= names
    for row in rows:
        if row[-1].startswith("yes"):
            assert set(re.findall(r"vllm:\w+", row[0])) <= names, row


_CLIENTS = {  # what says the session
    "openai (Python)": "prompt_cache_key",
    "langchain": "prompt_cache_key",
    "openai-agents": "x-session-affinity",
    "anthropic (Python)": '"user_id"',
    "Claude Code": "metadata.user_id",
    "Codex": "session_id",
    "opencode": "x-session-affinity",
    "Cline": "x-session-affinity",
    "Continue": "x-session-affinity",
    "Open WebUI": "X-OpenWebUI-Chat-Id",
    "LiteLLM's proxy": "x-session-affinity",
    "llm": "x-session-affinity",
}


@pytest.mark.parametrize("client", _CLIENTS)
def test_each_client_has_its_set_up_and_its_session(client: str) -> None:
    section = _section((DOCS / "clients.md").read_text(), client)
    assert "127.0.0.1:8000" in section or "host.docker.internal:8000" in section
    assert _CLIENTS[client] in section


_PARSERS: dict[str, Callable[[str], object]] = {
    "python": ast.parse,
    "toml": tomllib.loads,
    "json": json.loads,
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_what_is_to_be_copied_parses(path: Path) -> None:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", path.read_text(), re.M | re.S):
        if language in _PARSERS:
            _PARSERS[language](text)


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_links_and_flags_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
