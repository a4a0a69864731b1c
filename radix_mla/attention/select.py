"""Which attention backends serve an engine, and why: the one place that decides it.

A name is `auto`, one backend, or `PREFILL,DECODE`. A named backend that cannot run is an error with
its reason; `auto` takes the first of each list below that can, and says what kept it from the
others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from radix_mla.attention.backend import BackendPair, Setting
from radix_mla.errors import ConfigError

if TYPE_CHECKING:
    from radix_mla.attention.backend import AttentionBackend, Caps
    from radix_mla.attention.workspace import MLADims
    from radix_mla.config import ResolvedConfig

PREFILL = ("fa3", "fa2", "triton", "torch")  # best first
ABSORBED = ("flashmla", "triton", "torch")
BACKENDS = ("fa3", "fa2", "flashmla", "triton", "torch")
DEFAULT_PAGE_SIZE = 16


class Choice(NamedTuple):
    """`prefill` runs multi-head attention, `absorbed` decode and extends. `page_size`: what was
    asked for, else what `absorbed` wants. `reason`: one line for people.
    """

    prefill: str
    absorbed: str
    page_size: int
    reason: str

    @property
    def name(self) -> str:
        return self.prefill if self.prefill == self.absorbed else f"{self.prefill},{self.absorbed}"


def choose_backends(name: str, setting: Setting) -> Choice:
    """The pair for `name`. Raises ConfigError when a named backend cannot run."""
    prefill, absorbed = _asked(name)
    first, why_first = _pick("prefill", prefill, PREFILL, setting)
    second, why_second = _pick("absorbed", absorbed, ABSORBED, setting)
    sizes = caps_of(second).page_sizes
    page_size = setting.page_size or (
        DEFAULT_PAGE_SIZE if sizes is None or DEFAULT_PAGE_SIZE in sizes else min(sizes)
    )
    reason = f"prefill {first} ({why_first}); decode and extend {second} ({why_second})"
    return Choice(first, second, page_size, reason)


def make_backend(choice: Choice, setting: Setting) -> AttentionBackend:
    """The chosen pair, ready for an engine of this `setting` (whose page size is fixed)."""
    mqa = _module(choice.absorbed).make(setting)
    if choice.prefill == choice.absorbed:
        one: AttentionBackend = mqa
        return one
    mha = _module(choice.prefill).make(setting)
    if choice.absorbed == "flashmla" and refusal("triton", "absorbed", setting) is None:
        sharing = mha if choice.prefill == "triton" else _module("triton").make(setting)
        mqa.share_with(sharing)
    return BackendPair(mha, mqa)


def setting_of(config: ResolvedConfig, dims: MLADims) -> Setting:
    """What `config` asks of its backends. Asks the GPU for its architecture."""
    return Setting(
        device=config.device,
        arch=device_arch(config.device),
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        page_size=config.page_size,
        dims=dims,
        max_num_seqs=config.max_num_seqs,
        max_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_pages=-(-config.max_model_len // config.page_size) + 1,
    )


def device_arch(device: str) -> int | None:
    """90 for compute capability 9.0; None where there is no GPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def caps_of(backend: str) -> Caps:
    caps: Caps = _module(backend).CAPS
    return caps


def refusal(backend: str, role: str, setting: Setting) -> str | None:
    """Why `backend` cannot take `role` ("prefill" or "absorbed") here; None: it can."""
    caps = caps_of(backend)
    if not getattr(caps, role):
        return f"it has no {role} attention"
    if setting.device_type not in caps.devices:
        return f"runs on {sorted(caps.devices)}, not on {setting.device_type}"
    if caps.archs is not None:
        low, high = caps.archs
        if setting.arch is None or not low <= setting.arch <= high:
            wanted = f"sm{low}" if low == high else f"sm{low} to sm{high}"
            return f"needs {wanted}, this GPU is sm{setting.arch}"
    if setting.dtype not in caps.dtypes:
        return f"computes in {sorted(caps.dtypes)}, not in {setting.dtype}"
    if role == "absorbed":
        if setting.kv_dtype not in caps.kv_dtypes:
            return f"reads KV rows of {sorted(caps.kv_dtypes)}, not {setting.kv_dtype}"
        if None not in (caps.page_sizes, setting.page_size):
            assert caps.page_sizes is not None
            if setting.page_size not in caps.page_sizes:
                return f"needs a page size of {_sizes(caps.page_sizes)}, not {setting.page_size}"
    reason: str | None = _module(backend).unavailable(setting)
    return reason


def _sizes(sizes: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _asked(name: str) -> tuple[str, str]:
    """(prefill, absorbed) names, each possibly auto. One name takes the roles that it has."""
    names = [part.strip() for part in name.split(",")]
    for part in names:
        if part not in (*BACKENDS, "auto"):
            known = ", ".join(("auto", *BACKENDS))
            raise ConfigError(f"attention_backend {part!r} does not exist; known: {known}")
    if len(names) == 2:
        return names[0], names[1]
    if len(names) > 2:
        raise ConfigError(f"attention_backend {name!r}: one name, or PREFILL,DECODE")
    if name == "auto":
        return "auto", "auto"
    caps = caps_of(name)
    return name if caps.prefill else "auto", name if caps.absorbed else "auto"


def _pick(role: str, asked: str, order: tuple[str, ...], setting: Setting) -> tuple[str, str]:
    """(backend, why)."""
    if asked != "auto":
        reason = refusal(asked, role, setting)
        if reason is not None:
            raise ConfigError(f"attention_backend {asked} cannot run: {reason}")
        return asked, "named"
    skipped: list[str] = []
    for backend in order:
        reason = refusal(backend, role, setting)
        if reason is None:
            return backend, "; ".join(skipped) or "the fastest here"
        skipped.append(f"not {backend}: {reason}")
    raise ConfigError(f"no attention backend can run: {'; '.join(skipped)}")


def _module(backend: str) -> Any:
    return import_module(f"radix_mla.attention.backends.{backend}")
