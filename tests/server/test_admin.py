"""Health, readiness, facts, load, audit, statistics: what routers and people probe."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import Harness

from radix_mla.engine.ipc import EngineStats
from radix_mla.text.tokenizer import Tokenizer


@pytest.fixture
def harness(tokenizer: Tokenizer) -> Harness:
    engine = FakeEngine(lambda request, index: Script(cached=1), info={"decisions": ["a: b"]})
    return Harness(engine, tokenizer)


async def test_x08_health_follows_the_engine(harness: Harness) -> None:
    assert (await harness.get("/health")).json() == {"status": "ok"}
    harness.engine.problem = "The engine has been silent for 6 seconds."
    for path in ("/health", "/ready"):
        response = await harness.get(path)
        assert response.status_code == 503
        assert "silent for 6" in response.json()["error"]["message"]
    assert (await harness.complete()).status_code == 503
    assert await harness.metric("radix_mla_rejections_total", reason="engine_dead") == 1
    assert await harness.metric("radix_mla_requests_accepted_total") == 0


@pytest.mark.parametrize(
    ("path", "keys"),
    [
        ("/version", {"version"}),
        ("/server_info", {"engine", "settings", "kv_tokens", "page_size", "max_model_len"}),
        ("/get_server_info", {"engine", "settings"}),
        ("/model_info", {"vocab_size", "max_model_len", "model_path", "is_generation"}),
        ("/get_model_info", {"vocab_size"}),
        ("/v1/loads", {"loads"}),
        ("/v1/cache/audit", {"ok", "counts"}),
        ("/v1/cache/stats", {"hit_rate", "hit_tokens", "queried_tokens", "kv_tokens"}),
        ("/openapi.json", {"paths"}),
    ],
)
async def test_facts(harness: Harness, path: str, keys: set[str]) -> None:
    response = await harness.get(path)
    assert response.status_code == 200
    assert keys <= set(response.json())


async def test_openapi_knows_the_bodies(harness: Harness) -> None:
    paths = (await harness.get("/openapi.json")).json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        body = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert "$ref" not in str(body)
        assert body["properties"]
    options = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert "include_usage" in str(options["schema"]["properties"]["stream_options"])


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_probes_may_use_head(harness: Harness, path: str) -> None:
    assert (await harness.client.head(path)).status_code == 200


async def test_cache_stats_count_hits(harness: Harness) -> None:
    harness.engine.stats = EngineStats(evicted_tokens={"capacity": 5}, retractions=2)
    await harness.complete(prompt=[5, 6, 7, 8])
    body = (await harness.get("/v1/cache/stats")).json()
    assert (body["queried_tokens"], body["hit_tokens"], body["hit_rate"]) == (4, 1, 0.25)
    assert body["evicted_tokens"] == {"capacity": 5}
    assert sum(body["kv_tokens"].values()) == 1024


async def test_loads_show_running_requests(harness: Harness) -> None:
    (load,) = (await harness.get("/v1/loads")).json()["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    assert load["max_total_num_tokens"] == 1024
