"""Fixtures that every test may use: seeds, GPU skipping, the demo model served."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Test processes and the servers that they start share the cores: one thread each, none spinning
# (the first two are read by libgomp when torch loads it).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RADIX_MLA_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from hypothesis import settings
from support.server_process import DEMO, ServerProcess

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=False)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA GPU on this machine")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_server() -> Iterator[ServerProcess]:
    """For tests that leave it as it was, but for its cache and counters: a start takes seconds."""
    with ServerProcess(DEMO, "--kv-cache-tokens", "16384") as server:
        yield server
