"""What an attention backend is: capabilities, two ragged attentions, planned once a step.

`radix_mla.attention` composes MLA's forms from the two attentions. A backend never sees the prefix
cache, the scheduler or the model. A *pair* serves an engine: one backend for multi-head attention
(prefill), one for absorbed attention (decode and extend); `select.py` says which and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

    from radix_mla.attention.shared_prefix import SharedPrefixes
    from radix_mla.attention.static_plan import StaticMQA
    from radix_mla.attention.workspace import MLADims


@dataclass(frozen=True, slots=True)
class Caps:
    """What a backend can do.

    `archs`: least and greatest CUDA compute capability (90: sm90), None: no GPU needed. `dtypes`:
    to compute in. `page_sizes` None: any. `prefill`: `run_mha`. `absorbed`: `run_mqa`, for decode
    and for extends. `lse`: returned where asked for. `graph_safe`: `run_*` can be captured.
    `pad_heads`: K and V need one common width.
    """

    devices: frozenset[str]
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str]
    page_sizes: frozenset[int] | None
    prefill: bool
    absorbed: bool
    pad_heads: bool
    lse: bool = True
    graph_safe: bool = False
    archs: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """What an engine asks of its backends. `arch`: as in `Caps`, None on CPU. `page_size` None:
    the backend may choose. `max_pages`: of one sequence. `max_tokens`: of one step.
    """

    device: str
    arch: int | None
    dtype: str
    kv_dtype: str
    page_size: int | None
    dims: MLADims
    max_num_seqs: int = 256
    max_tokens: int = 2048
    max_pages: int = 1 << 14

    @property
    def device_type(self) -> str:
        return self.device.split(":")[0]


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
    merged afterwards. `shared` None: nobody has looked (`shared_prefix.shared_in` does).
    """

    cu_q: np.ndarray
    kv_lens: np.ndarray
    page_tables: tuple[np.ndarray, ...]
    page_size: int
    with_lse: bool = False
    shared: SharedPrefixes | None = None

    @property
    def num_queries(self) -> int:
        return int(self.cu_q[-1])


class Partial(NamedTuple):
    """Attention over some of the keys. out [T, H, V'] (V' as padded as the values were),
    lse [T, H] fp32 of any strides, natural log, -inf for a query without keys (whose out is then 0
    or undefined).
    """

    out: torch.Tensor
    lse: torch.Tensor


class MHABackend(Protocol):
    """Multi-head attention over decompressed keys and values: prefill."""

    name: str
    caps: Caps

    def plan_mha(self, works: list[MHAWork]) -> None:
        """Prepares the works that `run_mha` will be called with in this step."""

    def run_mha(
        self, work: MHAWork, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> Partial:
        """q [Tq, H, P + R], k [H, Tk, Dk], v [H, Tk, Dv] (Dk, Dv as in the workspace)."""


class MQABackend(Protocol):
    """Absorbed attention over the pool's rows: decode and extend."""

    name: str
    caps: Caps

    def plan_mqa(self, work: MQAWork | None) -> None:
        """Prepares the one work that `run_mqa` will be called with in this step."""

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


class AttentionBackend(MHABackend, MQABackend, Protocol):
    """Both. plan once a step, run once a layer; run never allocates host metadata or syncs."""

    def plan(self, mha: list[MHAWork], mqa: MQAWork | None) -> None:
        """Prepares what `run_*` will be called with in this step."""


class BackendPair:
    """One backend for prefill and one for absorbed attention, as an `AttentionBackend`.

    `static_mqa` (see `static_plan.StaticAbsorbed`) is None where `mqa` cannot run in a graph.
    """

    def __init__(self, mha: MHABackend, mqa: MQABackend) -> None:
        self.mha, self.mqa = mha, mqa
        self.static_mqa: Callable[..., StaticMQA] | None
        self.static_mqa = getattr(mqa, "static_mqa", None)
        self.name = f"{mha.name},{mqa.name}"
        a, b = mha.caps, mqa.caps
        self.caps = Caps(
            devices=a.devices & b.devices,
            dtypes=a.dtypes & b.dtypes,
            kv_dtypes=b.kv_dtypes,
            page_sizes=b.page_sizes,
            prefill=a.prefill,
            absorbed=b.absorbed,
            pad_heads=a.pad_heads,
            lse=a.lse and b.lse,
            graph_safe=b.graph_safe,
            archs=b.archs,
        )
        self.plan_mha, self.run_mha = mha.plan_mha, mha.run_mha
        self.plan_mqa, self.run_mqa = mqa.plan_mqa, mqa.run_mqa

    @property
    def sharing(self) -> BackendPair:
        """The pair for steps in which sequences share prefixes, for `StaticAbsorbed`; in eager
        steps `mqa` hands these over itself.
        """
        other: MQABackend | None = getattr(self.mqa, "sharing", None)
        return self if other in (None, self.mqa) else BackendPair(self.mha, other)

    def plan(self, mha: list[MHAWork], mqa: MQAWork | None) -> None:
        self.plan_mha(mha)
        self.plan_mqa(mqa)
