"""Constrained output on the demo model: every answer is valid, nearly every one ends by itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jsonschema
import numpy as np
import pytest
from support.schema_cases import random_schema

from radix_mla.llm import LLM
from radix_mla.request import Grammar, Request, SamplingParams
from server.openai.json_schema import prepare_schema

pytest.importorskip("xgrammar")
DEMO = Path(__file__).parents[2] / "configs" / "demo"
MAX_TOKENS = 512


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, num_threads=1, kv_cache_tokens=65536) as llm:
        yield llm


def answers(llm: LLM, schemas: list[dict]) -> list[tuple[str, str]]:
    """(text, finish reason) of each schema, all in one batch, every other one at temperature 1."""
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode("<｜User｜>Tell me about the weather.<｜Assistant｜>")
    engine = llm.engine
    for i, schema in enumerate(schemas):
        params = SamplingParams(
            max_tokens=MAX_TOKENS,
            temperature=float(i % 2),
            seed=i,
            grammar=Grammar("json_schema", prepare_schema(schema)),
        )
        data = np.asarray(prompt, dtype="<i4").tobytes()
        engine.add_request(Request(request_id=str(i), prompt=data, params=params))
    ids: dict[str, list[int]] = {str(i): [] for i in range(len(schemas))}
    reasons: dict[str, str] = {}
    while engine.has_work:
        for output in engine.step().sequences:
            assert output.error is None
            ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    return [(llm.tokenizer.decode(ids[key]), reasons[key]) for key in ids]


def check(llm: LLM, num: int, seed: int) -> None:
    rng = Random(seed)
    schemas = [random_schema(rng) for _ in range(num)]
    found = Counter()
    for schema, (text, reason) in zip(schemas, answers(llm, schemas), strict=True):
        found[reason] += 1
        if reason == "stop":
            jsonschema.validate(json.loads(text), schema)
    print(f"{num} schemas of seed {seed}: {dict(found)}, all that ended are valid")
    assert found.keys() <= {"stop", "length"}
    assert found["stop"] >= 0.9 * num, found
    assert llm.engine.audit()["ok"]


def test_forty_schemas(llm: LLM) -> None:
    check(llm, 40, seed=1)


@pytest.mark.slow
def test_three_hundred_schemas(llm: LLM) -> None:
    for seed in range(3):
        check(llm, 100, seed=10 + seed)
