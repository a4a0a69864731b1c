"""The grammar compiler: kinds, refusals, limits; on the demo model's vocabulary."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import psutil
import pytest
from support.server_process import wait_for

from radix_mla.errors import EngineError, InvalidRequest
from radix_mla.request import Grammar
from radix_mla.sampling.grammar import CompiledGrammar, GrammarCompiler
from radix_mla.sampling.grammar_compile import choice_grammar
from radix_mla.sampling.grammar_worker import readable
from radix_mla.text.tokenizer import Tokenizer

pytest.importorskip("xgrammar")
DEMO = Path(__file__).parents[2] / "configs" / "demo"
EOS = 1
# Both were seen to take tens of seconds.
HOSTILE = (
    Grammar("json_schema", '{"items":' * 2000 + "{}" + "}" * 2000),
    Grammar("json_schema", r'{"type": "string", "pattern": "^([^a]|\\\\[a-z]){0,5000}$"}'),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer.from_dir(DEMO)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    # The time limit is tested below; a busy machine must not fail the others.
    compiler = GrammarCompiler(str(DEMO), eos_ids=[EOS], vocab_size=tokenizer.size, timeout_s=20)
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def strict(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    """With a time limit, and its worker there."""
    compiler = GrammarCompiler(str(DEMO), eos_ids=[EOS], vocab_size=tokenizer.size, timeout_s=2)
    compiler.compile(Grammar("choice", '["a"]')).result(60)
    yield compiler
    compiler.close()


def allowed(compiled: CompiledGrammar, ids: list[int]) -> set[int]:
    """What can follow `ids`."""
    matcher = compiled.matcher()
    for token_id in ids:
        assert matcher.accept(token_id), token_id
    mask = np.zeros(len(compiled.forbidden), dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def is_whole(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    matcher = compiled.matcher()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.accept(i) for i in ids) and matcher.accept(EOS)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_object"), '{"a": [1, "b"]}', "[1]"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 3}'), "17", "2"),
        (Grammar("regex", "[a-z]{2}-(x|y)"), "ab-x", "ab-z"),
        (Grammar("choice", json.dumps(["yes", 'say "no"', "größe"])), 'say "no"', "maybe"),
        (Grammar("choice", json.dumps(["größe\n", "b"])), "größe\n", "größe"),
        (Grammar("ebnf", 'root ::= "a" | "b" root'), "bba", "bb"),
        (Grammar("ebnf", 'start: "a" | "b" start'), "bba", "bb"),
        (
            Grammar(
                "structural_tag",
                json.dumps(
                    {
                        "type": "structural_tag",
                        "format": {
                            "type": "tag",
                            "begin": "<x>",
                            "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                            "end": "</x>",
                        },
                    }
                ),
            ),
            "<x>null</x>",
            "<x>1</x>",
        ),
    ],
)
def test_kinds(compiler, tokenizer: Tokenizer, grammar: Grammar, good: str, bad: str) -> None:
    compiled = compiler.compile(grammar).result(60)
    assert is_whole(compiled, tokenizer, good)
    assert not is_whole(compiled, tokenizer, bad)


def test_after_the_end_there_is_only_the_end_token(compiler, tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(Grammar("choice", '["ab"]')).result(60)
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert EOS not in allowed(compiled, ids[:-1])
    assert allowed(compiled, ids) == {EOS}
    assert allowed(compiled, [*ids, EOS]) == set()


def test_a_reset_matcher_begins_again(compiler, tokenizer: Tokenizer) -> None:
    compiled = compiler.compile(Grammar("choice", '["ab"]')).result(60)
    ids = tokenizer.encode("ab", add_special_tokens=False)
    matcher = compiled.matcher()
    assert matcher.accept(ids[0])
    matcher.reset()
    assert all(matcher.accept(token_id) for token_id in ids)


def test_special_tokens_are_allowed_only_where_they_are_named(compiler, tokenizer) -> None:
    special = tokenizer.special_ids
    text = compiler.compile(Grammar("regex", ".*")).result(60)
    assert not allowed(text, []) & (special - {EOS})
    marker = tokenizer.hf.convert_tokens_to_ids("<think>")
    by_id = {"type": "structural_tag", "format": {"type": "token", "token": marker}}
    compiled = compiler.compile(Grammar("structural_tag", json.dumps(by_id))).result(60)
    assert allowed(compiled, []) == {marker}


def test_json_strings_hold_no_raw_control_characters(compiler, tokenizer: Tokenizer) -> None:
    schema = json.dumps({"type": "string", "maxLength": 5})
    compiled = compiler.compile(Grammar("json_schema", schema)).result(60)
    quote = tokenizer.encode('"', add_special_tokens=False)
    for token_id in allowed(compiled, quote):
        assert not any(byte < 0x20 for byte in tokenizer.token_bytes(token_id))


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (Grammar("regex", "a(?!b)"), "Lookahead"),
        (Grammar("regex", r"\Aab"), "not recognized"),
        (Grammar("regex", "("), "parenthesis"),
        (Grammar("ebnf", "root ::= nowhere"), "nowhere"),
        (Grammar("ebnf", "root ::= root root"), "no text matches"),
        (Grammar("ebnf", "nonsense"), "cannot be used"),
        (Grammar("json_schema", '{"$ref": "#/$defs/x"}'), "defs"),
        (Grammar("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'), "oneOf"),
        (Grammar("json_schema", '{"type": "number", "multipleOf": 0.5}'), "multipleOf"),
        (Grammar("json_schema", "{"), "cannot be used"),
        (Grammar("structural_tag", "{"), "cannot be used"),
        (Grammar("regex", "a" * 300_000), "longer than 256 KiB"),
    ],
)
def test_what_cannot_be_enforced_is_the_clients_fault(compiler, grammar: Grammar, why: str) -> None:
    with pytest.raises(InvalidRequest, match=why) as caught:
        compiler.compile(grammar).result(60)
    assert "/project/" not in caught.value.message


def test_hostile_grammars_are_refused_in_time_and_others_are_not_kept_waiting(
    strict: GrammarCompiler,
) -> None:
    begin = time.monotonic()
    hostile = [strict.compile(grammar) for grammar in HOSTILE]
    strict.compile(Grammar("choice", '["b"]')).result(60)
    assert not any(future.done() for future in hostile), "it was held up by the hostile ones"
    for future in hostile:
        with pytest.raises(InvalidRequest, match="longer than 2 s"):
            future.result(60)
    assert time.monotonic() - begin < 10
    again = strict.compile(HOSTILE[0])
    assert again.done(), "known by now"


def test_who_had_no_turn_on_the_cpu_gets_more_time(strict: GrammarCompiler) -> None:
    """A busy machine must not make harmless grammars hostile; a stopped process stands for it."""
    assert strict._worker is not None
    worker = psutil.Process(strict._worker._process.pid)
    wait_for(lambda: not worker.children())  # those of earlier grammars are gone
    unknown = Grammar("json_schema", HOSTILE[1].text.replace("5000", "5001"))
    future = strict.compile(unknown)
    wait_for(lambda: bool(worker.children()))
    (child,) = worker.children()
    child.suspend()
    with pytest.raises(TimeoutError):
        future.result(2.6)
    child.resume()
    with pytest.raises(InvalidRequest, match="longer than 2 s"):
        future.result(60)


def test_a_closed_compiler_leaves_nobody_waiting(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(str(DEMO), eos_ids=[EOS], vocab_size=tokenizer.size, timeout_s=60)
    compiler.compile(Grammar("choice", '["a"]')).result(60)
    hostile = compiler.compile(HOSTILE[0])
    compiler.close()
    with pytest.raises((CancelledError, EngineError)):
        hostile.result(60)
    compiler.close()


def test_choices_are_quoted() -> None:
    assert choice_grammar(["a", 'b"c\n']) == 'root ::= "a" | "b\\"c\\n"'


def test_messages_lose_the_librarys_time_and_place() -> None:
    assert readable("[19:57:19] /project/cpp/x.cc:94: Not supported yet.\n") == "Not supported yet"
    assert readable("[19:57:19] /p/y.cc:1: Warning: ignored") == "ignored"
    assert readable("") == "it is not valid"
