"""What an attention backend is, and the one function that selects it.

A backend runs two ragged attentions; `radix_mla.attention` composes MLA's forms from them. It never
sees the prefix cache, the scheduler or the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from radix_mla.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True, slots=True)
class Caps:
    """What a backend can do. `page_sizes` None: any. `pad_heads`: K and V need one common width."""

    devices: frozenset[str]
    kv_dtypes: frozenset[str]
    page_sizes: frozenset[int] | None
    prefill: bool
    absorbed: bool
    pad_heads: bool


@dataclass(frozen=True, slots=True)
class MHAWork:
    """Ragged multi-head attention, fixed for the step: sequence i has queries cu_q[i:i+2] and keys
    cu_k[i:i+2] of the tensors given to `run_mha` (int64 [B + 1], host). Causal: aligned to the end.
    """

    cu_q: np.ndarray
    cu_k: np.ndarray
    causal: bool

    @property
    def num_queries(self) -> int:
        return int(self.cu_q[-1])


@dataclass(frozen=True, slots=True)
class MQAWork:
    """Absorbed attention over pages, fixed for the step: sequence i has queries cu_q[i:i+2], which
    are its last tokens, and kv_lens[i] rows in page_tables[i] (int32). `with_lse` False: nothing is
    merged afterwards.
    """

    cu_q: np.ndarray
    kv_lens: np.ndarray
    page_tables: tuple[np.ndarray, ...]
    page_size: int
    with_lse: bool = False


class Partial(NamedTuple):
    """Attention over some of the keys. out [T, H, V'] (V' as padded as the values were),
    lse [T, H] fp32, natural log, -inf for a query without keys (whose out is then 0 or undefined).
    """

    out: torch.Tensor
    lse: torch.Tensor


class AttentionBackend(Protocol):
    """plan once a step, run once a layer; run never allocates host metadata or syncs a device."""

    name: str
    caps: Caps

    def plan(self, mha: list[MHAWork], mqa: MQAWork | None) -> None:
        """Prepares what `run_*` will be called with in this step."""

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        """q [Tq, H, P + R], k [H, Tk, Dk], v [H, Tk, Dv] (Dk, Dv as in the workspace)."""

    def run_mqa(
        self,
        work: MQAWork,
        q: torch.Tensor,
        pool: torch.Tensor,
        scratch: torch.Tensor,
        latent: int,
        scale: float,
    ) -> Partial:
        """q [Tq, H, L + R] contiguous, pool [S, L + R]; out is [Tq, H, L], lse undefined without
        `work.with_lse`.

        scratch [W, L + R] in q's dtype may be overwritten.
        """


class Selected(NamedTuple):
    backend: AttentionBackend
    reason: str


def select_backend(name: str, device: str, *, kv_dtype: str, page_size: int) -> Selected:
    """The backend `name` ("auto": the best for the device) and why.

    Raises ConfigError with the reason when a named backend cannot run; there is no fallback.
    """
    from radix_mla.attention.torch_backend import TorchBackend

    if name not in ("auto", "torch"):
        raise ConfigError(f"attention_backend {name!r} does not exist; known: auto, torch")
    backend = TorchBackend(device)
    caps, kind = backend.caps, device.split(":")[0]
    if kind not in caps.devices:
        raise ConfigError(f"attention_backend torch runs on {sorted(caps.devices)}, not on {kind}")
    if kv_dtype not in caps.kv_dtypes:
        raise ConfigError(
            f"attention_backend torch reads KV rows of {sorted(caps.kv_dtypes)}, not {kv_dtype}"
        )
    if caps.page_sizes is not None and page_size not in caps.page_sizes:
        raise ConfigError(
            f"attention_backend torch needs a page size of {sorted(caps.page_sizes)}, "
            f"not {page_size}"
        )
    why = "named" if name == "torch" else "the only one for every device"
    return Selected(backend, f"torch: {why}")
