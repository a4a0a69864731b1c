"""The first request of each client, word for word, through the whole app."""

from __future__ import annotations

import json

import pytest
from support.client_loop import CLIENTS, load
from support.demo_app import demo_app, prompt_text, says

NAMED = {  # what x-radix-ignored-fields says: fields that the client sends and nothing here does
    "claude_code": {"thinking"},
    "codex": {"reasoning_effort", "tools[3]", "tools[4]", "tools[5]"},
    "litellm_proxy": {"extra_headers"},
}


def test_all_seven_are_here() -> None:
    assert CLIENTS == [
        "claude_code",
        "cline",
        "codex",
        "continue",
        "litellm_proxy",
        "open_webui",
        "opencode",
    ]


@pytest.mark.parametrize("client", CLIENTS)
async def test_the_body_is_served(client: str) -> None:
    request = load(client)
    harness = demo_app(says("Fine.", cached=1), model_alias=["claude-*", "gpt-*"])
    response = await harness.client.post(
        request["path"], json=request["body"], headers=request["headers"]
    )
    assert response.status_code == 200, response.text
    named = response.headers.get("x-radix-ignored-fields", "")
    assert set(filter(None, named.split(", "))) == NAMED.get(client, set())
    assert '"F' in response.text
    text = prompt_text(harness)
    assert "billing-header" not in text
    assert "Find out why the tests fail." in text
    assert "SYSTEM" in text
    for tool in request["body"].get("tools", []):
        is_function = tool.get("type", "function") == "function"
        name = tool.get("function", tool).get("name", tool.get("type"))
        assert (f"### {name}\n" in text) is is_function
    assert '"cached_tokens":1' in response.text or '"cache_read_input_tokens":1' in response.text


@pytest.mark.parametrize("client", CLIENTS)
async def test_its_session_is_seen(client: str) -> None:
    """A header or field of the client says which requests belong together; Cline has none."""
    request = load(client)
    harness = demo_app(says("Fine."), model_alias=["*"])
    for _ in range(2):
        await harness.client.post(
            request["path"], content=json.dumps(request["body"]), headers=request["headers"]
        )
    later = await harness.metric("radix_mla_prefix_cache_queries_total", turn="later")
    has_session = client in ("claude_code", "codex", "opencode", "open_webui")
    assert (later > 0) is has_session
