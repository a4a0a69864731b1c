"""The command line: help is complete, flags come from the settings, errors are one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server import cli, serve
from server.serve import demo_model, locate_model, served_names
from server.settings import Settings, load
from server.version import VERSION


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def test_help_names_every_knob(runner: CliRunner) -> None:
    result = runner.invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name, field in Settings.model_fields.items():
        if name != "model":
            assert f"--{name.replace('_', '-')}" in result.output
        assert str(field.description).split(",")[0][:30] in result.output


def test_version(runner: CliRunner) -> None:
    assert runner.invoke(cli.app, ["--version"]).output.strip() == VERSION


def test_flags_become_settings(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(serve, "run", lambda settings: seen.append(settings) or 0)
    arguments = ["serve", "/m", "--port", "9", "--no-access-log", "--dtype", "fp32"]
    arguments += ["--served-model-name", "a", "--served-model-name", "b", "--page-size", "64"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    (settings,) = seen
    assert (settings.model, settings.port, settings.access_log) == ("/m", 9, False)
    assert (settings.dtype, settings.page_size) == ("fp32", 64)
    assert settings.served_model_name == ["a", "b"]


def test_flags_that_are_not_given_leave_the_other_sources(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(serve, "run", lambda settings: seen.append(settings) or 0)
    monkeypatch.setenv("RADIX_MLA_PORT", "77")
    assert runner.invoke(cli.app, ["serve"]).exit_code == 0
    assert seen[0].port == 77


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--port", "99999"], "port"),
        (["--cache-scope", "key"], "api_key"),
        (["--config", "/no"], "/no"),
    ],
)
def test_bad_settings_are_one_line_and_exit_1(
    runner: CliRunner, arguments: list[str], text: str
) -> None:
    result = runner.invoke(cli.app, ["serve", *arguments])
    assert result.exit_code == 1
    assert result.output.startswith("radix-mla: error: ")
    assert text in result.output
    assert result.output.count("\n") == 1


def test_unknown_flags_are_refused(runner: CliRunner) -> None:
    assert runner.invoke(cli.app, ["serve", "--nonsense", "1"]).exit_code == 2


@pytest.mark.parametrize(
    "flag", ["--tensor-parallel-size", "--tp", "--tp-size=2", "--mem-fraction-static"]
)
def test_a_peers_flag_answers_with_our_name(
    flag: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["radix-mla", "serve", flag, "2"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    message = capsys.readouterr().err
    assert flag.partition("=")[0] in message
    assert "one GPU" in message or "--kv-cache-tokens" in message


def test_our_own_flags_are_no_peers_flags() -> None:
    flags = [f"--{name.replace('_', '-')}" for name in Settings.model_fields]
    assert cli.peer_flag_problem(flags) is None


def test_a_model_that_is_not_there_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.run(load({"model": str(tmp_path / "none"), "port": 0}, environ={})) == 1
    message = capsys.readouterr().err
    assert message.startswith("radix-mla: error: ")
    assert "none" in message
    assert message.count("\n") == 1


def test_served_names(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    given = load({"model": str(folder)}, environ={})
    assert served_names(given, locate_model(str(folder))) == ("my-model", str(folder))
    assert served_names(load({}, environ={}), folder) == ("demo",)
    named = load({"served_model_name": ["x", "y"]}, environ={})
    assert served_names(named, folder) == ("x", "y")
    assert served_names(load({"model": "org/name"}, environ={}), folder)[0] == "org/name"


def test_the_demo_model_is_found() -> None:
    assert (demo_model() / "config.json").exists()
