from __future__ import annotations

import pytest

from radix_mla.attention.backend import select_backend
from radix_mla.errors import ConfigError


def test_auto_and_named() -> None:
    for name in ("auto", "torch"):
        backend, reason = select_backend(name, "cpu", kv_dtype="fp32", page_size=16)
        assert backend.name == "torch"
        assert reason.startswith("torch: ")


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype", "words"),
    [
        ("flashmla", "cpu", "fp32", "flashmla"),
        ("torch", "mps", "fp32", "mps"),
        ("torch", "cpu", "fp8", "fp8"),
    ],
)
def test_a_backend_that_cannot_run_says_why(
    name: str, device: str, kv_dtype: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        select_backend(name, device, kv_dtype=kv_dtype, page_size=16)
