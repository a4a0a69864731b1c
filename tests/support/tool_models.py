"""Small models of the four tool formats for FakeEngine: a template, and what the model says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from support.byte_tokenizer import make_byte_tokenizer
from support.fake_engine import FakeEngine, Script
from support.http_app import FACTS, Harness

from radix_mla.text.tokenizer import Tokenizer

B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
C, CE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
S = "<｜tool▁sep｜>"
KB, KE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KC, KA, KCE = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
EOS_ID = 1

_HEAD = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '<|Assistant|>' }}"
    "{% if message.reasoning_content %}"
    "{{ '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
)
_TAIL = (
    "{% endfor %}{{ eos_token }}"
    "{% else %}{{ '<|User|>' + (message.content or '') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|>' }}"
    "{% if thinking %}{{ '<think>' }}{% elif thinking is defined %}{{ '</think>' }}{% endif %}"
    "{% endif %}"
)


@dataclass(frozen=True, slots=True)
class ToolModel:
    """`call(name, arguments, number)` is one call as the model writes it, `calls` several."""

    name: str
    body: str  # of the template: how `call` is shown
    call: Callable[[str, str, int], str]
    begin: str
    end: str
    separator: str = ""

    @property
    def template(self) -> str:
        return _HEAD + self.body + _TAIL

    def calls(self, calls: Sequence[tuple[str, str]]) -> str:
        written = [self.call(name, text, number) for number, (name, text) in enumerate(calls)]
        return self.begin + self.separator.join(written) + self.end


_FUNCTION = "call.function"
DEEPSEEK_V3 = ToolModel(
    "deepseek_v3",
    f"{{{{ '{B}{C}function{S}' + {_FUNCTION}.name + '\\n```json\\n' + {_FUNCTION}.arguments"
    f" + '\\n```{CE}{E}' }}}}",
    lambda name, text, number: f"{C}function{S}{name}\n```json\n{text}\n```{CE}",
    B,
    E,
    "\n",
)
DEEPSEEK_V31 = ToolModel(
    "deepseek_v3.1",
    f"{{{{ '{B}{C}' + {_FUNCTION}.name + '{S}' + {_FUNCTION}.arguments + '{CE}{E}' }}}}",
    lambda name, text, number: f"{C}{name}{S}{text}{CE}",
    B,
    E,
)
KIMI_K2 = ToolModel(
    "kimi_k2",
    f"{{{{ '{KB}{KC}' + call.id + '{KA}' + {_FUNCTION}.arguments + '{KCE}{KE}' }}}}",
    lambda name, text, number: f"{KC}functions.{name}:{number}{KA}{text}{KCE}",
    KB,
    KE,
)
GLM = ToolModel(
    "glm",
    f"{{{{ '\\n<tool_call>' + {_FUNCTION}.name }}}}"
    f"{{% for key, value in {_FUNCTION}.arguments.items() %}}"
    "{{ '<arg_key>' + key + '</arg_key><arg_value>' }}"
    "{{ value if value is string else value | tojson }}{{ '</arg_value>' }}{% endfor %}"
    "{{ '</tool_call>' }}",
    lambda name, text, number: f"<tool_call>{name}\n{text}\n</tool_call>",
    "",
    "",
    "\n",
)
MODELS = {model.name: model for model in (DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, GLM)}


def load(folder: Path, model: ToolModel) -> Tokenizer:
    tokenizer = Tokenizer.from_dir(make_byte_tokenizer(folder, chat_template=model.template))
    assert tokenizer is not None
    return tokenizer


def says(tokenizer: Tokenizer, *texts: str, per_event: int = 1, **how: Any) -> FakeEngine:
    """Choice i says texts[i], then EOS (or what `how` says)."""

    def script(request: object, index: int) -> Script:
        ids = tokenizer.encode(texts[min(index, len(texts) - 1)], add_special_tokens=False)
        if how:
            return Script(ids, per_event=per_event, **how)
        return Script([*ids, EOS_ID], "stop", EOS_ID, per_event=per_event)

    return FakeEngine(script)


def harness(engine: FakeEngine, tokenizer: Tokenizer, **settings: Any) -> Harness:
    facts = replace(FACTS, max_model_len=8192, vocab_size=max(400, tokenizer.size))
    return Harness(engine, tokenizer, facts, **settings)


def assemble(chunks: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice's message, put together from its chunks as clients do."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for piece in delta.get("tool_calls", []):
                if piece["index"] == len(message["tool_calls"]):
                    assert piece["type"] == "function"
                    message["tool_calls"].append(
                        {"id": piece["id"], "name": piece["function"]["name"], "arguments": ""}
                    )
                call = message["tool_calls"][piece["index"]]
                call["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message
