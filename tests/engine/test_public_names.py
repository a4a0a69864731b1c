from __future__ import annotations

import subprocess
import sys

import pytest

import radix_mla
from radix_mla import errors


def test_all_is_sorted_and_everything_in_it_is_there() -> None:
    # ruff's order: SCREAMING_CASE first, then the rest, each sorted
    names = radix_mla.__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name))
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(radix_mla, name).__name__ == name
    assert set(names) <= set(dir(radix_mla))
    assert {"EngineConfig", "LLM", "SamplingParams"} <= set(names)


def test_a_caller_can_catch_every_error_by_a_public_name() -> None:
    public = tuple(
        error
        for name in radix_mla.__all__
        if isinstance(error := getattr(radix_mla, name), type) and issubclass(error, Exception)
    )
    for name in dir(errors):
        error = getattr(errors, name)
        if isinstance(error, type) and issubclass(error, errors.RadixMlaError):
            assert issubclass(error, public)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine5'"):
        radix_mla.Engine5  # noqa: B018


def test_importing_the_package_costs_nothing_heavy() -> None:
    heavy = ["torch", "transformers", "zmq", "msgspec", "fastapi", "pydantic"]
    code = (
        "import sys, radix_mla; radix_mla.SamplingParams; radix_mla.EngineConfig\n"
        f"found = [name for name in {heavy} if name in sys.modules]\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_offline_engine_needs_no_web_package() -> None:
    unwanted = ["fastapi", "pydantic", "starlette", "uvicorn", "zmq", "msgspec", "triton"]
    code = (
        "import sys, radix_mla; radix_mla.LLM; import radix_mla.engine.build\n"
        f"found = [name for name in {unwanted} if name in sys.modules]\n"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
