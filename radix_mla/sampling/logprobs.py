"""Log probabilities of raw logits: before temperature, penalties, bias and filters."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from radix_mla.engine.outputs import TokenLogprobs

_FLOOR_NATS = np.float32(10.0)


def top_ids(scores: NDArray[np.float32], k: int) -> NDArray[np.intp]:
    """The k highest, highest first, equal ones by id."""
    k = min(k, len(scores))
    if k == 0:
        return np.empty(0, dtype=np.intp)
    ids = np.flatnonzero(scores >= scores.max() - _FLOOR_NATS)  # enough of a trained model
    if len(ids) < k:
        ids = np.arange(len(scores))
    values = scores[ids]
    border = np.partition(values, len(values) - k)[len(values) - k]
    ids = ids[values >= border]
    ranked: NDArray[np.intp] = ids[np.argsort(-scores[ids], kind="stable")]
    return ranked[:k]


def token_logprobs(logits: NDArray[np.float32], token_id: int, k: int) -> TokenLogprobs:
    """log_softmax of fp32 [num_sampleable] at `token_id` and at the k most likely ids."""
    top = float(logits.max())
    log_sum = top + math.log(float(np.exp(logits - np.float32(top)).sum()))
    chosen = logits[token_id]
    ids = top_ids(logits, k)
    return TokenLogprobs(
        logprob=float(chosen) - log_sum,
        rank=1 + int(np.count_nonzero(logits > chosen)),
        top_ids=ids.tolist(),
        top_logprobs=(logits[ids].astype(np.float64) - log_sum).tolist(),
    )
