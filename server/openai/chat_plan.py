"""A chat request, validated, to the job that the engine runs: the part that three APIs share.

/v1/responses and /v1/messages are translated to a `ChatRequest` and planned here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radix_mla.errors import InvalidRequest
from radix_mla.text.chat_template import ChatTemplate
from server.lengths import check_zero, requested_max_tokens
from server.openai.common import Parsed, cut_lengths, make_job
from server.openai.model_formats import ModelFormats
from server.openai.sampling import check_min_tokens, sampling_params
from server.openai.schemas import ChatRequest
from server.openai.tool_calls import ToolUse, read_tools
from server.rendering import Conversation
from server.service import Job, Service


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """What runs, and the prompt it starts from."""

    prompt: list[int]
    job: Job


async def plan_chat(service: Service, parsed: Parsed[ChatRequest]) -> ChatPlan:
    """Renders and cuts. Raises InvalidRequest, ContextOverflow.

    Fields without effect are added to `parsed.ignored`.
    """
    fields = parsed.fields
    _check_unsupported(fields)
    renderer = service.need_renderer()
    requested = requested_max_tokens(
        fields.max_completion_tokens, fields.max_tokens, fields.n_predict
    )
    check_zero(requested, echo=False)
    check_min_tokens(fields, requested)
    formats = service.need_formats()
    use = _tool_use(fields, parsed.ignored)
    _check_tool_format(formats, use)
    conversation = conversation_of(fields, renderer.template, parsed.ignored, use)
    prompt = await service.in_pool(lambda: renderer.encode(conversation))
    lengths = cut_lengths(service, [prompt], requested, default=None, param="messages")
    params = sampling_params(
        fields,
        service.defaults,
        service.token_ids,
        max_tokens=lengths[0],
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )
    assistant = formats.plan(use, prompt, fields.messages, continued=fields.continue_final_message)
    params = formats.constrain(params, use, assistant, parsed.ignored)
    return ChatPlan(prompt, make_job(parsed, [prompt], lengths, params, assistant=assistant))


def conversation_of(
    fields: ChatRequest, template: ChatTemplate, ignored: list[str], use: ToolUse | None = None
) -> Conversation:
    """What is rendered. Nothing of tool_choice, response_format or sampling is in it.

    `use`: the tools as they were read already.
    """
    use = use or _tool_use(fields, ignored)
    return Conversation(
        messages=fields.messages,
        tools=use.shown,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        variables=_template_variables(fields, template, ignored),
    )


def _check_unsupported(fields: ChatRequest) -> None:
    def refuse(param: str, why: str) -> InvalidRequest:
        return InvalidRequest(why, param=param, code="unsupported_parameter")

    if fields.top_logprobs is not None and not fields.logprobs:
        raise refuse("top_logprobs", "top_logprobs needs logprobs: true.")
    if fields.modalities and set(fields.modalities) != {"text"}:
        raise refuse("modalities", "This model has text only.")


def _tool_use(fields: ChatRequest, ignored: list[str]) -> ToolUse:
    parallel = fields.parallel_tool_calls
    return read_tools(fields.tools, fields.tool_choice, parallel=parallel, ignored=ignored)


def _check_tool_format(formats: ModelFormats, use: ToolUse) -> None:
    """Raises InvalidRequest where calls may be made and the model's template knows none."""
    if use.mode != "none" and formats.tools is None:
        raise InvalidRequest(
            "This model's chat template has no tool calls of a known format; "
            "send tool_choice: none, or no tools.",
            param="tools",
            code="unsupported_parameter",
        )


def _template_variables(
    fields: ChatRequest, template: ChatTemplate, ignored: list[str]
) -> dict[str, Any]:
    """Thinking switches and chat_template_kwargs that the template reads; the rest is ignored."""
    effort = fields.reasoning_effort or (fields.reasoning or {}).get("effort")
    thinking = fields.thinking
    if isinstance(thinking, dict):  # {"type": "enabled", "budget_tokens": 1024}
        thinking = thinking.get("type") != "disabled"
    given: Mapping[str, tuple[Any, tuple[str, ...]]] = {
        "reasoning_effort": (effort, ("reasoning_effort",)),
        "thinking": (thinking, ("thinking", "enable_thinking")),
        "enable_thinking": (fields.enable_thinking, ("enable_thinking", "thinking")),
    }
    variables = {}
    for name, (value, targets) in given.items():
        target = next((target for target in targets if target in template.variables), None)
        if value is not None and target is not None:
            variables[target] = value
        elif value is not None:
            ignored.append(name)
    for name, value in fields.chat_template_kwargs.items():
        if name in template.variables:
            variables[name] = value
        else:
            ignored.append(f"chat_template_kwargs.{name}")
    return variables
