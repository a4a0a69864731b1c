"""Without a GPU, Triton kernels run in Triton's interpreter: set before triton is imported."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    """These shapes are too small for threads, and test machines are shared."""
    torch.set_num_threads(1)
