"""Messages to token ids through the tokenizer's chat template (Jinja in transformers' sandbox).

Equal conversations give equal ids, however the client spells them: text parts are joined without a
separator, null and missing content are empty, keys that templates do not know are dropped. What a
template expects of tool calls is found by rendering probes once, not by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from radix_mla.errors import InvalidRequest
from radix_mla.text.content import content_text
from radix_mla.text.control_guard import ControlGuard
from radix_mla.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))
_STANDARD_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")
)
_THINKING_TAGS = ("<think>", "</think>")
_PROBE_NAME = "probe_function"
_PROBE_ARGUMENTS = '{"probe_key": 1}'


class ChatTemplate:
    """The chat template of one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        """`template` replaces the tokenizer's own. Raises ValueError when there is none."""
        source = template or tokenizer.chat_template
        if source is None:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._guard = ControlGuard(tokenizer, source)
        self.source = source

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names that the template reads from outside, `enable_thinking` for example."""
        from jinja2 import meta
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            extensions=["jinja2.ext.loopcontrols"], trim_blocks=True, lstrip_blocks=True
        )
        names = meta.find_undeclared_variables(environment.parse(_without_generation(self.source)))
        special = {name for name in names if name.endswith("_token")}
        return frozenset(names - special - set(environment.globals) - _STANDARD_VARIABLES)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt as text.

        Raises InvalidRequest (param "messages") for what cannot be rendered, the template's own
        complaints included.
        """
        return self.render_prepared(
            self.prepare(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )

    def prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages as templates know them: content is text, calls are complete, the rest is gone.

        Raises InvalidRequest that names the message.
        """
        return [
            self._guarded(self._prepare(message, index)) for index, message in enumerate(messages)
        ]

    def render_prepared(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """`render` for messages that `prepare` made."""
        return self._render(
            [dict(message) for message in messages],
            tools=self._guard.guard(tools) if tools else None,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **{key: value for key, value in (variables or {}).items() if key in self.variables},
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered prompt, with exactly one BOS where the tokenizer uses one."""
        ids = self.encode_part(text)
        bos = self._tokenizer.bos_token_id
        if bos is not None and self._tokenizer.adds_bos and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def encode_part(self, text: str) -> list[int]:
        """Ids of a piece of a rendered prompt; control tokens in messages are plain text."""
        ids: list[int] = []
        for piece in self._guard.split(text):
            ids += self._tokenizer.encode(piece, add_special_tokens=False)
        return ids

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes behind a user's turn to start an answer."""
        turn = [{"role": "user", "content": "a"}]
        try:
            before = self.render_prepared(turn, add_generation_prompt=False)
            return self.render_prepared(turn).removeprefix(before)
        except InvalidRequest:
            return ""

    @cached_property
    def keeps_system_in_place(self) -> bool:
        """False for templates that move later system messages to the head, drop or refuse them."""
        roles = ("system", "user", "assistant", "system", "user")
        turns = [{"role": role, "content": f"probe{i}"} for i, role in enumerate(roles)]
        try:
            text = self.render_prepared(turns)
        except InvalidRequest:
            return False
        return 0 <= text.find("probe2") < text.find("probe3")

    @cached_property
    def needs_dict_arguments(self) -> bool:
        """True when the template writes arguments itself (`| tojson`, `.items()`)."""
        try:
            text = self._probe(_PROBE_ARGUMENTS, content="")
        except InvalidRequest:
            return True
        return '\\"probe_key\\"' in text or "probe_key" not in text

    @cached_property
    def takes_text_arguments(self) -> bool:
        """False for templates that fail on arguments that are no object."""
        try:
            return "probe text" in self._probe("probe text", content=self.empty_content)
        except InvalidRequest:
            return False

    @cached_property
    def empty_content(self) -> str | None:
        """What stands for "no content" beside tool calls: older templates ask for `none`."""
        arguments = json.loads(_PROBE_ARGUMENTS) if self.needs_dict_arguments else _PROBE_ARGUMENTS
        for content in ("", None):
            try:
                text = self._probe(arguments, content=content)
            except InvalidRequest:
                continue
            if _PROBE_NAME in text and "None" not in text:
                return content
        return ""

    def _probe(self, arguments: object, content: str | None) -> str:
        call = {
            "id": "call_0",
            "type": "function",
            "function": {"name": _PROBE_NAME, "arguments": arguments},
        }
        return self._render(
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": content, "tool_calls": [call]},
            ],
            tools=None,
            add_generation_prompt=False,
            continue_final_message=False,
        )

    def _render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        from jinja2 import TemplateError

        # Not `tokenizer.apply_chat_template`: that drops None, which older templates ask for.
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered, _ = render_jinja_template(
                conversations=[messages],
                chat_template=self.source,
                **self._tokenizer.hf.special_tokens_map,
                **options,
            )
            return str(rendered[0])
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error}",
                param="messages",
                code="invalid_messages",
            ) from error

    def _guarded(self, message: dict[str, Any]) -> dict[str, Any]:
        """Templates cut an answer at its thinking tags, so those stay in assistant messages."""
        keep = _THINKING_TAGS if message["role"] == "assistant" else ()
        return {
            key: self._guard.guard(value, keep=keep if key == "content" else ())
            for key, value in message.items()
        }

    def _prepare(self, message: Message, index: int) -> dict[str, Any]:
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise InvalidRequest(
                f"messages[{index}].role is {role!r}; supported: {', '.join(sorted(_ROLES))}",
                param=f"messages[{index}].role",
                code="invalid_role",
            )
        prepared: dict[str, Any] = {
            "role": "system" if role == "developer" else role,
            "content": content_text(message.get("content"), index),
        }
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if role == "assistant" and isinstance(reasoning, str):
            prepared["reasoning_content"] = reasoning
        if role == "assistant" and message.get("tool_calls") not in (None, []):
            prepared["tool_calls"] = self._tool_calls(message["tool_calls"], index)
            if not prepared["content"]:
                prepared["content"] = self.empty_content
        if role == "tool":
            for key in ("tool_call_id", "name"):
                if isinstance(message.get(key), str):
                    prepared[key] = message[key]
        return prepared

    def _tool_calls(self, calls: object, index: int) -> list[dict[str, Any]]:
        param = f"messages[{index}].tool_calls"
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise InvalidRequest(f"{param} must be a list", param=param)
        prepared = []
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise InvalidRequest(f"{param}: each call needs function.name", param=param)
            prepared.append(
                {
                    "id": call.get("id"),
                    "type": "function",
                    "function": {
                        "name": function["name"],
                        "arguments": self._arguments(function.get("arguments")),
                    },
                }
            )
        return prepared

    def _arguments(self, arguments: object) -> object:
        """Verbatim text, or the parsed object for templates that need one; key order stays."""
        if arguments is None:
            arguments = "{}"
        if not self.needs_dict_arguments:
            if isinstance(arguments, str):
                return arguments
            return json.dumps(arguments, ensure_ascii=False)
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            if isinstance(parsed, dict):
                return parsed
            # The model wrote something else; it is shown as it was.
            return arguments if self.takes_text_arguments else {"arguments": arguments}
        return arguments


def _without_generation(source: str) -> str:
    """`{% generation %}` marks training spans; plain Jinja does not know the tag."""
    for tag in ("generation", "endgeneration"):
        for left, right in (("{%-", "-%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%", "%}")):
            source = source.replace(f"{left} {tag} {right}", "")
    return source
