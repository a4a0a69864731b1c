"""A09, X01, X03: one error shape everywhere, and nothing that a body holds can hurt the server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.demo_app import demo_app, says
from support.fake_engine import FakeEngine
from support.http_app import Harness

from radix_mla.text.tokenizer import Tokenizer

PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
JSON = {"content-type": "application/json"}


def _check_shape(body: dict[str, Any]) -> dict[str, Any]:
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    for key in ("param", "code"):
        assert error[key] is None or isinstance(error[key], str)
    return dict(error)


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    return Harness(tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/nothing/here", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/chat/completions", 405),
        ("POST", "/metrics", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
async def test_a09_paths_and_methods(harness: Harness, method: str, path: str, status: int) -> None:
    response = await harness.client.request(method, path)
    assert response.status_code == status
    _check_shape(response.json())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"3",
        b'{"prompt": }',
        b'{"prompt": "a"} trailing',
        b'{"prompt": NaN}',
        b'{"temperature": Infinity, "prompt": "a"}',
        b'{"temperature": 1e999, "prompt": "a"}',
        b'\xef\xbb\xbf{"prompt": "a"}',
        '{"prompt": "a"}'.encode("utf-16"),
        '{"prompt": "a"}'.encode("utf-16-le"),
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a\x00"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b'{"prompt": "a\\u0000b"}',
    ],
)
async def test_a09_x03_bodies_that_are_no_clean_json(
    harness: Harness, path: str, body: bytes
) -> None:
    response = await harness.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert _check_shape(response.json())["code"] == "invalid_json"


@pytest.mark.parametrize("field", ["prompt", "stop", "model", "cache_salt", "unknown"])
@pytest.mark.parametrize("stream", [True, False])
async def test_x03_lone_surrogates_in_any_field(harness: Harness, field: str, stream: bool) -> None:
    body = json.dumps({"prompt": "a", "stream": stream, field: "x\ud800"})
    response = await harness.client.post("/v1/completions", content=body.encode(), headers=JSON)
    assert response.status_code == 400
    assert (await harness.complete()).status_code == 200


async def test_text_that_only_looks_like_an_escaped_nul_is_fine(harness: Harness) -> None:
    assert (await harness.complete(prompt="a\\u0000b")).status_code == 200


@pytest.mark.parametrize(("path", "allowed"), [("/health", "GET, HEAD"), ("/v1/cache", "DELETE")])
async def test_a09_405_names_the_methods_of_every_route(
    harness: Harness, path: str, allowed: str
) -> None:
    response = await harness.client.request("OPTIONS", path)
    assert response.status_code == 405
    assert response.headers["allow"] == allowed


@pytest.mark.parametrize(("role", "status"), [("assistant", 200), ("user", 400)])
async def test_x03_what_the_model_itself_said_comes_back(role: str, status: int) -> None:
    """Or a conversation in which a model wrote NUL could never go on."""
    words = {"role": "user", "content": "hi"}
    message = {"role": role, "content": "a\0b"}
    response = await demo_app(says("ok")).chat(messages=[words, message, words])
    assert response.status_code == status


@pytest.mark.parametrize("depth", [100, 3_000, 60_000])
@pytest.mark.parametrize(
    "template", ['{"prompt":"a","messages":[{"role":"user","content":%s}]}', '{"prompt":%s}', "%s"]
)
@pytest.mark.parametrize("pair", ["[]", '{"a":}'])
async def test_x01_deep_nesting(harness: Harness, depth: int, template: str, pair: str) -> None:
    left, right = pair[:-1], pair[-1]
    nested = left * depth + "1" + right * depth
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = (template % nested).encode()
        response = await harness.client.post(path, content=body, headers=JSON)
        assert response.status_code == 400
        assert _check_shape(response.json())["code"] == "nesting_too_deep"
    assert (await harness.complete()).status_code == 200


async def test_x01_deep_nesting_in_an_unknown_field(harness: Harness) -> None:
    body = b'{"prompt":"a","whatever":' + b"[" * 100 + b"]" * 100 + b"}"
    response = await harness.client.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400


async def test_many_brackets_without_depth_are_fine(harness: Harness) -> None:
    assert (await harness.complete(prompt=[[1]] * 200, max_tokens=1)).status_code == 200


async def test_a09_unknown_model(harness: Harness) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = {"model": "gpt-9", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
        response = await harness.post(path, body)
        assert response.status_code == 404
        error = _check_shape(response.json())
        assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", "image/png"])
async def test_a09_wrong_content_type(harness: Harness, media: str) -> None:
    response = await harness.client.post(
        "/v1/completions", content=b'{"prompt":"a"}', headers={"content-type": media}
    )
    assert response.status_code == 415
    assert _check_shape(response.json())["code"] == "unsupported_media_type"


@pytest.mark.parametrize("media", [None, "application/json; charset=utf-8", "application/x+json"])
async def test_json_under_its_other_names(harness: Harness, media: str | None) -> None:
    headers = {} if media is None else {"content-type": media}
    response = await harness.client.post(
        "/v1/completions", content=b'{"prompt":"a"}', headers=headers
    )
    assert response.status_code == 200


@pytest.mark.parametrize("chunked", [True, False])
async def test_a09_a_body_over_the_limit(tokenizer: Tokenizer, chunked: bool) -> None:
    harness = Harness(tokenizer=tokenizer, max_body_bytes=2048)
    body = json.dumps({"prompt": "a" * 4096}).encode()

    async def pieces() -> Any:
        yield body

    content = pieces() if chunked else body
    response = await harness.client.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 413
    assert "2048" in _check_shape(response.json())["message"]


async def test_a09_our_own_faults_are_500_without_their_text(tokenizer: Tokenizer) -> None:
    class Broken(FakeEngine):
        def submit(self, requests: Any) -> Any:
            raise RuntimeError("secret detail")

    harness = Harness(Broken(), tokenizer)
    response = await harness.complete()
    assert response.status_code == 500
    assert "secret" not in response.text
    assert _check_shape(response.json())["type"] == "server_error"


async def test_draining_answers_503_with_retry_after(harness: Harness) -> None:
    harness.service.lifecycle.drain()
    for response in (await harness.complete(), await harness.chat(), await harness.get("/ready")):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        message = _check_shape(response.json())["message"].lower()
        assert "context" not in message
        assert "too many tokens" not in message
    assert (await harness.get("/health")).status_code == 200
    assert await harness.metric("radix_mla_rejections_total", reason="draining") == 2
