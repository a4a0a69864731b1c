"""What one token's KV row of one layer looks like in memory: `[latent L | rope R]`.

fp32   (L + R) · 4 bytes      bf16   (L + R) · 2 bytes      (L 512, R 64: 2,304 and 1,152)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radix_mla.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Row layout. `dtype` is the storage dtype of a pool's buffer, `width` its elements a row."""

    name: str
    latent: int
    rope: int
    dtype: torch.dtype

    @classmethod
    def of(cls, kv_dtype: str, *, latent: int, rope: int) -> KVLayout:
        """Raises ConfigError for a dtype without a layout."""
        if kv_dtype not in _DTYPES:
            raise ConfigError(f"kv_dtype {kv_dtype!r} has no row layout; known: {sorted(_DTYPES)}")
        return cls(name=kv_dtype, latent=latent, rope=rope, dtype=_DTYPES[kv_dtype])

    @property
    def width(self) -> int:
        return self.latent + self.rope

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one layer; there are no separate K and V, and no heads."""
        return self.width * self.dtype.itemsize

    def as_stored(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [N, width] after the rounding of storage, in their own dtype: what a hit will read.

        Returns `rows` itself where storage does not round.
        """
        return rows if rows.dtype == self.dtype else rows.to(self.dtype).to(rows.dtype)
