"""The issue's main promises, over HTTP, with the bundled model and the real openai client."""

from __future__ import annotations

import numpy as np
import openai
import pytest
from support.server_process import DEMO, ServerProcess

FOX = [{"role": "user", "content": "Write a short story about a brave fox."}]


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def random_prompt(seed: int, num_tokens: int, vocab: int = 4000) -> list[int]:
    return np.random.default_rng(seed).integers(100, vocab, num_tokens).tolist()


def test_streamed_chat_is_a_story_and_ends(demo_server: ServerProcess) -> None:
    stream = client_of(demo_server).chat.completions.create(
        model="demo", messages=FOX, stream=True, temperature=0, max_tokens=400
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert "fox" in text.lower()
    assert len(text.split()) > 40
    assert [reason for reason in reasons if reason] == ["stop"]
    plain = client_of(demo_server).chat.completions.create(
        model="demo", messages=FOX, temperature=0, max_tokens=400
    )
    assert plain.choices[0].message.content == text


@pytest.mark.parametrize(
    ("page_size", "without"),
    [(1, ["xgrammar"]), (16, ["xgrammar"]), (64, ["xgrammar", "triton"])],
    ids=["1", "16", "64-without-triton"],
)
def test_cached_tokens_are_exact_and_answers_do_not_change(
    page_size: int, without: list[str]
) -> None:
    flags = ("--page-size", str(page_size), "--kv-cache-tokens", "8192")
    with ServerProcess(DEMO, *flags, without=without) as server:
        client = client_of(server)

        def complete(prompt: list[int]) -> tuple[int, list[int]]:
            answer = client.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=8,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens == len(prompt)
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached is not None
            return cached, answer.choices[0].token_ids  # type: ignore[attr-defined]

        prefix = random_prompt(page_size, 1500)
        cold, cold_ids = complete(prefix)
        assert cold == 0
        again, again_ids = complete(prefix)
        assert again == 1499
        assert again_ids == cold_ids
        for tail in (1, 7, 16):
            cached, _ = complete(prefix + random_prompt(1000 + tail, tail))
            assert cached == 1500
        # the generated tokens are in the cache too, but for the last one, which has no KV
        longer = prefix + cold_ids + random_prompt(5, 3)
        cached, _ = complete(longer)
        assert cached == 1500 + 7
        assert server.get("/v1/cache/audit")["ok"] is True

        metrics = server.metrics()
        queries = metrics.total("prefix_cache_queries_total")
        hits = metrics.total("prefix_cache_hits_total")
        missed = metrics.by("prefix_cache_missed_tokens_total", "reason")
        assert queries == 1500 * 2 + (1501 + 1507 + 1516) + len(longer)
        assert hits == 1499 + 3 * 1500 + 1507
        assert hits + sum(missed.values()) == queries
        assert missed["last_token"] == 1
        assert metrics.total("prefix_cache_hit_length_tokens_count") == 6
        states = metrics.by("kv_cache_tokens", "state")
        assert set(states) == {"free", "evictable", "protected", "private", "pinned"}
        assert sum(states.values()) == 8192 // page_size * page_size
        assert states["protected"] == states["private"] == 0
        accepted = metrics.total("requests_accepted_total")
        finished = metrics.total("requests_finished_total")
        assert accepted == finished == 6
        assert server.terminate() == 0
