"""The request's side of tool calls: which tools there are, and which of them may be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from radix_mla.errors import InvalidRequest

_FOR_THE_TEMPLATE = frozenset(("name", "description", "parameters"))
_MAX_NAME_CHARS = 256
Mode = Literal["none", "auto", "required"]
_MODES: Mapping[str, Mode] = {"none": "none", "auto": "auto", "required": "required"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function. `parameters`: its JSON schema, {} when it was not sent; `param` names that."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False
    param: str = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request. `shown` goes to the template whatever `mode` is.

    callable: what may be called. named: exactly one call of one tool. limited: not all tools that
    are shown may be called. parallel False: at most one call.
    """

    shown: Sequence[Mapping[str, Any]] = ()
    callable: Sequence[Tool] = ()
    mode: Mode = "none"
    named: bool = False
    limited: bool = False
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Parameters by name."""
        return {tool.name: tool.parameters for tool in self.callable}

    @property
    def max_calls(self) -> int | None:
        return 1 if self.named or not self.parallel else None


def read_tools(
    tools: Sequence[Mapping[str, Any]],
    tool_choice: str | Mapping[str, Any] | None,
    *,
    parallel: bool,
    ignored: list[str],
) -> ToolUse:
    """Tools and the choice among them. Raises InvalidRequest for what contradicts itself.

    Tools other than functions (Codex sends custom and web_search) are added to `ignored`.
    """
    shown: list[Mapping[str, Any]] = []
    known: dict[str, Tool] = {}
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind != "function":
            ignored.append(f"tools[{index}]:{kind}")
            continue
        found = _read_tool(tool, f"tools[{index}].function")
        known[found.name] = found
        function = tool["function"]
        kept = {key: value for key, value in function.items() if key in _FOR_THE_TEMPLATE}
        kept.setdefault("parameters", {})
        shown.append({"type": "function", "function": kept})
    mode, names = _read_choice(tool_choice, has_tools=bool(known))
    for name in names or ():
        if name not in known:
            raise _invalid(f"tool_choice names {name!r}, which is not among the tools.")
    if mode == "required" and not known:
        raise _invalid("tool_choice asks for a tool call, but there are no function tools.")
    return ToolUse(
        shown=shown,
        callable=[tool for name, tool in known.items() if names is None or name in names],
        mode=mode if known else "none",
        named=_is_named(tool_choice),
        limited=names is not None and len(set(names)) < len(known),
        parallel=parallel,
    )


def _read_tool(tool: Mapping[str, Any], param: str) -> Tool:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _invalid(f"{param} must be an object.", param)
    name = function.get("name")
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= _MAX_NAME_CHARS
        or any(char.isspace() or char in "<>" for char in name)
    ):
        raise _invalid(f"{param}.name must be a name without spaces.", f"{param}.name")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise _invalid(f"{param}.parameters must be a JSON schema.", f"{param}.parameters")
    return Tool(
        name=name,
        parameters=parameters,
        strict=function.get("strict") is True,
        param=f"{param}.parameters",
    )


def _read_choice(
    choice: str | Mapping[str, Any] | None, *, has_tools: bool
) -> tuple[Mode, list[str] | None]:
    """(mode, names that may be called: None = all)."""
    if choice is None:
        return ("auto" if has_tools else "none"), None
    if isinstance(choice, str) and choice in _MODES:
        return _MODES[choice], None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return "required", [_name_of(choice)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools", choice))
    raise _invalid("tool_choice must be none, auto, required, a function, or allowed_tools.")


def _read_allowed(allowed: object) -> tuple[Literal["auto", "required"], list[str]]:
    """Chat nests mode and tools in `allowed_tools`, /v1/responses has them beside the type."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise _invalid("tool_choice.allowed_tools needs a mode and a list of tools.")
    names = [
        _name_of(tool)
        for tool in tools
        if isinstance(tool, Mapping) and tool.get("type", "function") == "function"
    ]
    if not names:
        raise _invalid("tool_choice.allowed_tools has no function tool.")
    return mode, names


def _is_named(choice: str | Mapping[str, Any] | None) -> bool:
    return isinstance(choice, Mapping) and choice.get("type") == "function"


def _name_of(choice: Mapping[str, Any]) -> str:
    """Chat puts the name into `function`, /v1/responses beside the type."""
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _invalid("tool_choice: a function needs a name.")
    return name


def _invalid(message: str, param: str = "tool_choice") -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")
