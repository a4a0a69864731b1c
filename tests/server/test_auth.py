"""Keys, and I01 / I03: which namespace a request lands in."""

from __future__ import annotations

import pytest
from support.http_app import Harness

from radix_mla.text.tokenizer import Tokenizer


def _keyed(tokenizer: Tokenizer, **settings: object) -> Harness:
    return Harness(tokenizer=tokenizer, api_key=["key-a", "key-b"], **settings)


async def _send(harness: Harness, key: str, **body: object) -> str:
    response = await harness.post(
        "/v1/completions", {"prompt": "a", **body}, authorization=f"Bearer {key}"
    )
    assert response.status_code == 200
    return harness.engine.requests[-1].namespace


async def test_without_keys_everybody_may_call(tokenizer: Tokenizer) -> None:
    assert (await Harness(tokenizer=tokenizer).complete()).status_code == 200


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer ", "Basic key-a", "key-a", "Bearer key-aa", "bearer"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nothing", "/server_info"])
async def test_a_missing_or_wrong_key_is_a_401(
    tokenizer: Tokenizer, header: str | None, path: str
) -> None:
    harness = _keyed(tokenizer)
    headers = {} if header is None else {"authorization": header}
    response = await harness.get(path, **headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["type"] == "authentication_error"


async def test_any_of_the_keys_opens(tokenizer: Tokenizer) -> None:
    harness = _keyed(tokenizer)
    for header in ("Bearer key-a", "bearer key-b", "Bearer  key-a "):
        assert (await harness.get("/v1/models", authorization=header)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics"])
async def test_probes_need_no_key(tokenizer: Tokenizer, path: str) -> None:
    assert (await _keyed(tokenizer).get(path)).status_code == 200


async def test_keys_are_shown_nowhere(tokenizer: Tokenizer) -> None:
    harness = _keyed(tokenizer)
    response = await harness.get("/server_info", authorization="Bearer key-a")
    assert "key-a" not in response.text
    assert response.json()["settings"]["num_api_keys"] == 2


async def test_i01_the_salt_reaches_the_lookup(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    for salt in (None, "a", "b", "a", ""):
        await harness.complete(cache_salt=salt)
    assert [request.namespace for request in harness.engine.requests] == ["", "a", "b", "a", ""]


async def test_i03_the_scope_comes_from_the_key(tokenizer: Tokenizer) -> None:
    harness = _keyed(tokenizer, cache_scope="key")
    own = await _send(harness, "key-a")
    assert own == await _send(harness, "key-a")
    assert own != await _send(harness, "key-b")
    salted = await _send(harness, "key-a", cache_salt="s")
    assert salted not in (own, await _send(harness, "key-b", cache_salt="s"))
    assert "key-a" not in own
    # What the client writes itself does not reach another tenant's rows.
    assert await _send(harness, "key-b", cache_salt=own) != own


async def test_global_scope_shares_between_keys(tokenizer: Tokenizer) -> None:
    harness = _keyed(tokenizer)
    assert await _send(harness, "key-a") == await _send(harness, "key-b") == ""


async def test_flush(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.client.delete("/v1/cache")
    assert response.json() == {"flushed_tokens": 123}
    await harness.client.delete("/v1/cache?namespace=a")
    await harness.client.delete("/v1/cache?namespace=")
    assert harness.engine.flushed == [None, "a", ""]


async def test_flush_under_key_scope_stays_with_the_caller(tokenizer: Tokenizer) -> None:
    harness = _keyed(tokenizer, cache_scope="key", admin_api_key=["root"])
    headers = {"authorization": "Bearer key-a"}
    refused = await harness.client.delete("/v1/cache", headers=headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_required"
    await harness.client.delete("/v1/cache?namespace=s", headers=headers)
    assert harness.engine.flushed == [await _send(harness, "key-a", cache_salt="s")]
    root = {"authorization": "Bearer root"}
    assert (await harness.client.delete("/v1/cache", headers=root)).status_code == 200
    assert harness.engine.flushed[-1] is None
