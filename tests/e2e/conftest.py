"""Real servers on loopback, most of them with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny_checkpoint import make_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer V3-layout checkpoint without tokenizer files: token-id prompts only."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", arch="v3", vocab=512)
