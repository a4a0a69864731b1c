"""Request fields to `SamplingParams`, with the model's generation_config.json as defaults."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, TypeVar

from radix_mla.errors import InvalidRequest
from radix_mla.models.hf_config import GenerationDefaults
from radix_mla.request import SamplingParams
from server.openai.prompts import TokenIds
from server.openai.schemas import GenerationFields
from server.openai.structured import grammar_of

_GREEDY_BELOW = 1e-3  # dividing logits by less is greedy in fp32 anyway, but may overflow
_SEED_MASK = 2**63 - 1
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request gets that says nothing (OpenAI's defaults, or the model's own)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, model: GenerationDefaults) -> Self:
        """The model's own where generation_config.json says something."""
        own = {name: getattr(model, name) for name in cls.__slots__}
        return cls(**{name: value for name, value in own.items() if value is not None})


def sampling_params(
    fields: GenerationFields,
    defaults: SamplingDefaults,
    ids: TokenIds,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The engine's parameters.

    Raises InvalidRequest for ids outside the vocabulary, and for a format that cannot be enforced.
    """
    if fields.best_of is not None and fields.best_of > fields.n:
        raise InvalidRequest(
            f"best_of is {fields.best_of}; more than n ({fields.n}) is not supported.",
            param="best_of",
            code="unsupported_parameter",
        )
    temperature = _or(fields.temperature, defaults.temperature)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(fields.min_tokens, max_tokens),
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=_or(fields.top_p, defaults.top_p),
        top_k=max(0, _or(fields.top_k, defaults.top_k)),
        min_p=_or(fields.min_p, defaults.min_p),
        seed=secrets.randbits(63) if fields.seed is None else fields.seed & _SEED_MASK,
        repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        logit_bias=_logit_bias(fields.logit_bias, ids.vocab_size),
        stop_token_ids=tuple(ids.check(fields.stop_token_ids, "stop_token_ids")),
        ignore_eos=fields.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(fields),
    )


def check_min_tokens(fields: GenerationFields, requested: int | None) -> None:
    """Raises InvalidRequest when min_tokens is above the max_tokens that was asked for."""
    if requested is not None and fields.min_tokens > requested:
        raise InvalidRequest(
            f"min_tokens is {fields.min_tokens}, above max_tokens ({requested}).",
            param="min_tokens",
            code="invalid_value",
        )


def _or(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    result: dict[int, float] = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias has key {key[:32]!r}; keys are token ids in [0, {vocab_size}).",
                param="logit_bias",
                code="invalid_token_id",
            )
        result[int(key)] = value
    return result
