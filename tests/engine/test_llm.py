from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_checkpoint import make_checkpoint

from radix_mla import LLM, ContextOverflow, InvalidRequest, RadixMlaError, SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    # yarn off: transformers' own loader warns about the tiny checkpoint's factors
    path = make_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        vocab=300,
        tokenizer=True,
        yarn_factor=None,
        generation_config={"temperature": 0.0, "max_new_tokens": 7},
    )
    with LLM(path, kv_cache_tokens=2048, num_threads=1, workspace_tokens=512) as llm:
        yield llm


def test_texts_and_token_ids_run_in_one_batch_and_in_order(llm: LLM) -> None:
    outputs = llm.generate(["hello there", [5, 6, 7]], max_tokens=5, **GREEDY)
    assert [len(output.completions[0].token_ids) for output in outputs] == [5, 5]
    assert outputs[1].prompt_token_ids == [5, 6, 7]
    assert outputs[0].prompt_token_ids == llm.tokenizer.encode_prompt("hello there")
    for output in outputs:
        completion = output.completions[0]
        assert completion.finish_reason == "length"
        assert completion.text == output.text == llm.tokenizer.decode(completion.token_ids)


@pytest.mark.parametrize("prompt", ["hello there", [5, 6, 7]])
def test_a_single_prompt_gives_a_list_of_one(llm: LLM, prompt: str | list[int]) -> None:
    (output,) = llm.generate(prompt, max_tokens=2, **GREEDY)
    assert len(output.completions[0].token_ids) == 2


def test_the_second_time_it_hits(llm: LLM) -> None:
    prompt = list(range(20, 60))
    llm.generate(prompt, max_tokens=2, cache_salt="hits", **GREEDY)
    (again,) = llm.generate(prompt, max_tokens=2, cache_salt="hits", **GREEDY)
    assert again.num_cached_tokens == 39
    (elsewhere,) = llm.generate(prompt, max_tokens=2, cache_salt="x", **GREEDY)
    assert elsewhere.num_cached_tokens == 0
    (private,) = llm.generate(prompt, max_tokens=2, cache_salt="hits", cache_store=False, **GREEDY)
    assert private.num_cached_tokens == 0


@pytest.mark.parametrize("asked", [{}, {"cache_priority": 3}, {"cache_ttl": 600.0}], ids=str)
def test_rows_may_be_asked_to_stay_longer(llm: LLM, asked: dict[str, float]) -> None:
    llm.engine.flush()
    first, second = [5] * 40, [6] * 40
    llm.generate(first, max_tokens=2, **asked, **GREEDY)
    llm.generate(second, max_tokens=2, **GREEDY)
    pool = llm.engine.cache.num_pages * llm.engine.cache.page_size
    for token in range(7, 17):  # more than fits beside them
        llm.generate([token] * (pool // 10), max_tokens=2, **GREEDY)
    assert llm.engine.cache.peek(first) == (40 if asked else 0)
    assert llm.engine.cache.peek(second) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_ttl", 0.0),
        ("cache_ttl", -1.0),
        ("cache_ttl", 86_401.0),
        ("cache_ttl", float("nan")),
        ("cache_priority", -1),
        ("cache_priority", 11),
    ],
)
def test_retention_out_of_range_is_refused(llm: LLM, name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} is {value}") as caught:
        llm.generate([3], **{name: value})
    assert caught.value.param == name
    assert not llm.engine.has_work


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate([9, 8, 7], max_tokens=12, **GREEDY)
    text = whole.text
    stop = text[4:6]
    (cut,) = llm.generate([9, 8, 7], max_tokens=12, stop=[stop], **GREEDY)
    completion = cut.completions[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 12
    assert not llm.engine.has_work


def test_a_stop_string_does_not_count_below_min_tokens(llm: LLM) -> None:
    (whole,) = llm.generate([9, 8, 7], max_tokens=6, **GREEDY)
    stop = whole.text[:1]
    (later,) = llm.generate([9, 8, 7], max_tokens=6, min_tokens=6, stop=[stop], **GREEDY)
    assert later.completions[0].token_ids == whole.completions[0].token_ids


def test_a_stop_token_id_ends_it_and_is_no_text(llm: LLM) -> None:
    (whole,) = llm.generate([9, 8, 7], max_tokens=8, **GREEDY)
    ids = whole.completions[0].token_ids
    stop = next(i for i in ids[1:] if i not in ids[:1])
    (cut,) = llm.generate([9, 8, 7], max_tokens=8, stop_token_ids=(stop,), **GREEDY)
    completion = cut.completions[0]
    assert completion.token_ids == ids[: ids.index(stop) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == llm.tokenizer.decode(completion.token_ids[:-1])


def test_choices_and_logprobs(llm: LLM) -> None:
    (output,) = llm.generate(
        [4, 5, 6], n=3, temperature=1.0, seed=1, max_tokens=4, logprobs=2, prompt_logprobs=1
    )
    assert [completion.index for completion in output.completions] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    for completion in output.completions:
        assert len(completion.logprobs) == len(completion.token_ids)
    assert len(output.prompt_logprobs) == 3


def test_defaults_come_from_the_models_generation_config(llm: LLM) -> None:
    (one,) = llm.generate([4, 5, 6], max_tokens=6)
    (two,) = llm.generate([4, 5, 6], SamplingParams(max_tokens=6, temperature=0.0))
    assert one.completions[0].token_ids == two.completions[0].token_ids, "temperature 0"


def test_output_is_cut_to_the_room_left(llm: LLM) -> None:
    limit = llm.info["max_model_len"]
    (output,) = llm.generate([5] * (limit - 3), max_tokens=100, **GREEDY)
    assert len(output.completions[0].token_ids) == 3


def test_what_cannot_be_served_raises_and_nothing_runs(llm: LLM) -> None:
    limit = llm.info["max_model_len"]
    with pytest.raises(ContextOverflow, match=str(limit)):
        llm.generate([[1, 2], [5] * limit])
    with pytest.raises(InvalidRequest, match="prompt token ids"):
        llm.generate([[1, 2], [300]])
    with pytest.raises(InvalidRequest, match="not both"):
        llm.generate([1], SamplingParams(max_tokens=1), max_tokens=2)
    with pytest.raises(TypeError, match="no keyword 'tempature'"):
        llm.generate([1], tempature=0.1)
    for name, value in {
        "temperature": "hot",
        "top_k": True,
        "max_tokens": None,
        "cache_ttl": "5m",
        "cache_priority": 1.5,
    }.items():
        with pytest.raises(InvalidRequest, match=f"{name} is") as refused:
            llm.generate([1], **{name: value})
        assert refused.value.param == name
    assert not llm.engine.has_work


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole,) = llm.generate([7, 7, 7, 8], max_tokens=4, **GREEDY)
    execute = llm.engine._pipeline._runner.execute

    def interrupted(plan, drawn=None):
        if plan.chunks[0].is_decode:
            raise KeyboardInterrupt
        return execute(plan, drawn)

    monkeypatch.setattr(llm.engine._pipeline._runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([7, 7, 7, 8], max_tokens=4, **GREEDY)
    monkeypatch.undo()
    assert llm.engine.audit()["ok"]
    (again,) = llm.generate([7, 7, 7, 8], max_tokens=4, **GREEDY)
    assert again.completions[0].token_ids == whole.completions[0].token_ids


def test_without_a_tokenizer_only_token_ids_are_served(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    with LLM(path, kv_cache_tokens=512, num_threads=1, workspace_tokens=512) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([3, 4], max_tokens=2, **GREEDY)
        assert output.text is None
        assert len(output.completions[0].token_ids) == 2
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate("text")
        with pytest.raises(InvalidRequest, match="tokenizer"):
            llm.generate([3], stop=["x"])
        assert not llm.engine.has_work
    with pytest.raises(RadixMlaError, match="closed"):
        llm.generate([3])


@pytest.mark.parametrize("prompt", [[1.5], [True], [3, 2**40], [-1], [[[3]]]])
def test_what_is_no_token_id_is_refused_not_rounded(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([prompt])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 2.0),
        ("top_k", -3),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("logit_bias", {5: float("nan")}),
    ],
)
def test_sampling_values_without_meaning_are_refused(llm: LLM, name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=name):
        llm.generate([3], SamplingParams(**{"max_tokens": 1, name: value}))
    with pytest.raises(InvalidRequest, match=name):
        llm.generate([3], **{name: value})
    assert not llm.engine.has_work
