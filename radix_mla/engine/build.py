"""From an EngineConfig to a warm Engine: read, resolve, load, allocate, warm up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from radix_mla.cache.eviction import FIFO, LFU, LRU, EvictionPolicy
from radix_mla.cache.prefix_cache import PrefixCache
from radix_mla.config import EngineConfig, Hardware, ResolvedConfig, detect_hardware
from radix_mla.engine.engine import Engine
from radix_mla.engine.memory import CudaMemory, explain_out_of_memory, measure_steps, size_pool
from radix_mla.engine.model_runner import DTYPES, CausalLM, ModelRunner, make_pool
from radix_mla.engine.vocabulary import num_token_ids
from radix_mla.errors import ConfigError
from radix_mla.models.checkpoint import load_model, locate
from radix_mla.models.hf_config import GenerationDefaults, ModelConfig
from radix_mla.sampling.grammar import GrammarCompiler
from radix_mla.sampling.sampler import Sampler
from radix_mla.scheduler.budget import Limits
from radix_mla.scheduler.policy import load_policy
from radix_mla.scheduler.scheduler import Scheduler

_GRAPH_BYTES = 2 << 30  # CUDA graphs of small steps, their activations and logits

# (stage, done, total): bytes for "weights"; 0 of 1 and 1 of 1 for the others.
Progress = Callable[[str, int, int], None]

_EVICTION: dict[str, Callable[[], EvictionPolicy]] = {"lru": LRU, "lfu": LFU, "fifo": FIFO}


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Reads, resolves, loads, allocates and warms up.

    Raises ConfigError for a knob, ModelError for a checkpoint; nothing is left behind then.
    """
    report = progress or (lambda stage, done, total: None)
    report("config", 0, 1)
    folder = locate(config.model)
    model_config = ModelConfig.from_dir(folder, config.hf_overrides)
    defaults = GenerationDefaults.from_dir(folder, model_config)
    hardware = detect_hardware(config.device)
    resolved = config.resolve(model_config, hardware)
    policy, eviction = load_policy(resolved.schedule_policy), load_eviction(resolved)
    report("config", 1, 1)

    torch.set_num_threads(resolved.num_threads)
    with explain_out_of_memory(resolved, "loading the weights"):
        model = load_model(
            folder,
            model_config,
            dtype=DTYPES[resolved.dtype],
            device=resolved.device,
            load_format=resolved.load_format,
            progress=lambda done, total: report("weights", done, total),
        )
    report("warm-up", 0, 1)
    if resolved.device.startswith("cuda"):
        resolved = fit_gpu(config, hardware, model, resolved)
    with explain_out_of_memory(resolved, "allocating the KV pool and capturing steps"):
        runner = ModelRunner(model, make_pool(model_config, resolved), resolved)
        runner.warm_up(lambda done, total: report("warm-up", done, total))
    report("warm-up", 1, 1)

    num_sampleable = min(model_config.vocab_size, num_token_ids(folder) or model_config.vocab_size)
    cache = PrefixCache(resolved.num_pages, resolved.page_size, policy=eviction)
    return Engine(
        cache=cache,
        runner=runner,
        scheduler=Scheduler(
            cache, limits_of(resolved), policy, eos_ids=frozenset(defaults.eos_token_ids)
        ),
        sampler=Sampler(num_sampleable),
        vocab_size=model_config.vocab_size,
        grammars=GrammarCompiler(
            str(folder), eos_ids=defaults.eos_token_ids, vocab_size=num_sampleable
        ),
        info=describe(folder, model_config, defaults, resolved, runner, num_sampleable),
        overlap=resolved.device.startswith("cuda"),
    )


def fit_gpu(
    asked: EngineConfig, hardware: Hardware, model: CausalLM, resolved: ResolvedConfig
) -> ResolvedConfig:
    """`resolved` with the pages that a profile run leaves room for. Raises ConfigError: none do."""
    memory = CudaMemory(resolved.device)
    with explain_out_of_memory(resolved, f"a step of {resolved.max_num_batched_tokens} tokens"):
        pool = make_pool(model.config, replace(resolved, num_pages=1))
        runner = ModelRunner(model, pool, resolved)
        step_bytes = measure_steps(resolved, pool.dummy_page, runner.execute, memory)
    return size_pool(
        asked,
        model.config,
        hardware,
        step_bytes=step_bytes,
        memory=memory,
        graph_bytes=_GRAPH_BYTES,
    )


def limits_of(config: ResolvedConfig) -> Limits:
    return Limits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        num_pages=config.num_pages,
        max_retractions=config.max_retractions,
        enable_prefix_cache=config.enable_prefix_cache,
    )


def load_eviction(config: ResolvedConfig) -> EvictionPolicy:
    """lru, lfu, fifo or `module:Class`. Raises ConfigError that names the knob."""
    name = config.eviction_policy
    if name in _EVICTION:
        return _EVICTION[name]()
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join(sorted(_EVICTION))
        raise ConfigError(f"eviction_policy {name!r} is not one of {known}, nor module:Class")
    try:
        policy: EvictionPolicy = getattr(import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(f"eviction_policy {name!r}: {error}") from error
    return policy


def describe(
    folder: Path,
    model: ModelConfig,
    defaults: GenerationDefaults,
    config: ResolvedConfig,
    runner: ModelRunner,
    num_sampleable: int,
) -> dict[str, Any]:
    """Ready.info: plain values only."""
    resolved = asdict(config)
    decisions = list(resolved.pop("decisions"))
    return {
        "model": config.model,
        "model_path": str(folder),
        "architecture": model.architecture,
        "vocab_size": model.vocab_size,
        "num_sampleable": num_sampleable,
        "max_model_len": config.max_model_len,
        "kv_row_bytes": config.kv_row_bytes,
        "kv_tokens": config.kv_tokens,
        "workspace_bytes": runner.workspace_bytes,
        "num_params": model.num_params,
        "active_params": model.active_params,
        "eos_token_ids": list(defaults.eos_token_ids),
        "generation_defaults": {
            name: value
            for name, value in asdict(defaults).items()
            if name != "eos_token_ids" and value is not None
        },
        "dims": asdict(model),
        "config": resolved,
        "decisions": decisions,
    }
