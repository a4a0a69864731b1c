"""Fixtures of the server's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.byte_tokenizer import TEMPLATE_WITHOUT_BOS, make_byte_tokenizer

from radix_mla.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _load(make_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session")
def tokenizer_without_bos_template(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("no-bos")
    return _load(make_byte_tokenizer(folder, chat_template=TEMPLATE_WITHOUT_BOS))


def _load(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer is not None
    return tokenizer
