"""Drawing tokens where the logits are: what comes to the host is one number a row.

The draws are those of `draw.py` (see `kernels/triton/sample.py` for what may differ in the last
bit); what needs more than a row's logits, or logprobs, is the host's.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
import torch

from radix_mla.sampling.penalties import changes_logits
from radix_mla.upload import Readback

if TYPE_CHECKING:
    from radix_mla.scheduler.batch import Work

# Of a temperature. Below this the second most likely id has no weight in fp32 but in a near-tie;
# and scores divided by much less overflow.
GREEDY_BELOW = 1e-3
_NO_TOKEN = -1


def can_draw(item: Work) -> bool:
    """Whether the token of `item` follows from its last row of logits and its parameters."""
    seq = item.sequence
    return (
        item.samples
        and seq.constraint is None
        and seq.params.logprobs is None
        and not seq.needs_prompt_logprobs
        and not changes_logits(seq)
    )


def is_due_nothing(item: Work) -> bool:
    """Neither a token nor logprobs: a chunk before its prompt's end."""
    return not item.samples and item.num_logits == 0


class DeviceDraw:
    """Queued when made; `tokens` waits for it.

    on_device: int64 [len(items)], ids whatever the logits are.
    """

    on_device: torch.Tensor

    def __init__(self, logits: torch.Tensor, items: Items[Work]) -> None:
        """logits fp32 [T, num_sampleable]; every item `can_draw`."""
        from kernels.triton.sample import greedy, sample

        rows = [item.first_row + item.num_logits - 1 for item in items]
        if rows != list(range(len(logits))):
            logits = logits.index_select(0, _send(np.array(rows, dtype=np.int64), logits))
        params = [item.sequence.params for item in items]
        if all(p.temperature < GREEDY_BELOW for p in params):
            tokens, finite = greedy(logits)
        else:
            sequences = [item.sequence for item in items]
            seeds = np.array([p.seed & (1 << 64) - 1 for p in params], dtype=np.uint64)
            tokens, finite = sample(
                logits,
                temperature=_send(np.array([p.temperature for p in params], np.float32), logits),
                top_k=_send(np.array([p.top_k for p in params], np.int32), logits),
                top_p=_send(np.array([p.top_p for p in params], np.float64), logits),
                min_p=_send(np.array([p.min_p for p in params], np.float32), logits),
                seeds=_send(seeds.view(np.int64), logits),
                choices=_send(np.array([s.index for s in sequences], np.int64), logits),
                positions=_send(np.array([item.position for item in items], np.int64), logits),
            )
        self.on_device = tokens
        self._answer = Readback(torch.where(finite, tokens, _NO_TOKEN))

    def tokens(self) -> list[int | None]:
        """Of each item; None where its greatest logit is not finite."""
        return [None if token == _NO_TOKEN else token for token in self._answer.wait().tolist()]


def _send(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    host = torch.from_numpy(array)
    return host.pin_memory().to(like.device, non_blocking=True) if like.is_cuda else host
