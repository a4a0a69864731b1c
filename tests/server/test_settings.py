"""Settings: YAML < environment < flags, unknown keys, peers' names, the engine's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from radix_mla.config import EngineConfig
from radix_mla.errors import ConfigError
from server.settings import PEER_NAMES, Settings, load, peer_hint


def _yaml(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_environment_over_yaml(tmp_path: Path) -> None:
    config = _yaml(tmp_path, "port: 1\nhost: yaml\nmax-num-seqs: 5\nserved_model_name: [a, b]\n")
    environ = {"RADIX_MLA_PORT": "2", "RADIX_MLA_HOST": "env", "HOME": "/x"}
    settings = load({"port": 3}, config_file=config, environ=environ)
    assert (settings.port, settings.host, settings.max_num_seqs) == (3, "env", 5)
    assert settings.served_model_name == ["a", "b"]


def test_the_config_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    config = _yaml(tmp_path, "port: 9\n")
    assert load({}, environ={"RADIX_MLA_CONFIG": str(config)}).port == 9


def test_lists_and_booleans_from_the_environment() -> None:
    environ = {"RADIX_MLA_API_KEY": "a, b", "RADIX_MLA_STRICT_FIELDS": "true", "RADIX_MLA_HOST": ""}
    settings = load({}, environ=environ)
    assert [key.get_secret_value() for key in settings.api_key] == ["a", "b"]
    assert settings.strict_fields is True
    assert settings.host == "127.0.0.1"
    assert "a, b" not in repr(settings)


@pytest.mark.parametrize("name", ["nonsense", "ports"])
def test_unknown_keys_are_errors_that_say_where(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"config.yaml: key {name} is unknown"):
        load({}, config_file=_yaml(tmp_path, f"{name}: 1\n"), environ={})
    variable = f"RADIX_MLA_{name.upper()}"
    with pytest.raises(ConfigError, match=f"environment variable {variable} is unknown"):
        load({}, environ={variable: "1"})


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "just text"])
def test_files_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load({}, config_file=_yaml(tmp_path, text), environ={})
    with pytest.raises(ConfigError, match="missing"):
        load({}, config_file=tmp_path / "missing.yaml", environ={})


def test_an_empty_file_is_no_settings(tmp_path: Path) -> None:
    assert load({}, config_file=_yaml(tmp_path, ""), environ={}) == Settings()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": 70000}, "port"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": "fp64"}, "dtype"),
        ({"cache_scope": "key"}, "api_key"),
    ],
)
def test_bad_values_name_their_knob(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(flags, environ={})


def test_peers_names_lead_to_ours() -> None:
    assert peer_hint("--tensor-parallel-size") is not None
    assert "one GPU" in str(peer_hint("--tensor-parallel-size"))
    assert "one GPU" in str(peer_hint("--tp"))
    assert "kv-cache-tokens" in str(peer_hint("mem_fraction_static"))
    assert peer_hint("--whatever") is None
    with pytest.raises(ConfigError, match="--page-size"):
        load({}, environ={"RADIX_MLA_BLOCK_SIZE": "16"})


def test_every_name_that_a_hint_gives_exists() -> None:
    for hint in PEER_NAMES.values():
        name = hint.split(" (")[0].split(":")[0]
        if name not in ("nothing", "the first argument"):
            assert name.replace("-", "_") in Settings.model_fields


def test_every_engine_knob_reaches_the_engine() -> None:
    knobs = set(EngineConfig.__dataclass_fields__) - {"model", "enable_prefix_cache"}
    assert knobs <= set(Settings.model_fields)
    values = {"page_size": 64, "max_num_batched_tokens": 512, "kv_cache_tokens": 4096}
    config = load({**values, "disable_prefix_cache": True}, environ={}).engine_config("/m")
    assert config.model == "/m"
    assert not config.enable_prefix_cache
    assert {name: getattr(config, name) for name in values} == values


def test_defaults_agree_with_the_engines() -> None:
    ours, engines = Settings().engine_config("m"), EngineConfig(model="m")
    assert ours == engines


def test_public_settings_have_no_keys() -> None:
    public = load({"api_key": ["secret"]}, environ={}).public()
    assert "secret" not in str(public)
    assert public["num_api_keys"] == 1


def test_hf_overrides_are_json_or_an_object(tmp_path: Path) -> None:
    text = '{"num_hidden_layers": 4, "rope_scaling": {"factor": 8}}'
    want = {"num_hidden_layers": 4, "rope_scaling": {"factor": 8}}
    for settings in (
        load({"hf_overrides": text}, environ={}),
        load({}, environ={"RADIX_MLA_HF_OVERRIDES": text}),
        load({}, config_file=_yaml(tmp_path, f"hf-overrides: {text}"), environ={}),
    ):
        assert settings.hf_overrides == want
        assert settings.engine_config("m").hf_overrides == want


@pytest.mark.parametrize("text", ["{", "4", "[1]"])
def test_hf_overrides_that_are_no_object(text: str) -> None:
    with pytest.raises(ConfigError, match="hf_overrides"):
        load({"hf_overrides": text}, environ={})
