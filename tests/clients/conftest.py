"""A one-layer random model that speaks the demo tokenizer: fast at 40k tokens, and as talkative."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.demo_app import demo_tokenizer
from support.server_process import DEMO, ServerProcess
from support.tiny_checkpoint import make_checkpoint

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="session")
def one_layer_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    vocab = -(-demo_tokenizer().size // 64) * 64
    eos = demo_tokenizer().eos_token_id
    folder: Path = make_checkpoint(
        tmp_path_factory.mktemp("clients") / "demo",
        layers=1,
        heads=1,
        vocab=vocab,
        max_positions=65_536,
        original_positions=4096,
        extra_config={"eos_token_id": eos},
    )
    for name in _TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    flags = ("--kv-cache-tokens", "98304", "--model-alias", "claude-*")
    with ServerProcess(folder, "--served-model-name", "demo", *flags) as server:
        yield server
