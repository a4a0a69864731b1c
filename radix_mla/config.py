"""The engine's configuration: what the user asks for, and what it resolves to.

`EngineConfig` may hold `None` / "auto". `EngineConfig.resolve` reads the model's config and the
machine once and returns a `ResolvedConfig`, fully concrete, with the list of decisions it took
(logged at start, shown in /server_info). Nothing below reads the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from radix_mla.errors import ConfigError

if TYPE_CHECKING:
    from radix_mla.attention.select import Choice
    from radix_mla.models.hf_config import ModelConfig

DType = Literal["fp32", "bf16"]
KVDType = Literal["fp32", "bf16"]
AttentionForm = Literal["auto", "absorbed", "non_absorbed", "one_shot"]

_KV_BYTES = {"fp32": 4, "bf16": 2}
# Of one step. Cached context is decompressed again in every chunk of a prompt, so a GPU takes long
# ones; on a CPU a long step keeps running streams waiting.
_STEP_TOKENS = {"cpu": 2048, "cuda": 8192}
_CPU_KV_SHARE = 0.25  # of free memory; rows are touched only when they are used
_CPU_KV_MAX_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the machine offers. `free_bytes` is memory on `device` before the model is loaded;
    `arch` a GPU's compute capability (90: sm90).
    """

    device: str
    free_bytes: int
    num_threads: int
    native_bf16: bool
    arch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asks for; `None` and "auto" are resolved against model and machine.

    Units: tokens for *_tokens and *_len, sequences for max_num_seqs, bytes for *_bytes.
    `hf_overrides` are values of config.json to replace.
    """

    model: str
    device: str = "auto"
    dtype: DType | Literal["auto"] = "auto"
    kv_dtype: KVDType | Literal["auto", "fp8"] = "auto"
    page_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    kv_cache_tokens: int | None = None
    attention_backend: str = "auto"
    attention_form: AttentionForm = "auto"
    workspace_tokens: int = 32_768
    schedule_policy: str = "fcfs"
    eviction_policy: str = "lru"
    enable_prefix_cache: bool = True
    max_retractions: int = 4
    load_format: Literal["auto", "dummy"] = "auto"
    hf_overrides: dict[str, Any] | None = None
    num_threads: int | None = None

    def resolve(self, model: ModelConfig, hardware: Hardware) -> ResolvedConfig:
        """Concrete values and the reasons for them.

        Raises ConfigError for a value out of range, naming the knob.
        """
        decisions: list[str] = []
        self._check_ranges()
        dtype = self._resolve_dtype(hardware, decisions)
        kv_dtype = self._resolve_kv_dtype(dtype, decisions)
        backends = self._choose_backends(dtype, kv_dtype, model, hardware)
        decisions.append(f"attention_backend={backends.name}: {backends.reason}")
        page_size = backends.page_size
        if self.page_size is None:
            decisions.append(f"page_size={page_size}: of the {backends.absorbed} backend")
        row_bytes = model.kv_row_width * _KV_BYTES[kv_dtype] * model.num_hidden_layers
        num_pages = self._resolve_pages(row_bytes, page_size, model, hardware, decisions)
        max_model_len = self._resolve_len(model, num_pages, page_size, decisions)
        return ResolvedConfig(
            model=self.model,
            device=hardware.device,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            num_pages=num_pages,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self._resolve_step_tokens(hardware, decisions),
            attention_backend=backends.name,
            attention_form=self.attention_form,
            workspace_tokens=self.workspace_tokens,
            schedule_policy=self.schedule_policy,
            eviction_policy=self.eviction_policy,
            enable_prefix_cache=self.enable_prefix_cache,
            max_retractions=self.max_retractions,
            load_format=self.load_format,
            num_threads=self.num_threads or hardware.num_threads,
            kv_row_bytes=row_bytes,
            decisions=tuple(decisions),
        )

    def _check_ranges(self) -> None:
        at_least_one = (
            "page_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_tokens",
            "workspace_tokens",
            "num_threads",
        )
        for knob in at_least_one:
            value = getattr(self, knob)
            if value is not None and value < 1:
                raise ConfigError(f"{knob} is {value}, it must be at least 1")
        if self.max_retractions < 0:
            raise ConfigError(f"max_retractions is {self.max_retractions}, it must be at least 0")

    def _choose_backends(
        self, dtype: DType, kv_dtype: KVDType, model: ModelConfig, hardware: Hardware
    ) -> Choice:
        from radix_mla.attention.backend import Setting
        from radix_mla.attention.mla import mla_dims
        from radix_mla.attention.select import choose_backends

        setting = Setting(
            device=hardware.device,
            arch=hardware.arch,
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=self.page_size,
            dims=mla_dims(model),
        )
        return choose_backends(self.attention_backend, setting)

    def _resolve_step_tokens(self, hardware: Hardware, decisions: list[str]) -> int:
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        kind = hardware.device.split(":")[0]
        tokens = _STEP_TOKENS.get(kind, _STEP_TOKENS["cpu"])
        decisions.append(f"max_num_batched_tokens={tokens}: default on {kind}")
        return tokens

    def _resolve_dtype(self, hardware: Hardware, decisions: list[str]) -> DType:
        if self.dtype != "auto":
            return self.dtype
        if hardware.device.startswith("cuda"):
            decisions.append("dtype=bf16: GPU")
            return "bf16"
        decisions.append("dtype=fp32: CPU")
        return "fp32"

    def _resolve_kv_dtype(self, dtype: DType, decisions: list[str]) -> KVDType:
        if self.kv_dtype == "fp8":
            raise ConfigError("kv_dtype fp8 is not implemented yet; use fp32 or bf16")
        if self.kv_dtype != "auto":
            return self.kv_dtype
        decisions.append(f"kv_dtype={dtype}: as dtype")
        return dtype

    def _resolve_pages(
        self,
        row_bytes: int,
        page_size: int,
        model: ModelConfig,
        hardware: Hardware,
        decisions: list[str],
    ) -> int:
        if self.kv_cache_tokens is not None:
            num_pages = self.kv_cache_tokens // page_size
            if num_pages < 2:
                raise ConfigError(
                    f"kv_cache_tokens {self.kv_cache_tokens} holds {num_pages} pages of "
                    f"{page_size}, at least 2 are needed"
                )
            return num_pages
        budget = int(hardware.free_bytes * _CPU_KV_SHARE)
        if hardware.device == "cpu":
            budget = min(budget, _CPU_KV_MAX_BYTES)
        num_pages = budget // (row_bytes * page_size)
        if num_pages < 2:
            raise ConfigError(
                f"{budget} bytes hold {num_pages} pages of {page_size} tokens; "
                "free memory or set kv_cache_tokens"
            )
        decisions.append(
            f"kv_cache_tokens={num_pages * page_size}: {_CPU_KV_SHARE:.0%} of free memory, "
            f"{row_bytes} bytes a token"
        )
        return num_pages

    def _resolve_len(
        self, model: ModelConfig, num_pages: int, page_size: int, decisions: list[str]
    ) -> int:
        """min(model, pool minus one page): what one request alone can really reach."""
        asked = self.max_model_len or model.max_position_embeddings
        if asked > model.max_position_embeddings:
            raise ConfigError(
                f"max_model_len {asked} is above the model's {model.max_position_embeddings}"
            )
        pool = (num_pages - 1) * page_size
        if pool < asked:
            decisions.append(f"max_model_len={pool}: the KV pool less one page; asked {asked}")
            return pool
        if self.max_model_len is None:
            decisions.append(f"max_model_len={asked}: from the model")
        return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Fully concrete. `kv_row_bytes` is all layers' bytes of one token."""

    model: str
    device: str
    dtype: DType
    kv_dtype: KVDType
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    attention_backend: str
    attention_form: AttentionForm
    workspace_tokens: int
    schedule_policy: str
    eviction_policy: str
    enable_prefix_cache: bool
    max_retractions: int
    load_format: Literal["auto", "dummy"]
    num_threads: int
    kv_row_bytes: int
    decisions: tuple[str, ...]

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * self.page_size


def detect_hardware(device: str) -> Hardware:
    """Reads the machine. `device` "auto" takes the first GPU if torch sees one.

    Raises ConfigError when a named device is not there.
    """
    import torch  # here, so that reading a configuration does not cost torch's import

    from radix_mla.attention.select import device_arch

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if device == "cpu":
        return Hardware("cpu", _free_cpu_bytes(), threads or 1, _cpu_has_bf16())
    if device == "cuda":
        device = "cuda:0"
    if not torch.cuda.is_available():
        raise ConfigError(f"device {device!r}: torch {torch.__version__} sees no GPU")
    try:
        free, _ = torch.cuda.mem_get_info(device)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"device {device!r}: {error}") from error
    arch = device_arch(device)
    return Hardware(device, free, threads or 1, native_bf16=True, arch=arch)


def _free_cpu_bytes() -> int:
    """MemAvailable, or the cgroup's room where that is smaller."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def _cpu_has_bf16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and any(
        flag in cpuinfo.read_text() for flag in (" avx512_bf16", " amx_bf16", " bf16")
    )
