"""The real app with the demo model's tokenizer and template, on a fake engine that says a text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx2
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness
from support.server_process import DEMO

from radix_mla.text.tokenizer import Tokenizer
from server.service import ModelFacts

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@cache
def demo_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(DEMO)
    assert tokenizer is not None
    return tokenizer


def demo_facts(max_model_len: int = 65_536) -> ModelFacts:
    return ModelFacts(
        names=("demo",),
        path="/models/demo",
        vocab_size=demo_tokenizer().size,
        max_model_len=max_model_len,
        kv_tokens=65_536,
        page_size=16,
        created=1,
    )


def call_text(name: str, arguments: str) -> str:
    """One tool call as the demo model (V3.1 format) writes it."""
    return f"{CALLS_BEGIN}{CALL_BEGIN}{name}{SEP}{arguments}{CALL_END}{CALLS_END}"


def says(text: str, *, cached: int = 0, finish: str = "stop") -> FakeEngine:
    """An engine whose every answer is `text`, token by token, then the end of the turn."""
    tokenizer = demo_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    eos = tokenizer.eos_token_id
    assert eos is not None
    if finish == "stop":
        script = Script([*ids, eos], "stop", eos, cached=cached)
    else:
        script = Script(ids, finish, cached=cached)
    return FakeEngine(lambda request, index: script)


def demo_app(engine: FakeEngine, *, max_model_len: int = 65_536, **settings: Any) -> Harness:
    return Harness(engine, demo_tokenizer(), demo_facts(max_model_len), **settings)


def prompt_text(harness: Harness, place: int = -1) -> str:
    """The text of a prompt that the engine got."""
    ids = harness.engine.requests[place].prompt_tokens.tolist()
    return demo_tokenizer().decode(ids, skip_special_tokens=False)


def named_events(response: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    """(event, data) of an SSE body whose events have names; comments are left out."""
    found = []
    for block in response.text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if "data" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
