"""Which numbers sampling has a meaning for. (The server's schemas refuse the others themselves.)"""

from __future__ import annotations

import math
import numbers

from radix_mla.errors import InvalidRequest
from radix_mla.request import SamplingParams

_NUMBERS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def check_ranges(params: SamplingParams) -> None:
    """Raises InvalidRequest for values of another type or out of range; NaN compares false and so
    is refused too.
    """
    for name in _NUMBERS:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise InvalidRequest(f"{name} is {value!r}, not a number", param=name)
    ranges = {
        "temperature": 0 <= params.temperature < math.inf,
        "top_p": 0 < params.top_p <= 1,
        "top_k": params.top_k >= 0,
        "min_p": 0 <= params.min_p <= 1,
        "repetition_penalty": 0 < params.repetition_penalty < math.inf,
        "presence_penalty": math.isfinite(params.presence_penalty),
        "frequency_penalty": math.isfinite(params.frequency_penalty),
        "logit_bias": not any(math.isnan(bias) for bias in (params.logit_bias or {}).values()),
    }
    for name, is_valid in ranges.items():
        if not is_valid:
            raise InvalidRequest(f"{name} is {getattr(params, name)}, out of range", param=name)
