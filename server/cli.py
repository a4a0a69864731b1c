"""The command line. `serve` has one flag for each field of `Settings`; none is written twice."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from radix_mla.errors import ConfigError
from server.chat_cli import chat
from server.settings import ENV_PREFIX, Settings, load, peer_hint
from server.version import VERSION

app = typer.Typer(
    name="radix-mla",
    help="Prefix-cache server for MLA models (DeepSeek, Kimi, Moonlight, GLM-4.7-Flash, Youtu).",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of `radix-mla`."""
    problem = peer_flag_problem(sys.argv[1:])
    if problem is not None:
        print(f"radix-mla: error: {problem}", file=sys.stderr)
        sys.exit(2)
    app()


def peer_flag_problem(arguments: Sequence[str]) -> str | None:
    """What to say about the first flag that belongs to another server."""
    own = {_flag(name) for name in Settings.model_fields}
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith("--") and name not in own:
            hint = peer_hint(name)
            if hint is not None:
                return f"{name} is not a flag of radix-mla: {hint}"
    return None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(VERSION)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Version.")
    ] = False,
) -> None:
    """Prefix-cache server for MLA models."""


def _serve(**flags: Any) -> None:
    config_file = flags.pop("config")
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    try:
        settings = load(given, config_file=config_file)
    except ConfigError as error:
        print(f"radix-mla: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    from server.serve import run  # imports the server's libraries: --help does without them

    raise typer.Exit(run(settings))


def _with_flags(function: Callable[..., None]) -> Callable[..., None]:
    """Gives `function` the signature that typer reads the flags from."""
    parameters = [
        inspect.Parameter(
            "model",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Argument(help=str(Settings.model_fields["model"].description)),
            ],
        ),
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None,
                typer.Option(
                    "--config",
                    help=f"YAML file with any of these knobs (also {ENV_PREFIX}CONFIG).",
                ),
            ],
        ),
    ]
    for name, field in Settings.model_fields.items():
        if name != "model":
            parameters.append(_parameter(name, field))
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {item.name: item.annotation for item in parameters}
    return function


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind = _flag_type(field.annotation)
    flag = _flag(name)
    names = f"{flag}/--no-{flag[2:]}" if kind is bool else flag
    default = field.get_default()
    shown = "" if default in (None, [], False) else f" [default: {_shown(default)}]"
    option = typer.Option(names, help=f"{field.description}{shown}", show_default=False)
    annotation: Any = kind if get_origin(kind) is list else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=[] if get_origin(kind) is list else None,
        annotation=Annotated[annotation, option],
    )


def _flag_type(annotation: Any) -> Any:
    """The type of one flag: without None, secrets as text."""
    if get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (arm for arm in get_args(annotation) if arm is not type(None))
    if get_origin(annotation) is list:
        return list[str]
    if get_origin(annotation) is dict:
        return str  # JSON
    if get_origin(annotation) is Literal:
        return annotation
    return str if annotation is SecretStr else annotation


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _shown(default: object) -> str:
    return ", ".join(map(str, default)) if isinstance(default, list) else str(default)


app.command("chat")(chat)
app.command(
    "serve",
    help="Serve a model over HTTP. Flags win over RADIX_MLA_* variables, those over --config.",
)(_with_flags(_serve))
