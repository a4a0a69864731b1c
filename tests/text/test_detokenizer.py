"""T01: concatenated deltas == the decoding of all ids, for every tokenizer and any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_tokenizer import EOS, make_byte_fallback_tokenizer, make_byte_tokenizer

from radix_mla.text.detokenizer import (
    ByteLevelDetokenizer,
    WindowDetokenizer,
    make_detokenizer,
)
from radix_mla.text.tokenizer import Tokenizer

TEXTS = (
    "Hello world",
    "🙂",
    "👩‍👩‍👧‍👦 family, 🇩🇪 flag, 👍🏽 skin",
    "漢字かな交じり文",
    "naïve café",
    "a\x00b\x7f",
    "   spaces  and\ttabs\n\n",
)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _load(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _load(make_byte_fallback_tokenizer(tmp_path_factory.mktemp("fallback")))


def _load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    return tokenizer


def _streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip)
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.flush()


def test_the_fast_path_is_taken_where_it_can_be(
    byte_level: Tokenizer, byte_fallback: Tokenizer
) -> None:
    assert isinstance(make_detokenizer(byte_level), ByteLevelDetokenizer)
    assert isinstance(make_detokenizer(byte_fallback), WindowDetokenizer)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_t01_text_comes_back_whole(byte_level: Tokenizer, text: str, skip: bool) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    assert _streamed(byte_level, ids, skip) == text == byte_level.decode(ids)


@pytest.mark.parametrize("text", ["the fox", "🙂!", "a é c", "漢字"])
def test_t01_byte_fallback(byte_fallback: Tokenizer, text: str) -> None:
    ids = byte_fallback.encode(text, add_special_tokens=False)
    assert _streamed(byte_fallback, ids, True) == byte_fallback.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_t01_any_ids(
    byte_level: Tokenizer, byte_fallback: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    for tokenizer in (byte_level, byte_fallback):
        ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=12))
        assert _streamed(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_window_agrees_with_the_fast_path(byte_level: Tokenizer, data: st.DataObject) -> None:
    text = data.draw(st.text(max_size=12))
    ids = byte_level.encode(text, add_special_tokens=False)
    window = WindowDetokenizer(byte_level, byte_level.special_ids)
    assert "".join([window.push(token_id) for token_id in ids]) + window.flush() == text


def test_t01_no_replacement_character_before_the_end(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙂", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = make_detokenizer(byte_level)
    assert [detokenizer.push(token_id) for token_id in ids] == ["", "", "", "🙂"]
    cut = make_detokenizer(byte_level)
    assert [cut.push(token_id) for token_id in ids[:2]] == ["", ""]
    assert cut.flush() == "\ufffd"


def test_special_tokens_are_left_out_or_kept(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("a", add_special_tokens=False), 1]
    assert _streamed(byte_level, ids, True) == "a"
    assert _streamed(byte_level, ids, False) == f"a{EOS}"


def test_ids_above_the_vocabulary_are_no_text(byte_level: Tokenizer) -> None:
    assert _streamed(byte_level, [byte_level.size + 5], True) == ""
