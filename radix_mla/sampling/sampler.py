"""Sampler: a step's logits → one token for each sequence that is due one.

Sequences are independent: a row's token depends on its logits, its params, its tokens and the draw
keyed by (seed, choice, position), never on the batch. A failure is one row's.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from radix_mla.sampling.constraint import MaskBuilder
from radix_mla.sampling.draw import draw
from radix_mla.sampling.logprobs import token_logprobs
from radix_mla.sampling.on_device import GREEDY_BELOW, DeviceDraw, can_draw, is_due_nothing
from radix_mla.sampling.penalties import adjust, changes_logits
from radix_mla.sampling.uniform import uniform
from radix_mla.scheduler.batch import Sampled, Work

if TYPE_CHECKING:
    import torch

    from radix_mla.engine.outputs import TokenLogprobs
    from radix_mla.scheduler.sequence import Sequence

_NONFINITE = Sampled(error="the model's logits are not finite", nonfinite=True)


class QueuedSample:
    """Tokens that the device draws. tokens: int64 [N] of the items that sample, there; `wait`
    brings them here, with an empty entry for each item that does not.
    """

    def __init__(self, logits: torch.Tensor, work: Items[Work]) -> None:
        self._samples = [item.samples for item in work]
        due = [item for item in work if item.samples]
        self._draw = DeviceDraw(logits, due) if due else None
        self.tokens = logits.new_empty(0).long() if self._draw is None else self._draw.on_device

    def wait(self) -> list[Sampled]:
        tokens = iter(() if self._draw is None else self._draw.tokens())
        return [_of_token(next(tokens)) if samples else Sampled() for samples in self._samples]


class Sampler:
    """num_sampleable: ids [0, num_sampleable) can be drawn; the rest pads the model's vocabulary.

    Logprobs are those of the raw logits over the sampleable ids (before temperature, penalties and
    grammar).
    """

    def __init__(self, num_sampleable: int) -> None:
        self._num_sampleable = num_sampleable
        self._masks = MaskBuilder()

    def sample(self, logits: torch.Tensor, work: Items[Work]) -> list[Sampled]:
        """One entry for each of `work`. logits: fp32 [sum of num_logits, vocab], any device."""
        logits = logits[:, : self._num_sampleable]  # [T, num_sampleable]
        if logits.is_cuda:
            return self._sample_on_device(logits, work)
        return self._sample_on_host(logits.numpy(), work)

    def can_queue(self, work: Items[Work]) -> bool:
        """Whether `queue` takes them: every token follows from the logits and the parameters.

        What was queued once can be again: nothing of it changes with a token.
        """
        return all(item.is_drawn or is_due_nothing(item) or can_draw(item) for item in work)

    def queue(self, logits: torch.Tensor, work: Items[Work]) -> QueuedSample:
        """`sample` without waiting for the device, nor for what the step before it draws."""
        return QueuedSample(logits[:, : self._num_sampleable], work)

    def _sample_on_device(self, logits: torch.Tensor, work: Items[Work]) -> list[Sampled]:
        """Rows that the host must see go there; of the others one number each."""
        is_drawn = [can_draw(item) for item in work]
        drawn = [item for item, here in zip(work, is_drawn, strict=True) if here]
        draw = DeviceDraw(logits, drawn) if drawn else None
        others = [item for item, here in zip(work, is_drawn, strict=True) if not here]
        seen = iter(self._sample_on_host(*_only(logits, others)))
        tokens = iter(draw.tokens() if draw is not None else ())
        return [_of_token(next(tokens)) if here else next(seen) for here in is_drawn]

    def _sample_on_host(self, rows: NDArray[np.float32], work: Items[Work]) -> list[Sampled]:
        constrained = [w.sequence for w in work if w.samples and w.sequence.constraint is not None]
        if constrained:
            self._masks.wait(constrained)
        sampled = []
        for item in work:
            try:
                sampled.append(self._sample_one(rows, item))
            except Exception as error:
                sampled.append(Sampled(error=f"{type(error).__name__}: {error}"))
        if constrained:
            self._masks.start(
                (item.sequence, result.token_id)
                for item, result in zip(work, sampled, strict=True)
                if result.token_id is not None
            )
        return sampled

    def _sample_one(self, rows: NDArray[np.float32], item: Work) -> Sampled:
        seq = item.sequence
        prompt: Items[TokenLogprobs] = ()
        if seq.needs_prompt_logprobs:
            targets = seq.prompt_targets(item.num_tokens)
            own = rows[item.first_row : item.first_row + len(targets)]
            if not np.isfinite(own.max(initial=0.0)):
                return _NONFINITE
            k = seq.params.prompt_logprobs or 0
            prompt = [token_logprobs(r, t, k) for r, t in zip(own, targets.tolist(), strict=True)]
        if not item.samples:
            return Sampled(prompt_logprobs=prompt)
        row = rows[item.first_row + item.num_logits - 1]
        token_id = int(row.argmax())  # the first NaN, if there is one
        if not np.isfinite(row[token_id]):
            return _NONFINITE
        if not _is_plain(seq):
            token_id = _choose(row, seq)
        logprobs = None
        if seq.params.logprobs is not None:
            logprobs = token_logprobs(row, token_id, seq.params.logprobs)
        return Sampled(token_id, logprobs, prompt)


def _of_token(token_id: int | None) -> Sampled:
    return _NONFINITE if token_id is None else Sampled(token_id)


def _only(logits: torch.Tensor, work: Items[Work]) -> tuple[NDArray[np.float32], list[Work]]:
    """The rows of `work` on the host, and `work` with its rows counted in these."""
    import torch

    rows: list[int] = []
    moved = []
    for item in work:
        moved.append(item._replace(first_row=len(rows)))
        rows += range(item.first_row, item.first_row + item.num_logits)
    index = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    return logits.index_select(0, index).numpy(force=True), moved


def _is_plain(seq: Sequence) -> bool:
    """Greedy over the logits as they are."""
    return (
        seq.params.temperature < GREEDY_BELOW and seq.constraint is None and not changes_logits(seq)
    )


def _choose(row: NDArray[np.float32], seq: Sequence) -> int:
    scores = row
    if changes_logits(seq) or seq.constraint is not None:
        scores = row.copy()
        adjust(scores, seq)
    if seq.constraint is not None:
        if not seq.constraint.is_ready(seq.num_generated):
            raise ValueError(f"the grammar's mask is missing: {seq.constraint.problem}")
        seq.constraint.apply(scores, ignore_eos=seq.params.ignore_eos)
    if seq.params.temperature < GREEDY_BELOW:
        return int(scores.argmax())
    return draw(scores, seq.params, uniform(seq.params.seed, seq.index, seq.num_tokens))
