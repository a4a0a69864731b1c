from __future__ import annotations

import pytest
from support.scheduler_sim import make_request

from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.scheduler.budget import GrowthReserve, Limits
from radix_mla.scheduler.sequence import Sequence


def limits(**fields) -> Limits:
    known = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        "page_size": 4,
        "num_pages": 32,
    }
    return Limits(**(known | fields))


def running(cache: PrefixCache, num_prompt: int, max_tokens: int, rows: int) -> Sequence:
    seq = Sequence(make_request("r", [1] * num_prompt, max_tokens), 0, namespace="", order=0)
    lease = cache.acquire(seq.tokens, "")
    cache.grow(lease, rows)
    seq.admit(lease)
    return seq


@pytest.mark.parametrize(
    ("max_model_len", "num_pages", "expected"), [(100, 32, 99), (200, 32, 124), (125, 32, 124)]
)
def test_context_and_pool_both_bound_a_prompt(
    max_model_len: int, num_pages: int, expected: int
) -> None:
    asked = limits(max_model_len=max_model_len, num_pages=num_pages)
    assert asked.max_prompt_tokens == expected


@pytest.mark.parametrize(("max_tokens", "expected"), [(1, 4 + 1), (2, 5 + 1), (5, 5 + 1)])
def test_the_worst_case_has_no_row_for_the_last_token_but_a_source(
    max_tokens: int, expected: int
) -> None:
    seq = Sequence(make_request("r", [1] * 16, max_tokens), 0, namespace="", order=0)
    assert limits().worst_case_pages(seq) == expected


def test_the_reserve_doubles_with_a_retraction_and_shrinks_without() -> None:
    reserve = GrowthReserve(limits(min_reserve_steps=8))
    assert reserve.steps == 16
    reserve.after_step(retracted=True)
    assert reserve.steps == 32
    for _ in range(200):
        reserve.after_step(retracted=False)
    assert reserve.steps == 8
    for _ in range(20):
        reserve.after_step(retracted=True)
    assert reserve.steps == 512


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "rows", "expected"),
    [
        (40, 100, 8, 14 - 2),  # 56 rows with 16 steps; 2 pages are there
        (40, 5, 40, 1),  # 44 rows at most
        (40, 1, 40, 0),  # the last token has no row
        (2, 100, 24, 0),  # more is there than it will need soon
    ],
)
def test_the_reserve_is_the_rest_of_the_prefill_and_some_decode_steps(
    num_prompt: int, max_tokens: int, rows: int, expected: int
) -> None:
    cache = PrefixCache(32, 4, seed=1)
    seq = running(cache, num_prompt, max_tokens, rows)
    assert GrowthReserve(limits()).pages([seq]) == expected
