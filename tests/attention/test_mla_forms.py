"""Every form of MLA attention against one fp64 answer, over a NaN-poisoned pool."""

from __future__ import annotations

import random
from typing import get_args

import pytest
import torch
from support.assert_close import assert_within_plain
from support.mla_case import ODD, TRUE, WIDE_V, MLACase, make_case

from radix_mla.attention.backends.torch import TorchBackend
from radix_mla.attention.forms import Form

FORMS = get_args(Form)


def check(case: MLACase, form: Form | None, *, workspace_rows: int = 4096, **kwargs: object) -> int:
    """Returns the number of context chunks."""
    backend = kwargs.get("backend")
    assert backend is None or isinstance(backend, TorchBackend)
    out, plan = case.run(form, workspace_rows=workspace_rows, backend=backend)
    assert_within_plain(out, case.answer(torch.float32), case.answer(), atol=5e-6)
    return plan.num_context_chunks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "sequences",
    [
        [(1, 0)],
        [(63, 0)],
        [(1, 63)],
        [(7, 500)],
        [(60, 4), (1, 128), (16, 16)],
        [(5, 0), (3, 400), (2, 0), (9, 77), (4, 0)],
    ],
    ids=str,
)
@pytest.mark.parametrize("dims", [ODD, WIDE_V], ids=["odd", "wide_v"])
def test_form(form: Form, sequences: list[tuple[int, int]], dims: object) -> None:
    assert dims in (ODD, WIDE_V)
    check(make_case(sequences, dims=ODD if dims is ODD else WIDE_V), form)


@pytest.mark.parametrize("form", FORMS)
def test_true_dimensions(form: Form) -> None:
    check(make_case([(17, 100), (1, 33)], dims=TRUE, page_size=16), form, workspace_rows=64)


@pytest.mark.parametrize("workspace_rows", [1, 7, 64, 100, 128])
def test_many_context_chunks_with_a_ragged_last_one(workspace_rows: int) -> None:
    case = make_case([(5, 0), (6, 201), (1, 0), (3, 90)], page_size=16)
    chunks = check(case, "non_absorbed", workspace_rows=workspace_rows)
    assert chunks == -(-291 // workspace_rows)


@pytest.mark.parametrize("workspace_rows", [32, 64])
@pytest.mark.parametrize("context", [32, 64, 128])
def test_context_is_an_exact_multiple_of_page_and_chunk(workspace_rows: int, context: int) -> None:
    case = make_case([(16, context), (16, 0)], page_size=16)
    for form in FORMS:
        check(case, form, workspace_rows=workspace_rows)


def test_one_shot_that_does_not_fit_is_chunked() -> None:
    case = make_case([(6, 100), (6, 4)])
    out, plan = case.run("one_shot", workspace_rows=64)
    assert plan.paths == {"non_absorbed": 6, "one_shot": 6}
    assert_within_plain(out, case.answer(torch.float32), case.answer(), atol=5e-6)


def test_one_shot_requests_share_the_workspace() -> None:
    case = make_case([(6, 20), (6, 4), (30, 30), (1, 9)])
    _, plan = case.run("one_shot", workspace_rows=64)
    assert plan.one_shot is not None
    assert [part.work.num_queries for part in plan.one_shot.passes] == [12, 30, 1]
    check(case, "one_shot", workspace_rows=64)


def test_forms_agree_for_random_batches() -> None:
    rng = random.Random(7)
    for seed in range(12):
        batch = [(rng.choice([1, 2, 9, 40]), rng.choice([0, 1, 63, 130])) for _ in range(4)]
        case = make_case(batch, seed=seed, page_size=rng.choice([1, 4, 16]))
        outs = [case.run(form, workspace_rows=97)[0] for form in FORMS]
        for out in outs[1:]:
            torch.testing.assert_close(out, outs[0], atol=2e-5, rtol=2e-5)


def test_different_forms_in_one_step() -> None:
    case = make_case([(1, 300), (400, 0), (2, 500), (300, 200), (1, 7)], dims=TRUE, page_size=16)
    out, plan = case.run(None)
    assert plan.paths == {"absorbed": 4, "non_absorbed": 400, "one_shot": 300}
    assert_within_plain(out, case.answer(torch.float32), case.answer(), atol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_matmul_path(form: Form) -> None:
    case = make_case([(5, 0), (3, 70), (33, 9)])
    check(case, form, workspace_rows=50, backend=TorchBackend("cpu", flash=False))


@pytest.mark.parametrize("form", FORMS)
def test_new_rows_are_read_as_stored(form: Form) -> None:
    """bf16 rows under fp32 arithmetic: the answer is that of the rounded rows, in every form."""
    case = make_case([(33, 50)], kv_dtype="bf16", page_size=16)
    out, _ = case.run(form)
    torch.testing.assert_close(out, case.answer().float(), atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("form", FORMS)
def test_bf16(form: Form) -> None:
    case = make_case([(33, 50), (1, 40)], kv_dtype="bf16", dtype=torch.bfloat16, page_size=16)
    out, _ = case.run(form)
    assert out.dtype == torch.bfloat16
    assert_within_plain(out, case.answer(torch.bfloat16), case.answer(), atol=2e-2)


@pytest.mark.parametrize("form", FORMS)
def test_a_bad_sequence_spoils_only_itself(form: Form) -> None:
    case = make_case([(3, 40), (4, 30), (2, 0)])
    case.rows[3:7] = float("nan")
    out, _ = case.run(form, workspace_rows=48)
    assert torch.isfinite(out[:3]).all()
    assert torch.isfinite(out[7:]).all()
    assert out[3:7].isnan().any()


def test_decode_is_absorbed_even_if_another_form_is_forced() -> None:
    case = make_case([(1, 40), (1, 3)], decode=True)
    _, plan = case.run("non_absorbed")
    assert plan.paths == {"absorbed": 2}
