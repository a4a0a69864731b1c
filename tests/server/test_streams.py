"""Streams: T01, T03, T05, T07, T08, T15; headers, keep-alive, coalescing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import Call, Harness, events

from radix_mla.engine.ipc import SequenceOutput
from radix_mla.text.tokenizer import Tokenizer

TEXT = "The 🙂 fox 漢字 👩‍👧 end"


def _says(tokenizer: Tokenizer, text: str = TEXT, **script: Any) -> FakeEngine:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    return FakeEngine(lambda request, index: Script(ids, "stop", 1, **script))


def _text(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    own = [choice for choice in choices if choice["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in own
    )


@pytest.mark.parametrize("per_event", [1, 2, 5, 100])
@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_t01_streamed_text_equals_whole_text(
    tokenizer: Tokenizer, per_event: int, path: str
) -> None:
    harness = Harness(_says(tokenizer, per_event=per_event), tokenizer)
    send = getattr(harness, path)
    streamed = await send(stream=True, max_tokens=100)
    chunks = events(streamed)
    assert _text(chunks) == TEXT
    assert "\\ufffd" not in streamed.text
    assert "\ufffd" not in streamed.text


async def test_t01_a_cut_character_is_flushed_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    harness = Harness(FakeEngine(lambda request, index: Script(ids)), tokenizer)
    whole = (await harness.complete()).json()["choices"][0]["text"]
    chunks = events(await harness.complete(stream=True))
    assert _text(chunks) == whole == "a\ufffd"
    assert chunks[-1]["choices"][0]["text"] == "\ufffd"


@pytest.mark.parametrize("stops", [["fox"], ["🙂 f"], ["漢字", "漢x"], ["nd", "end"], ["zzz"]])
@pytest.mark.parametrize("per_event", [1, 3, 100])
async def test_t03_streamed_stops_equal_whole_ones(
    tokenizer: Tokenizer, stops: list[str], per_event: int
) -> None:
    harness = Harness(_says(tokenizer, per_event=per_event), tokenizer)
    for path in (harness.complete, harness.chat):
        whole = (await path(stop=stops, max_tokens=100)).json()["choices"][0]
        chunks = events(await path(stop=stops, max_tokens=100, stream=True))
        expected = whole.get("text", whole.get("message", {}).get("content"))
        assert _text(chunks) == expected
        assert not any(stop in expected for stop in stops)
        last = chunks[-1]["choices"][0]
        assert last["finish_reason"] == whole["finish_reason"] == "stop"
        assert last["stop_reason"] == whole["stop_reason"]


@pytest.mark.parametrize("include", [None, {"include_usage": False}, {"include_usage": None}, {}])
@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_t05_no_usage_unless_asked_for(
    tokenizer: Tokenizer, path: str, include: dict[str, Any] | None
) -> None:
    harness = Harness(_says(tokenizer), tokenizer)
    chunks = events(await getattr(harness, path)(stream=True, stream_options=include))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_t05_usage_comes_once_and_last(tokenizer: Tokenizer, path: str, n: int) -> None:
    harness = Harness(_says(tokenizer, cached=2), tokenizer)
    options = {"include_usage": True, "include_obfuscation": False}
    chunks = events(await getattr(harness, path)(stream=True, n=n, stream_options=options))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    usage = chunks[-1]["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


async def test_force_include_usage(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer), tokenizer, force_include_usage=True)
    assert events(await harness.chat(stream=True))[-1]["usage"]["completion_tokens"] > 0


async def test_continuous_usage(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer), tokenizer)
    options = {"continuous_usage_stats": True}
    chunks = events(await harness.complete(stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] > 0


@pytest.mark.parametrize(
    ("finish", "stop_id", "body", "reason"),
    [
        ("stop", 1, {}, "stop"),
        ("stop", 9, {"stop_token_ids": [9]}, "stop"),
        ("length", None, {}, "length"),
        ("length", None, {"stop": "b"}, "stop"),
    ],
)
@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_t07_exactly_one_finish_reason(
    tokenizer: Tokenizer,
    path: str,
    finish: str,
    stop_id: int | None,
    body: dict[str, Any],
    reason: str,
) -> None:
    ids = [*tokenizer.encode("ab", add_special_tokens=False), stop_id or 70]
    engine = FakeEngine(lambda request, index: Script(ids, finish, stop_id))
    chunks = events(await getattr(Harness(engine, tokenizer), path)(stream=True, **body))
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [value for value in reasons if value is not None] == [reason]
    assert reasons[-1] == reason


async def test_chat_chunks_role_first_then_content_then_reason(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "Hi"), tokenizer)
    deltas = [chunk["choices"][0]["delta"] for chunk in events(await harness.chat(stream=True))]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert all(set(delta) == {"content"} for delta in deltas[1:-1])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_t15_streamed_choices_have_their_own_index_and_end(
    tokenizer: Tokenizer, path: str
) -> None:
    texts = ["one", "two STOP more", "three"]
    engine = FakeEngine(
        lambda request, index: Script([*tokenizer.encode(texts[index], False), 1], "stop", 1)
    )
    harness = Harness(engine, tokenizer)
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    body |= {"n": 3, "stream": True, "stop": "STOP", "max_tokens": 50, "seed": 1}
    response = await harness.post(path, body)
    chunks = events(response)
    assert [_text(chunks, index) for index in range(3)] == ["one", "two ", "three"]
    ends = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"] is not None
    ]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("path", ["complete", "chat"])
async def test_t08_a_failure_in_the_middle_is_one_whole_event(
    tokenizer: Tokenizer, path: str
) -> None:
    engine = FakeEngine(
        lambda request, index: Script(
            tokenizer.encode("abc", False), error="RuntimeError: CUDA error at line 3"
        )
    )
    harness = Harness(engine, tokenizer)
    response = await getattr(harness, path)(stream=True)
    blocks = response.text.split("\n\n")
    assert blocks[-1] == ""
    error = json.loads(blocks[-2].removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert error["code"] == "request_failed"
    assert "CUDA" not in response.text
    assert "RuntimeError" not in response.text
    assert "[DONE]" not in response.text
    assert await harness.metric("radix_mla_requests_finished_total", reason="error") == 1
    assert harness.engine.streams == {}


async def test_t08_a_failure_before_the_first_token_is_a_plain_500(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script([], error="boom"))
    harness = Harness(engine, tokenizer)
    assert (await harness.complete()).status_code == 500
    assert (await harness.complete()).json()["error"]["code"] == "request_failed"


async def test_headers_go_out_at_admission_with_the_cached_tokens(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True, cached=1))
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": "ab", "stream": True})
    start = await call.next()
    headers = dict(start["headers"])
    assert start["status"] == 200
    assert headers[b"x-radix-cached-tokens"] == b"1"
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert call.num_unread == 0  # no event before there is a token: TTFT stays honest
    call.disconnect()
    await call.end()


async def test_keep_alive_comes_before_admission_too(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold_queue=True))
    harness = Harness(engine, tokenizer, sse_keepalive=0.02)
    call = Call(harness.app, "/v1/completions", {"prompt": "ab", "stream": True})
    start = await call.next()
    assert b"x-radix-cached-tokens" not in dict(start["headers"])
    for _ in range(2):
        assert (await call.next())["body"] == b": keep-alive\n\n"
    request = engine.requests[0]
    stream = engine.streams[request.request_id]
    stream.push(engine.admitted(request, 0, Script()))
    stream.push(SequenceOutput(request.request_id, 0, [], finish_reason="error", error="x"))
    while (message := await call.next())["more_body"]:
        assert message["body"] == b": keep-alive\n\n"
    assert message["body"].startswith(b'data: {"error":')
    await call.end()


async def test_keep_alive_0_is_off(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script([70], hold=True))
    harness = Harness(engine, tokenizer, sse_keepalive=0)
    call = Call(harness.app, "/v1/completions", {"prompt": "ab", "stream": True})
    await call.next()
    generation = next(iter(harness.service.generations))
    assert generation.admitted
    assert call.num_unread == 0
    call.disconnect()
    await call.end()


async def test_tokens_that_came_together_go_out_in_one_event(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = Harness(engine, tokenizer)
    call = Call(harness.app, "/v1/completions", {"prompt": "ab", "stream": True})
    await call.next()
    request = engine.requests[0]
    stream = engine.streams[request.request_id]
    for token_id in tokenizer.encode("Hello", False):
        stream.push(SequenceOutput(request.request_id, 0, [token_id]))
    stream.push(SequenceOutput(request.request_id, 0, [1], finish_reason="stop", stop_token_id=1))
    body = (await call.next())["body"].decode()
    chunk = json.loads(body.removeprefix("data: ").strip())
    assert chunk["choices"][0]["text"] == "Hello"
    assert chunk["choices"][0]["finish_reason"] == "stop"
    await call.end()


async def test_engine_death_is_a_503_or_an_error_event(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(hold=True))
    harness = Harness(engine, tokenizer)
    stream = Call(harness.app, "/v1/completions", {"prompt": "ab", "stream": True})
    plain = Call(harness.app, "/v1/completions", {"prompt": "ab"})
    assert (await stream.next())["status"] == 200
    while len(engine.requests) < 2:
        await engine.submitted.wait()
        engine.submitted.clear()
    engine.die()
    assert b'"code":"engine_dead"' in (await stream.next())["body"]
    assert (await plain.next())["status"] == 503
    await stream.end()
    await plain.end()
    assert (await harness.get("/health")).status_code == 503
    assert (await harness.complete()).status_code == 503
    assert await harness.metric("radix_mla_requests_finished_total", reason="error") == 2
    assert await harness.metric("radix_mla_requests_running") == 0
