from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    """These shapes are too small for threads, and test machines are shared."""
    torch.set_num_threads(1)
