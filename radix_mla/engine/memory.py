"""How many KV rows fit a GPU: the largest steps run once, and what they leave free becomes pages.

    load weights ─► small pool, full workspace ─► measure_steps ─► size_pool ─► the real pool

The pool of the profile run needs no more than its dummy page: every row of it goes there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from radix_mla.engine.step import Chunk, StepPlan
from radix_mla.errors import ConfigError

if TYPE_CHECKING:
    from radix_mla.config import EngineConfig, Hardware, ResolvedConfig
    from radix_mla.models.hf_config import ModelConfig

_RESERVE_SHARE = 0.02  # of the GPU: fragments of the allocator, library workspaces, other contexts
_RESERVE_MIN_BYTES = 512 << 20
_GIB = float(1 << 30)


class DeviceMemory(Protocol):
    """What is asked of a device's allocator, in bytes."""

    @property
    def total(self) -> int: ...

    def free(self) -> int:
        """What can still be allocated, after unused blocks have gone back."""

    def allocated(self) -> int:
        """What tensors hold now."""

    def restart_peak(self) -> None:
        """`peak` counts from here."""

    def peak(self) -> int:
        """The most that tensors held at once since `restart_peak`."""


class CudaMemory:
    """The caching allocator of one GPU."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self.total: int = torch.cuda.get_device_properties(self._device).total_memory

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self._device)[0]
        held = torch.cuda.memory_reserved(self._device) - self.allocated()
        return free + held

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def restart_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)


def measure_steps(
    config: ResolvedConfig,
    dummy_page: int,
    run: Callable[[StepPlan], object],
    memory: DeviceMemory,
) -> int:
    """The most bytes that a step needs beyond what is allocated now. Runs `largest_steps`."""
    before = memory.allocated()
    memory.restart_peak()
    for plan in largest_steps(config, dummy_page):
        run(plan)
    return max(0, memory.peak() - before)


def largest_steps(config: ResolvedConfig, dummy_page: int) -> list[StepPlan]:
    """The steps of most memory: one long prefill on a context that fills the workspace, and the
    token budget dealt to as many sequences as may run, each with logits. All rows are dummies.
    """
    budget = config.max_num_batched_tokens
    prompt = min(budget, config.max_model_len)
    context = max(0, min(config.workspace_tokens, config.max_model_len - prompt))
    num_seqs = min(config.max_num_seqs, budget)
    share = min(budget // num_seqs, config.max_model_len)

    def chunk(num: int, start: int) -> Chunk:
        pages = -(-(start + num) // config.page_size)
        table = np.full(pages, dummy_page, dtype=np.int32)
        return Chunk(np.zeros(num, dtype=np.int32), start, table, 1, is_decode=False)

    prefill = [chunk(prompt, context)]
    dealt = [chunk(share, 0) for _ in range(num_seqs)]
    return [StepPlan(0, prefill, []), StepPlan(0, dealt, [])]


def size_pool(
    asked: EngineConfig,
    model: ModelConfig,
    hardware: Hardware,
    *,
    step_bytes: int,
    memory: DeviceMemory,
    graph_bytes: int = 0,
) -> ResolvedConfig:
    """`asked` resolved again, with the pages that fit what is free now beside a step.

    Call it with the weights and the workspace allocated and the profile's pool freed.
    `graph_bytes` are set aside for CUDA graphs. A kv_cache_tokens that the user named stays, if it
    fits. Raises ConfigError that says what to change where it does not, or nothing does.
    """
    config = asked.resolve(model, hardware)
    reserve = max(_RESERVE_MIN_BYTES, int(memory.total * _RESERVE_SHARE)) + graph_bytes
    free = memory.free()
    page_bytes = config.kv_row_bytes * config.page_size
    num_pages = (free - step_bytes - reserve) // page_bytes - 1  # less the dummy page
    found = (
        f"{free / _GIB:.2f} GiB are free after loading, a step takes {step_bytes / _GIB:.2f}, "
        f"{reserve / _GIB:.2f} are kept back"
    )
    if asked.kv_cache_tokens is not None:
        if config.num_pages > num_pages:
            raise ConfigError(
                f"kv_cache_tokens {asked.kv_cache_tokens} does not fit the GPU: {found}; "
                f"at most {max(0, num_pages) * config.page_size} do"
            )
        return config
    if num_pages < 2:
        raise ConfigError(f"no room for KV rows on the GPU: {found}; {_advice(config)}")
    tokens = num_pages * config.page_size
    sized = replace(asked, kv_cache_tokens=tokens).resolve(model, hardware)
    return replace(sized, decisions=(*sized.decisions, f"kv_cache_tokens={tokens}: {found}"))


@contextmanager
def explain_out_of_memory(config: ResolvedConfig, doing: str) -> Iterator[None]:
    """Turns the allocator's error into a ConfigError that names what to change.

    `doing` is what the memory was for: "loading the weights", "a step of 2048 tokens".
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).split(". ")[0]
        raise ConfigError(
            f"out of GPU memory while {doing} ({reason}); {_advice(config)}"
        ) from error


def _advice(config: ResolvedConfig) -> str:
    return (
        f"lower kv_cache_tokens (now {config.kv_tokens}), workspace_tokens "
        f"(now {config.workspace_tokens}) or max_num_batched_tokens "
        f"(now {config.max_num_batched_tokens}), or serve a smaller model"
    )
