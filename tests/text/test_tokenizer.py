"""The tokenizer wrapper: folders with and without files, BOS, bytes, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.byte_tokenizer import BOS, make_byte_fallback_tokenizer, make_byte_tokenizer

from radix_mla.errors import CheckpointError
from radix_mla.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    loaded = Tokenizer.from_dir(make_byte_tokenizer(tmp_path_factory.mktemp("bytes")))
    assert loaded is not None
    return loaded


def test_a_folder_without_files_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert Tokenizer.from_dir(tmp_path) is None


def test_broken_files_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{not json")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_dir(tmp_path)


def test_sizes_and_special_ids(tokenizer: Tokenizer) -> None:
    assert tokenizer.size == 320
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == frozenset(range(5))


def test_a11_completion_text_gets_bos_exactly_once(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a")[0] == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.encode_prompt("a").count(0) == 1
    assert tokenizer.encode_prompt(f"{BOS}a").count(0) == 1


def test_a11_a_tokenizer_that_adds_no_bos_is_left_alone(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_byte_tokenizer(tmp_path, add_bos=False))
    assert tokenizer is not None
    assert not tokenizer.adds_bos
    assert 0 not in tokenizer.encode_prompt("a")


def test_token_bytes_are_the_bytes_of_the_text(tokenizer: Tokenizer) -> None:
    text = "a 🙂 é"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(tokenizer.token_bytes(token_id) for token_id in ids) == text.encode()
    assert tokenizer.token_bytes(0) == BOS.encode()
    assert tokenizer.token_bytes(10_000) == b""


def test_token_bytes_of_byte_fallback(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(make_byte_fallback_tokenizer(tmp_path))
    assert tokenizer is not None
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert not tokenizer.is_byte_level


def test_a_pool_of_threads_gets_the_same_ids(tokenizer: Tokenizer) -> None:
    texts = [f"The brave fox number {i}" * 20 for i in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected
