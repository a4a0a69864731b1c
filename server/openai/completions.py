"""POST /v1/completions: text, token-id and batched prompts; echo and logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radix_mla.text.detokenizer import make_detokenizer
from radix_mla.text.tokenizer import Tokenizer
from server.choice import Delta, TokenEntry
from server.docs import OF_A_GENERATION, describe
from server.generation import Generation
from server.lengths import check_zero, requested_max_tokens
from server.openai.answers import CompletionAnswer
from server.openai.common import answer, cut_lengths, make_job, parse, service_of
from server.openai.frame import Frame
from server.openai.logprobs import TokenNames, completion_logprobs
from server.openai.prompts import parse_prompts
from server.openai.sampling import check_min_tokens, sampling_params
from server.openai.schemas import CompletionRequest
from server.openai.stream import sse
from server.service import Service

router = APIRouter()
_DEFAULT_MAX_TOKENS = 16


@router.post(
    "/v1/completions",
    **describe(CompletionAnswer, body=CompletionRequest, stream=True, errors=OF_A_GENERATION),
)
async def completions(http: Request) -> Response:
    """Continues a prompt, or several."""
    service = service_of(http)
    parsed = await parse(http, CompletionRequest)
    fields = parsed.fields
    requested = requested_max_tokens(fields.max_tokens, fields.n_predict)
    check_zero(requested, echo=fields.echo)
    check_min_tokens(fields, requested)
    prompts = await _prompts(service, fields)
    lengths = cut_lengths(
        service,
        [prompt.token_ids for prompt in prompts],
        requested,
        default=_DEFAULT_MAX_TOKENS,
        param="prompt",
    )
    params = sampling_params(
        fields,
        service.defaults,
        service.token_ids,
        max_tokens=max(lengths),
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo else None,
    )
    job = make_job(parsed, [prompt.token_ids for prompt in prompts], lengths, params)
    frame = Frame(service, parsed, prefix="cmpl", whole="text_completion", chunk="text_completion")
    names = TokenNames(service.tokenizer, as_ids=fields.return_tokens_as_token_ids)
    renderer = CompletionRenderer(frame, fields, prompts, names)
    return answer(service, parsed, job, renderer, frame.id)


@dataclass(slots=True)
class Prompt:
    """Ids; with echo the text, and with logprobs the text's length before each token."""

    token_ids: list[int]
    text: str = ""
    offsets: list[int] = field(default_factory=list)


async def _prompts(service: Service, fields: CompletionRequest) -> list[Prompt]:
    given = parse_prompts(
        fields.prompt, service.token_ids, max_prompts=service.settings.max_prompts
    )
    if any(isinstance(prompt, str) for prompt in given):
        service.need_tokenizer()
    elif not fields.echo:
        return [Prompt(ids) for ids in given if isinstance(ids, list)]
    return await service.in_pool(lambda: _encode(given, service.tokenizer, fields))


def _encode(
    given: Sequence[str | list[int]], tokenizer: Tokenizer | None, fields: CompletionRequest
) -> list[Prompt]:
    prompts = []
    for item in given:
        if not isinstance(item, str):
            prompt = Prompt(item)
        elif tokenizer is not None and fields.add_special_tokens is None:
            prompt = Prompt(tokenizer.encode_prompt(item))
        else:
            assert tokenizer is not None  # text prompts were refused without one
            prompt = Prompt(
                tokenizer.encode(item, add_special_tokens=bool(fields.add_special_tokens))
            )
        if fields.echo and tokenizer is not None:
            _add_echo(prompt, item, tokenizer, fields)
        prompts.append(prompt)
    return prompts


def _add_echo(
    prompt: Prompt, given: str | list[int], tokenizer: Tokenizer, fields: CompletionRequest
) -> None:
    if fields.logprobs is None and isinstance(given, str):
        prompt.text = given
        return
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=fields.skip_special_tokens)
    for token_id in prompt.token_ids:
        prompt.offsets.append(len(prompt.text))
        prompt.text += detokenizer.push(token_id)
    prompt.text += detokenizer.flush()


class CompletionRenderer:
    """`text_completion` objects."""

    def __init__(
        self,
        frame: Frame,
        fields: CompletionRequest,
        prompts: Sequence[Prompt],
        names: TokenNames,
    ) -> None:
        self._frame = frame
        self._fields = fields
        self._prompts = prompts
        self._names = names
        self.end = frame.end
        self.collect = frame.collect

    def events(self, deltas: list[Delta], generation: Generation) -> bytes:
        return b"".join(
            sse(self._frame.chunk(self._choice(delta, generation), generation))
            for delta in deltas
            if self._worth_sending(delta)
        )

    def body(self, generation: Generation) -> dict[str, Any]:
        choices = []
        for choice in generation.choices:
            parts = self._frame.collected(choice.index)
            whole = Delta(
                choice.index,
                "".join(part.text for part in parts),
                [token_id for part in parts for token_id in part.token_ids],
                [entry for part in parts for entry in part.entries],
                choice.finish_reason,
            )
            choices.append(self._choice(whole, generation))
        return self._frame.whole(choices, generation)

    def _worth_sending(self, delta: Delta) -> bool:
        fields = self._fields
        return bool(
            delta.text
            or delta.finish_reason
            or fields.return_token_ids
            or fields.logprobs is not None
            or (fields.echo and not self._frame.has_begun(delta.choice))
            or not self._names.has_text
        )

    def _choice(self, delta: Delta, generation: Generation) -> dict[str, Any]:
        prompt = self._prompts[delta.choice // self._fields.n]
        state = generation.choices[delta.choice]
        first = self._frame.begin(delta.choice)
        echo = self._fields.echo
        choice: dict[str, Any] = {
            "index": delta.choice,
            "text": prompt.text + delta.text if echo and first else delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": state.stop_reason if delta.finish_reason else None,
        }
        if self._fields.logprobs is not None:
            shift = len(prompt.text) if echo else 0
            entries = [
                entry._replace(text_offset=entry.text_offset + shift) for entry in delta.entries
            ]
            if echo and first:
                entries = _prompt_entries(prompt, state.prompt_logprobs) + entries
            choice["logprobs"] = completion_logprobs(entries, self._names)
        if self._fields.return_token_ids:
            choice["token_ids"] = delta.token_ids
            choice["prompt_token_ids"] = prompt.token_ids if first else None
        return choice


def _prompt_entries(prompt: Prompt, logprobs: Sequence[Any] | None) -> list[TokenEntry]:
    """The echoed prompt's part of the logprobs; the first token has none."""
    offsets = prompt.offsets or [0] * len(prompt.token_ids)
    values = logprobs or [None] * len(prompt.token_ids)
    return [
        TokenEntry(token_id, value, offset)
        for token_id, value, offset in zip(prompt.token_ids, values, offsets, strict=True)
    ]
