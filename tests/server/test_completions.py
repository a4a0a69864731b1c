"""POST /v1/completions: shapes, text, token ids, batches, echo, n, lengths."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine, Script
from support.http_app import FACTS, Harness

from radix_mla.text.tokenizer import Tokenizer


def _says(tokenizer: Tokenizer, text: str, **script: object) -> FakeEngine:
    ids = [*tokenizer.encode(text, add_special_tokens=False), 1]
    return FakeEngine(lambda request, index: Script(ids, "stop", 1, **script))


async def test_the_whole_answer(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "Hi 🙂", cached=1), tokenizer)
    response = await harness.complete(prompt="ab", max_tokens=20)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("system_fingerprint").startswith("radix-mla-")
    assert body == {
        "object": "text_completion",
        "model": "demo",
        "choices": [
            {
                "index": 0,
                "text": "Hi 🙂",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": 1,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 8,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
            "prompt_cache_hit_tokens": 1,
            "prompt_cache_miss_tokens": 2,
        },
    }
    assert response.headers["x-radix-cached-tokens"] == "1"
    assert response.headers["x-radix-max-tokens"] == "20"


async def test_token_id_prompts_are_passed_on_untouched(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(prompt=[7, 0, 399])
    assert harness.engine.requests[0].prompt_tokens.tolist() == [7, 0, 399]


async def test_a11_text_prompts_get_one_bos(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(prompt="a")
    await harness.complete(prompt="<|begin_of_sentence|>a")
    await harness.complete(prompt="a", add_special_tokens=False)
    prompts = [request.prompt_tokens.tolist() for request in harness.engine.requests]
    assert prompts[0] == prompts[1] == [0, *prompts[2]]
    assert 0 not in prompts[2]


async def test_batches_are_flattened_and_usage_is_summed(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.complete(prompt=["a", "bc"], n=2, max_tokens=2)
    body = response.json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["usage"]["completion_tokens"] == 8
    assert [request.n for request in harness.engine.requests] == [2, 2]


async def test_t15_choices_keep_their_own_text_and_reason(tokenizer: Tokenizer) -> None:
    texts = ["one", "two END x", "three"]

    def script(request: object, index: int) -> Script:
        ids = tokenizer.encode(texts[index], add_special_tokens=False)
        return Script(ids, "length" if index else "stop", None if index else ids[-1])

    harness = Harness(FakeEngine(script), tokenizer)
    response = await harness.complete(prompt="a", n=3, max_tokens=50, stop="END", seed=5)
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert choices[1]["text"] == "two "
    assert choices[2]["text"] == "three"
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop", "length"]
    assert choices[1]["stop_reason"] == "END"
    assert response.json()["usage"]["prompt_tokens"] == 2
    assert [(index, why) for _, index, why in harness.engine.aborts] == [(1, "stop")]


async def test_echo_puts_the_prompt_in_front(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "world"), tokenizer)
    response = await harness.complete(prompt="Hello ", echo=True)
    assert response.json()["choices"][0]["text"] == "Hello world"


async def test_max_tokens_0_with_echo_scores_the_prompt(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.complete(prompt="ab", echo=True, max_tokens=0, logprobs=1)
    body = response.json()
    assert body["choices"][0]["text"] == "ab"
    assert body["choices"][0]["finish_reason"] == "length"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 3
    assert body["usage"]["completion_tokens"] == 0
    assert harness.engine.requests[0].params.max_tokens == 1


async def test_return_token_ids(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "a"), tokenizer)
    choice = (await harness.complete(prompt="a", return_token_ids=True)).json()["choices"][0]
    assert choice["token_ids"] == [*tokenizer.encode("a", False), 1]
    assert choice["prompt_token_ids"] == tokenizer.encode("a")


async def test_sampling_fields_reach_the_engine(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=-3,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"3": -100},
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=2,
        max_tokens=7,
        priority=-2,
        cache_store=False,
        cache_salt="tenant-a",
    )
    request = harness.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.presence_penalty, params.frequency_penalty) == (1.0, -1.5)
    assert (params.repetition_penalty, params.logit_bias) == (1.2, {3: -100.0})
    assert (params.stop_token_ids, params.ignore_eos) == ((9,), True)
    assert (params.min_tokens, params.max_tokens) == (2, 7)
    assert 0 <= params.seed < 2**63
    assert (request.priority, request.store, request.namespace) == (-2, False, "tenant-a")


async def test_each_request_without_a_seed_gets_its_own(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    for _ in range(2):
        await harness.complete()
    first, second = (request.params.seed for request in harness.engine.requests)
    assert first != second


async def test_a13_zero_and_tiny_temperatures_are_greedy(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    for temperature in (0, 1e-9, 1e-4):
        await harness.complete(temperature=temperature)
    assert [request.params.temperature for request in harness.engine.requests] == [0.0] * 3


async def test_top_k_off_is_zero(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    for top_k in (0, -1):
        assert (await harness.complete(top_k=top_k)).status_code == 200
    assert [request.params.top_k for request in harness.engine.requests] == [0, 0]


@pytest.mark.parametrize(
    ("length", "max_tokens", "effective"),
    [(1, None, 16), (127, 1, 1), (127, 2, 1), (100, 28, 28), (100, 29, 28), (100, 10**6, 28)],
)
async def test_a14_max_tokens_is_cut_to_the_room_left(
    tokenizer: Tokenizer, length: int, max_tokens: int | None, effective: int
) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.complete(prompt=[5] * length, max_tokens=max_tokens)
    assert response.status_code == 200
    assert response.headers["x-radix-max-tokens"] == str(effective)
    assert harness.engine.requests[0].params.max_tokens == effective


@pytest.mark.parametrize("length", [128, 129, 1000])
async def test_a14_s02_a_prompt_that_fills_the_context_is_refused(
    tokenizer: Tokenizer, length: int
) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.complete(prompt=[5] * length, max_tokens=4)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"This model's maximum context length is {FACTS.max_model_len} tokens. However, you "
        f"requested {length + 4} tokens ({length} in the messages, 4 in the completion). "
        "Please reduce the length of the messages."
    )
    assert harness.engine.requests == []


async def test_strict_max_tokens_refuses_in_place_of_cutting(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer, strict_max_tokens=True)
    assert (await harness.complete(prompt=[5] * 100, max_tokens=28)).status_code == 200
    response = await harness.complete(prompt=[5] * 100, max_tokens=29)
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_minus_one_and_n_predict_are_other_spellings(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    for body in ({"max_tokens": -1}, {"n_predict": 3}, {"max_tokens": 9, "n_predict": 4}):
        await harness.complete(**body)
    assert [request.params.max_tokens for request in harness.engine.requests] == [16, 3, 4]


async def test_stop_strings_over_token_borders(tokenizer: Tokenizer) -> None:
    harness = Harness(_says(tokenizer, "The brave fox"), tokenizer)
    choice = (await harness.complete(stop=["ave f"], max_tokens=50)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "The br",
        "stop",
        "ave f",
    )
    kept = await harness.complete(stop="ave f", max_tokens=50, include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == "The brave f"


async def test_min_tokens_counts_for_stop_strings_too(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(lambda request, index: Script(tokenizer.encode("a b a b", False)))
    harness = Harness(engine, tokenizer)
    body = {"stop": "a", "max_tokens": 50}
    assert (await harness.complete(**body)).json()["choices"][0]["text"] == ""
    later = await harness.complete(**body, min_tokens=3)
    assert later.json()["choices"][0]["text"].startswith("a b")


async def test_the_stop_token_is_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", False)
    engine = FakeEngine(lambda request, index: Script(ids, "stop", ids[-1]))
    harness = Harness(engine, tokenizer)
    plain = await harness.complete(stop_token_ids=[ids[-1]], max_tokens=9)
    assert plain.json()["choices"][0]["text"] == "a"
    assert plain.json()["usage"]["completion_tokens"] == 2
    kept = await harness.complete(
        stop_token_ids=[ids[-1]], max_tokens=9, include_stop_str_in_output=True
    )
    assert kept.json()["choices"][0]["text"] == "ab"


async def test_cache_prompt_false_skips_the_lookup(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    await harness.complete(cache_prompt=False)
    assert harness.engine.requests[0].store is False


async def test_request_id_and_service_tier_are_echoed(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer=tokenizer)
    response = await harness.complete(request_id="my-1", service_tier="flex", model="demo-alias")
    body = response.json()
    assert (body["id"], body["service_tier"], body["model"]) == (
        "cmpl-my-1",
        "default",
        "demo-alias",
    )
    assert response.headers["x-request-id"] == "cmpl-my-1"


async def test_a_model_without_tokenizer_serves_token_ids_only() -> None:
    harness = Harness()
    answer = await harness.complete(prompt=[1, 2], return_token_ids=True, logprobs=1)
    choice = answer.json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("", [72, 105])
    assert choice["logprobs"]["tokens"] == ["token_id:72", "token_id:105"]
    for response in (
        await harness.complete(prompt="text"),
        await harness.chat(),
        await harness.complete(prompt=[1], stop="x"),
        await harness.post("/tokenize", {"prompt": "x"}),
    ):
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "no_tokenizer"


async def test_without_tokenizer_every_token_is_an_event() -> None:
    harness = Harness()
    response = await harness.complete(prompt=[1, 2], stream=True)
    assert response.text.count('"text":""') == 2
