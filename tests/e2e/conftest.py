"""Real servers on loopback. The demo model is served once a session for read-mostly tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server_process import DEMO, ServerProcess
from support.tiny_checkpoint import make_checkpoint


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    with ServerProcess(DEMO, "--kv-cache-tokens", "16384") as server:
        yield server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer V3-layout checkpoint without tokenizer files: token-id prompts only."""
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", arch="v3", vocab=512)
