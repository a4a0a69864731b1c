from __future__ import annotations

import pytest
from support.scheduler_sim import make_request

from radix_mla.request import FinishReason
from radix_mla.scheduler.sequence import Sequence, Status


def make(prompt: list[int], max_tokens: int = 4, **fields) -> Sequence:
    index = fields.pop("index", 0)
    request = make_request("r", prompt, max_tokens, **fields)
    return Sequence(request, index, namespace="", order=0, eos_ids=frozenset({9}))


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ([], Status.WAITING),
        ([Status.RUNNING], Status.RUNNING),
        ([Status.FINISHED], Status.RUNNING),
        ([Status.RUNNING, Status.ABORTED], Status.WAITING),
        ([Status.RUNNING, Status.WAITING, Status.FAILED], Status.FINISHED),
    ],
)
def test_only_the_tables_transitions_are_allowed(path: list[Status], wrong: Status) -> None:
    seq = make([1])
    for status in path:
        seq.move_to(status)
    with pytest.raises(RuntimeError, match="r/0"):
        seq.move_to(wrong)


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.STOP, Status.FINISHED),
        (FinishReason.LENGTH, Status.FINISHED),
        (FinishReason.ABORT, Status.ABORTED),
        (FinishReason.ERROR, Status.FAILED),
    ],
)
def test_each_reason_has_its_terminal_state(reason: FinishReason, status: Status) -> None:
    seq = make([1])
    seq.end(reason)
    assert seq.status is status
    assert seq.has_ended


def test_tokens_grow_past_the_buffer() -> None:
    seq = make([1, 2], max_tokens=2000)
    generated = [token % 7 for token in range(1500)]
    for token in generated:
        assert seq.append(token) is None
    assert seq.tokens.tolist() == [1, 2, *generated]
    assert seq.num_generated == 1500


def test_the_last_token_ends_it_and_a_stop_id_wins_over_the_length() -> None:
    seq = make([1], max_tokens=2)
    assert seq.append(3) is None
    assert seq.append(3) is FinishReason.LENGTH
    seq = make([1], max_tokens=1)
    assert seq.append(9) is FinishReason.STOP


def test_ignore_eos_keeps_the_requests_own_stop_ids() -> None:
    seq = make([1], ignore_eos=True, stop_token_ids=(5,))
    assert seq.append(9) is None
    assert seq.append(5) is FinishReason.STOP


def test_rows_of_the_prompt_are_new_once() -> None:
    seq = make([1, 2, 3, 4, 5, 6])
    assert seq.advance(4) == 4
    seq.num_computed = 1  # as after a retraction that found one row
    assert seq.advance(5) == 2
    seq.append(3)
    assert seq.advance(1) == 0, "a generated token's row"


def test_lookup_ends_where_prompt_logprobs_are_missing() -> None:
    seq = make([1, 2, 3, 4], prompt_logprobs=0)
    assert seq.lookup_limit == 0
    seq.add_prompt_logprobs(1, ["a", "b"])  # type: ignore[list-item]
    assert seq.lookup_limit == 2
    seq.add_prompt_logprobs(1, ["x", "y", "c"])  # type: ignore[list-item]
    assert seq.prompt_logprobs == [None, "a", "b", "c"]
    assert seq.lookup_limit == 3
    assert make([1, 2, 3, 4], prompt_logprobs=0, index=1).lookup_limit == 3
