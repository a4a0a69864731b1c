"""The engine's loop over a fake model: faults stay with their request, and the books are kept."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.fake_model import Oracle
from support.fake_runner import FakeRunner, make_fake_engine
from support.scheduler_sim import VOCAB, make_request

from radix_mla.engine.engine import Engine
from radix_mla.engine.outputs import SequenceOutput
from radix_mla.engine.step import StepPlan, StepResult
from radix_mla.errors import AuditError, EngineError, InvalidRequest
from radix_mla.request import FinishReason
from radix_mla.sampling.sampler import Sampler


def add(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 4, **fields) -> None:
    fields.setdefault("temperature", 0.0)
    engine.add_request(make_request(request_id, prompt, max_tokens, **fields))


def run(engine: Engine, max_steps: int = 500) -> dict[str, list[SequenceOutput]]:
    """To the end of all work: the outputs of each request."""
    outputs: dict[str, list[SequenceOutput]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for output in engine.step().sequences:
            outputs.setdefault(output.request_id, []).append(output)
    assert not engine.has_work
    assert engine.audit()["ok"]
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def expected(prompt: list[int], max_tokens: int = 4) -> list[int]:
    return Oracle(VOCAB).generate(prompt, max_tokens, frozenset())


def test_a_request_runs_to_its_end() -> None:
    engine, _ = make_fake_engine()
    add(engine, "r", [1, 2, 3])
    outputs = run(engine)["r"]
    assert tokens(outputs) == expected([1, 2, 3])
    assert [output.finish_reason for output in outputs] == [None, None, None, "length"]


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31 - 1])
def test_a05_a_prompt_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    engine, _ = make_fake_engine()
    with pytest.raises(InvalidRequest, match=f"found .*{bad}"):
        add(engine, "r", [1, bad, 2])
    assert not engine.has_work


def raises_for(first_token: int) -> Callable[[StepPlan, StepResult], None]:
    def fault(plan: StepPlan, result: StepResult) -> None:
        if any(chunk.tokens[0] == first_token for chunk in plan.chunks):
            raise RuntimeError("kernel failed")

    return fault


def test_x10_a_step_that_raises_fails_its_sequences_and_the_engine_goes_on() -> None:
    engine, runner = make_fake_engine(max_num_batched_tokens=4)
    runner.fault = raises_for(7)
    add(engine, "bad", [7, 7, 7, 7])
    add(engine, "good", [1, 2, 3])
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert outputs["bad"][-1].error == "RuntimeError: kernel failed"
    assert tokens(outputs["good"]) == expected([1, 2, 3])


def test_steps_that_fail_again_and_again_end_the_engine() -> None:
    engine, runner = make_fake_engine(max_num_batched_tokens=4)
    runner.fault = raises_for(7)
    for i in range(5):
        add(engine, f"bad{i}", [7, 7, 7, 7])
    for _ in range(4):
        engine.step()
    with pytest.raises(EngineError, match=r"5 steps in a row failed.*kernel failed"):
        engine.step()


def test_a_good_step_between_failures_starts_the_count_again() -> None:
    engine, runner = make_fake_engine(max_num_batched_tokens=4)
    runner.fault = raises_for(7)
    for i in range(8):
        add(engine, "bad", [7, 7, 7, 7], 1)
        assert run(engine)["bad"][-1].finish_reason == "error"
        if i % 4 == 3:
            add(engine, "good", [1, 2, 3, 4], 1)
            assert tokens(run(engine)["good"]) == expected([1, 2, 3, 4], 1)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), torch.OutOfMemoryError("x")]
)
def test_a_device_error_ends_the_engine_at_once(error: Exception) -> None:
    engine, runner = make_fake_engine()

    def fault(plan: StepPlan, result: StepResult) -> None:
        raise error

    runner.fault = fault
    add(engine, "r", [1, 2])
    with pytest.raises(EngineError):
        engine.step()


def poison(runner: FakeRunner, first_token: int, *, logits: float | None) -> None:
    """Rows, or logits, of the chunk that begins with `first_token` are not finite."""

    def fault(plan: StepPlan, result: StepResult) -> None:
        row = 0
        for i, chunk in enumerate(plan.chunks):
            row += chunk.num_logits
            if chunk.tokens[0] == first_token:
                if logits is None:
                    result.rows_finite[i] = False
                elif chunk.num_logits:
                    result.logits[row - 1, 5] = logits

    runner.fault = fault


@pytest.mark.parametrize("logits", [None, np.nan, np.inf])
def test_values_that_are_not_finite_fail_one_request_and_are_never_reused(
    logits: float | None,
) -> None:
    engine, runner = make_fake_engine()
    poison(runner, 7, logits=logits)
    add(engine, "bad", [7, 8, 9, 10, 11])
    add(engine, "good", [1, 2, 3])
    outputs = run(engine)
    assert outputs["bad"][-1].finish_reason == "error"
    assert "finite" in outputs["bad"][-1].error
    assert tokens(outputs["good"]) == expected([1, 2, 3])
    assert engine.stats().nonfinite_requests == 1
    runner.fault = None
    before = runner.model.num_computed_tokens
    add(engine, "again", [7, 8, 9, 10, 11])
    assert tokens(run(engine)["again"]) == expected([7, 8, 9, 10, 11])
    assert runner.model.num_computed_tokens - before == 5 + 3, "computed afresh"


class FaultySampler(Sampler):
    """Raises for one request, as a bad mask or an index error would."""

    def _sample_one(self, rows, item):
        if item.sequence.request_id == "bad":
            raise IndexError("injected")
        return super()._sample_one(rows, item)


def test_x10_an_exception_in_sampling_fails_that_request_only() -> None:
    engine, _ = make_fake_engine(sampler=FaultySampler(VOCAB))
    for request_id in ("a", "bad", "b"):
        add(engine, request_id, [1, 2, 3])
    outputs = run(engine)
    assert outputs["bad"][-1].error == "IndexError: injected"
    assert tokens(outputs["a"]) == tokens(outputs["b"]) == expected([1, 2, 3])


def test_x10_a_sampler_that_raises_for_the_whole_step_fails_the_step() -> None:
    class Broken(Sampler):
        def sample(self, logits, work):
            raise IndexError("injected")

    engine, _ = make_fake_engine(sampler=Broken(VOCAB))
    add(engine, "r", [1, 2])
    assert run(engine)["r"][-1].error == "IndexError: injected"


def test_an_abort_outside_a_step_is_told_at_once() -> None:
    engine, _ = make_fake_engine()
    add(engine, "r", [1, 2], n=2)
    engine.step()
    engine.abort("r", 1, FinishReason.STOP)
    (output,) = engine.take_events().sequences
    assert (output.index, output.finish_reason) == (1, "stop")
    run(engine)


def test_a_flush_while_busy_leaves_running_requests_right() -> None:
    engine, _ = make_fake_engine()
    prompt = list(range(40))
    add(engine, "r", prompt, 8)
    engine.step()
    assert engine.flush() == 32
    assert tokens(run(engine)["r"]) == expected(prompt, 8)
    add(engine, "again", prompt, 1)
    (admitted,) = engine.step().admitted
    assert admitted.num_cached_tokens == 0


def test_the_statistics_add_up() -> None:
    engine, _ = make_fake_engine()
    add(engine, "a", [1] * 40, 3)
    add(engine, "b", [2] * 5, 3)
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting["budget"]) == (1, 1)
    assert sum(stats.kv_slots.values()) == stats.kv_slots_total == 256
    run(engine)
    stats = engine.stats()
    assert stats.num_running == 0
    assert stats.kv_slots["protected"] == stats.kv_slots["private"] == 0
    assert stats.prefill_tokens == {"computed": 45, "recomputed": 0, "device": 0}
    assert stats.attention_path_tokens == {"fake": 45 + 4}
    assert stats.num_steps == 4
    assert stats.step_s >= stats.last_step_s >= 0


def test_an_audit_that_fails_is_reported_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_fake_engine()

    def broken() -> None:
        raise AuditError("page 3 is in two places")

    monkeypatch.setattr(engine.cache, "audit", broken)
    report = engine.audit()
    assert report["ok"] is False
    assert report["error"] == "page 3 is in two places"
    assert engine.stats().audit_failures == 1


def test_idle_audits_are_throttled_and_follow_steps_only() -> None:
    now = [0.0]
    engine, _ = make_fake_engine(clock=lambda: now[0])
    audits = []
    check = engine.cache.audit
    engine.cache.audit = lambda: audits.append(check())  # type: ignore[method-assign]
    engine.audit_when_idle()
    now[0] = 100.0
    engine.audit_when_idle()
    assert not audits, "no step since the start"
    add(engine, "r", [1], 1)
    engine.step()
    engine.audit_when_idle()
    engine.audit_when_idle()
    assert len(audits) == 1
    add(engine, "r", [1], 1)
    engine.step()
    engine.audit_when_idle()
    assert len(audits) == 1, "too soon"
