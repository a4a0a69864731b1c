"""`Workspace`: the scratch memory of attention, sized once in bytes and re-used by every layer.

    rows   [W, L + R]      gathered KV rows, in the compute dtype
    k      [H, W, Dk]      decompressed keys,   stage (a): the step's new tokens,
    v      [H, W, Dv]      decompressed values, stage (b): one context chunk at a time
    q_abs  [N, H, L + R]   absorbed queries
W = max(context rows, N), N = tokens of a step. Dk and Dv are what the backend wants: P + R and V,
or both their maximum. The columns that pad are zero from the start and never written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MLADims:
    """Head counts and widths of an MLA layer (the letters of `attention/mla.py`)."""

    num_heads: int
    latent: int
    nope: int
    rope: int
    value: int

    @property
    def qk(self) -> int:
        return self.nope + self.rope

    @property
    def row(self) -> int:
        return self.latent + self.rope


class Workspace:
    """Buffers for one layer at a time; on CPU they are touched only as far as they are used."""

    def __init__(
        self,
        dims: MLADims,
        *,
        context_rows: int,
        step_tokens: int,
        pad_heads: bool,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """`pad_heads`: keys and values both get width max(P + R, V)."""
        self.dims = dims
        self.context_rows = context_rows
        self.step_tokens = step_tokens
        self.dtype = dtype
        width = max(context_rows, step_tokens)
        heads = dims.num_heads
        self.k_width = max(dims.qk, dims.value) if pad_heads else dims.qk
        self.v_width = max(dims.qk, dims.value) if pad_heads else dims.value
        self._rows = torch.empty(width, dims.row, dtype=dtype, device=device)
        self._k = torch.zeros(heads, width, self.k_width, dtype=dtype, device=device)
        self._v = torch.zeros(heads, width, self.v_width, dtype=dtype, device=device)
        self._q_abs = torch.empty(step_tokens, heads, dims.row, dtype=dtype, device=device)
        self._views = self._absorbed_views(0)

    @property
    def num_bytes(self) -> int:
        return sum(b.nbytes for b in (self._rows, self._k, self._v, self._q_abs))

    def rows(self, num_rows: int | None = None) -> torch.Tensor:
        """[num_rows or W, L + R], contiguous, content undefined."""
        return self._rows[:num_rows]

    def keys(self, num_rows: int) -> torch.Tensor:
        """[H, num_rows, Dk]; columns past P + R are zero."""
        return self._k[:, :num_rows]

    def values(self, num_rows: int) -> torch.Tensor:
        """[H, num_rows, Dv]; columns past V are zero."""
        return self._v[:, :num_rows]

    def absorbed_queries(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, H, L + R], contiguous, content undefined."""
        return self._q_abs[:num_tokens]

    def absorbed_views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`absorbed_queries` [t, H, L + R], its latent part as [H, t, L], its rope part [t, H, R].

        The last answer is kept: all layers of a step ask for the same.
        """
        if len(self._views[0]) != num_tokens:
            self._views = self._absorbed_views(num_tokens)
        return self._views

    def _absorbed_views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, latent = self.absorbed_queries(num_tokens), self.dims.latent
        return q, q[..., :latent].transpose(0, 1), q[..., latent:]
