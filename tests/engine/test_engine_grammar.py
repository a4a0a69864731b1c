"""Requests with a grammar in the engine: they wait for it, others do not; refusals are typed."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
from support.fake_runner import make_fake_engine
from support.scheduler_sim import VOCAB, make_request

from radix_mla.engine.engine import Engine
from radix_mla.engine.outputs import SequenceOutput
from radix_mla.errors import InvalidRequest
from radix_mla.request import Grammar

EVEN = Grammar("regex", "even")


class EvenMatcher:
    """Allows even ids."""

    def accept(self, token_id: int) -> bool:
        return token_id % 2 == 0

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0x55555555

    def reset(self) -> None:
        pass


class EvenGrammar:
    eos_ids = ()
    forbidden = np.zeros(-(-VOCAB // 32), dtype=np.int32)

    def matcher(self) -> EvenMatcher:
        return EvenMatcher()


class FakeCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.futures: list[Future] = []

    def compile(self, grammar: Grammar) -> Future:
        self.futures.append(Future())
        return self.futures[-1]


@pytest.fixture
def compiler() -> FakeCompiler:
    return FakeCompiler()


@pytest.fixture
def engine(compiler: FakeCompiler) -> Engine:
    engine, _ = make_fake_engine()
    engine._grammars = compiler  # type: ignore[assignment]
    return engine


def steps(engine: Engine, num: int = 40) -> dict[tuple[str, int], list[SequenceOutput]]:
    found: dict[tuple[str, int], list[SequenceOutput]] = {}
    for _ in range(num):
        for output in engine.step().sequences:
            found.setdefault((output.request_id, output.index), []).append(output)
    return found


def test_it_waits_for_its_grammar_and_nobody_else_does(engine: Engine, compiler) -> None:
    engine.add_request(make_request("g", [1, 2, 3], 4, n=2, temperature=0.0, grammar=EVEN))
    engine.add_request(make_request("other", [1, 2, 4], 4, temperature=0.0))
    assert engine.stats().num_waiting["grammar"] == 2
    found = steps(engine)
    assert [output.finish_reason for output in found["other", 0]][-1] == "length"
    assert ("g", 0) not in found
    assert engine.stats().num_waiting == {"slots": 0, "budget": 0, "sibling": 0, "grammar": 2}
    compiler.futures[0].set_result(EvenGrammar())
    found = steps(engine)
    for index in range(2):
        tokens = [token for output in found["g", index] for token in output.token_ids]
        assert len(tokens) == 4
        assert all(token % 2 == 0 for token in tokens)
    assert sum(engine.stats().num_waiting.values()) == 0
    assert engine.audit()["ok"]


def test_a_refused_grammar_ends_all_choices_as_the_clients_fault(engine: Engine, compiler) -> None:
    engine.add_request(make_request("g", [1, 2, 3], 4, n=2, grammar=EVEN))
    compiler.futures[0].set_exception(InvalidRequest("no such thing"))
    found = steps(engine, 1)
    for index in range(2):
        (output,) = found["g", index]
        assert (output.finish_reason, output.rejected, output.error) == (
            "error",
            True,
            "no such thing",
        )
    assert not engine.has_work
    assert engine.stats().num_waiting["grammar"] == 0


def test_a_broken_compiler_is_our_fault(engine: Engine, compiler: FakeCompiler) -> None:
    engine.add_request(make_request("g", [1, 2, 3], 4, grammar=EVEN))
    compiler.futures[0].set_exception(OSError("no processes left"))
    (output,) = steps(engine, 1)["g", 0]
    assert output.finish_reason == "error"
    assert not output.rejected


def test_an_abort_while_compiling(engine: Engine, compiler: FakeCompiler) -> None:
    engine.add_request(make_request("g", [1, 2, 3], 4, n=2, grammar=EVEN))
    engine.abort("g", 0)
    engine.abort("g")
    assert engine.stats().num_waiting["grammar"] == 0
    engine.add_request(make_request("g", [1, 2, 3], 4, temperature=0.0))  # the id is free again
    compiler.futures[0].set_result(EvenGrammar())
    found = steps(engine)
    assert found["g", 0][-1].finish_reason == "length"
    assert not engine.has_work


def test_retracted_sequences_go_on_in_their_grammar(compiler: FakeCompiler) -> None:
    engine, _ = make_fake_engine(num_pages=12, min_reserve_steps=0)
    engine._grammars = compiler  # type: ignore[assignment]
    for i in range(3):
        request = make_request(str(i), [i + 1, 2, 3], 20, temperature=0.0, grammar=EVEN)
        engine.add_request(request)
        compiler.futures[i].set_result(EvenGrammar())
    found = steps(engine, 200)
    assert engine.stats().retractions > 0
    for outputs in found.values():
        tokens = [token for output in outputs for token in output.token_ids]
        assert len(tokens) == 20
        assert all(token % 2 == 0 for token in tokens)


def test_an_engine_without_grammars_refuses_them() -> None:
    engine, _ = make_fake_engine()
    with pytest.raises(InvalidRequest):
        engine.add_request(make_request("g", [1, 2, 3], 4, grammar=EVEN))
    assert not engine.has_work
