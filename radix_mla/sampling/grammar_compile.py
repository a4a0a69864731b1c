"""A grammar's text to xgrammar's compiled form, by its kind."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

_MAX_SPACES_IN_TAGS = 2


def compile_text(compiler: Any, kind: str, text: str) -> Any:
    """An xgrammar CompiledGrammar. Raises RuntimeError or ValueError with xgrammar's reason."""
    match kind:
        case "json_object":
            return _compile_schema(compiler, '{"type": "object"}')
        case "json_schema":
            return _compile_schema(compiler, text)
        case "regex":
            return compiler.compile_regex(text)
        case "choice":
            return compiler.compile_grammar(choice_grammar(json.loads(text)))
        case "ebnf" if "::=" in text:
            return compiler.compile_grammar(text)
        case "ebnf":
            return compiler.compile_lark(text)
        case "structural_tag":
            return compiler.compile_structural_tag(json.dumps(_with_little_space(json.loads(text))))
        case _:
            raise ValueError(f"unknown kind of grammar {kind!r}")


def _compile_schema(compiler: Any, text: str) -> Any:
    # One line, one space after , and : as json.dumps has it. Where white space is free, weak models
    # (and any model at a bad moment) fill max_tokens with it.
    return compiler.compile_json_schema(text, any_whitespace=False)


def _with_little_space(tag: Any) -> Any:
    """The tag with white space of its JSON parts bounded, where it says nothing about that."""
    if isinstance(tag, list):
        return [_with_little_space(item) for item in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema" and "json_schema" in tag:
        return {"max_whitespace_cnt": _MAX_SPACES_IN_TAGS, **tag}
    return {name: _with_little_space(value) for name, value in tag.items()}


def choice_grammar(choices: Iterable[str]) -> str:
    """EBNF for one of some strings."""
    return "root ::= " + " | ".join(json.dumps(item, ensure_ascii=False) for item in choices)
