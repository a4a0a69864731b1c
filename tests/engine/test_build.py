from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.tiny_checkpoint import make_checkpoint

from radix_mla.config import EngineConfig
from radix_mla.engine.build import build_engine
from radix_mla.errors import ConfigError, ModelError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        vocab=300,
        tokenizer=True,
        generation_config={"eos_token_id": [1, 2], "temperature": 0.7},
    )


class Youngest:
    """A user's eviction policy."""

    def key(self, node):
        return -node.created


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"schedule_policy": "fastest"}, "schedule_policy"),
        ({"eviction_policy": "random"}, "eviction_policy.*fifo, lfu, lru"),
        ({"eviction_policy": "radix_mla.errors:Nothing"}, "eviction_policy.*Nothing"),
        ({"page_size": 0}, "page_size"),
        ({"attention_backend": "fa9"}, "attention_backend"),
    ],
)
def test_a_knob_that_cannot_be_is_named(model: Path, knobs: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build_engine(EngineConfig(model=str(model), kv_cache_tokens=512, **knobs))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        build_engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", f"{__name__}:Youngest"])
def test_info_describes_what_was_built(
    model: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = []
    engine = build_engine(
        EngineConfig(model=str(model), kv_cache_tokens=512, eviction_policy=policy, num_threads=1),
        lambda stage, done, total: stages.append((stage, done / total)),
    )
    assert stages[0] == ("config", 0.0)
    assert ("weights", 1.0) in stages
    assert stages[-1] == ("warm-up", 1.0)
    info = engine.info
    assert info["eos_token_ids"] == [1, 2]
    assert info["generation_defaults"] == {"temperature": 0.7}
    assert info["num_sampleable"] <= info["vocab_size"] == 300
    assert info["config"]["eviction_policy"] == policy
    assert info["decisions"]


def test_a_model_without_weights_runs_on_dummy_ones(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    for file in path.glob("*.safetensors"):
        file.unlink()
    engine = build_engine(
        EngineConfig(model=str(path), load_format="dummy", kv_cache_tokens=512, num_threads=1)
    )
    assert engine.info["num_sampleable"] == 256


def test_overrides_of_the_model_s_config(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(make_checkpoint(tmp_path)),
        hf_overrides={"num_hidden_layers": 1},
        kv_cache_tokens=512,
        num_threads=1,
    )
    engine = build_engine(config)
    assert engine.info["dims"]["num_hidden_layers"] == 1
    with pytest.raises(ConfigError, match="hf_overrides: layers"):
        build_engine(replace(config, hf_overrides={"layers": 1}))
