"""Which pair of backends serves, and why; packages are pretended to be there or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.mla_case import ODD, TRUE

from radix_mla.attention.backend import Setting
from radix_mla.attention.backends import fa2, fa3, flashmla, flashmla_kernel, triton
from radix_mla.attention.select import BACKENDS, caps_of, choose_backends, make_backend
from radix_mla.config import EngineConfig, Hardware
from radix_mla.errors import ConfigError
from radix_mla.models.hf_config import ModelConfig

CPU = Setting("cpu", None, "fp32", "fp32", None, TRUE)
HOPPER = Setting("cuda:0", 90, "bf16", "bf16", None, TRUE)
AMPERE = replace(HOPPER, arch=80)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package is there."""
    for module in (fa2, fa3, flashmla, triton):
        monkeypatch.setattr(module, "unavailable", lambda setting: None)


def test_cpu() -> None:
    for name in ("auto", "torch", "torch,torch"):
        choice = choose_backends(name, CPU)
        assert choice.name == "torch"
        assert choice.page_size == 16
        assert make_backend(choice, CPU).name == "torch"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "setting", "pair", "page_size"),
    [
        ("auto", HOPPER, "fa3,flashmla", 64),
        ("auto", replace(HOPPER, page_size=16), "fa3,triton", 16),
        ("auto", replace(HOPPER, page_size=64), "fa3,flashmla", 64),
        ("auto", AMPERE, "fa2,triton", 16),
        ("auto", replace(HOPPER, dtype="fp32", kv_dtype="fp32"), "triton", 16),
        ("auto", replace(HOPPER, kv_dtype="fp32"), "fa3,triton", 16),
        ("flashmla", HOPPER, "fa3,flashmla", 64),
        ("fa2", HOPPER, "fa2,flashmla", 64),
        ("triton", HOPPER, "triton", 16),
        ("torch", HOPPER, "torch", 16),
        ("fa2,triton", HOPPER, "fa2,triton", 16),
        ("auto,triton", HOPPER, "fa3,triton", 16),
    ],
)
def test_pairs(name: str, setting: Setting, pair: str, page_size: int) -> None:
    choice = choose_backends(name, setting)
    assert (choice.name, choice.page_size) == (pair, page_size)


@pytest.mark.usefixtures("installed")
def test_auto_says_what_kept_it_from_the_better_ones() -> None:
    reason = choose_backends("auto", replace(AMPERE, page_size=16)).reason
    assert reason.startswith("prefill fa2 (not fa3: needs sm90, this GPU is sm80); decode")
    assert "not flashmla: needs sm90" in reason
    reason = choose_backends("auto", replace(HOPPER, page_size=16)).reason
    assert "flashmla: needs a page size of 64, not 16" in reason


def test_a_missing_package_is_named() -> None:
    """None of these is installed here."""
    reason = choose_backends("auto", HOPPER).reason
    assert "fa3_fwd_interface not importable" in reason
    assert "flash_mla (sgl-flash-mla) not importable" in reason


@pytest.mark.parametrize(
    ("name", "setting", "words"),
    [
        ("fa9", CPU, "'fa9' does not exist; known: auto, fa3"),
        ("fa3,fa9", CPU, "'fa9' does not exist"),
        ("fa3,torch,torch", CPU, "PREFILL,DECODE"),
        ("flashmla", CPU, "flashmla cannot run: runs on .*cuda.*, not on cpu"),
        ("torch", replace(CPU, device="mps"), "not on mps"),
        ("torch", replace(CPU, kv_dtype="fp8"), "KV rows .* not fp8"),
        ("flashmla,torch", HOPPER, "flashmla cannot run: it has no prefill"),
        ("torch,fa3", HOPPER, "fa3 cannot run: it has no absorbed"),
        ("flashmla", replace(HOPPER, page_size=16), "page size of 64, not 16"),
        ("flashmla", AMPERE, "needs sm90, this GPU is sm80"),
        ("fa3", replace(HOPPER, dtype="fp32"), r"computes in \['bf16'\], not in fp32"),
        ("triton", replace(HOPPER, page_size=48), "page size of 1, 2, 4, .*, not 48"),
    ],
)
def test_a_named_backend_that_cannot_run_says_why(name: str, setting: Setting, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_backends(name, setting)


def test_widths_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa3, "_find", lambda: ("there", print))
    monkeypatch.setattr(flashmla_kernel, "find", lambda: ("", flashmla_kernel))
    wide = replace(HOPPER, dims=replace(TRUE, nope=320))
    with pytest.raises(ConfigError, match="head width 384"):
        choose_backends("fa3", wide)
    with pytest.raises(ConfigError, match="rows of 40 \\+ 8 values"):
        choose_backends("flashmla", replace(HOPPER, dims=ODD))
    assert not fa3.needs_padding(TRUE)
    assert not fa3.needs_padding(replace(TRUE, nope=192, value=256))
    assert fa3.needs_padding(replace(TRUE, value=64))


def test_every_backend_declares_itself() -> None:
    for name in BACKENDS:
        caps = caps_of(name)
        assert caps.prefill or caps.absorbed
        assert caps.lse


@pytest.mark.usefixtures("installed")
def test_the_configuration_resolves_pair_and_page_size() -> None:
    model = ModelConfig.from_dir(Path(__file__).parents[2] / "configs" / "demo")
    hardware = Hardware("cuda:0", 1 << 34, 8, native_bf16=True, arch=90)
    config = EngineConfig(model="x").resolve(model, hardware)
    assert (config.attention_backend, config.page_size) == ("fa3,flashmla", 64)
    assert any(line.startswith("attention_backend=fa3,flashmla: ") for line in config.decisions)
    config = EngineConfig(model="x", page_size=16).resolve(model, hardware)
    assert (config.attention_backend, config.page_size) == ("fa3,triton", 16)
