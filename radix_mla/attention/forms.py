"""Which form of MLA attention a request takes: absorbed, non-absorbed or one-shot.

The choice rests on the request's own (Sq, Sk) alone, so neighbours in the batch never change it.
Per head, with pairs = Sq·Sk + Sq·(Sq + 1)/2:

    absorbed       pairs · 2(2L + R)  + Sq · 2L(P + V)              rows are read as they are
    non-absorbed   pairs · 2(P+R + V) + (Sk + Sq) · 2L(P + V)       again in every prefill chunk
                   + one merge of [Sq, V] for each context chunk
    one-shot       as non-absorbed without the merges; prefix and new rows must fit the workspace
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from radix_mla.attention.workspace import MLADims

Form = Literal["absorbed", "non_absorbed", "one_shot"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches: FLOP/s of each kernel, bytes/s of memory, seconds a call.

    `one_shot` is attention with a prefix in the same call; FLOPs are counted without padding.
    """

    absorbed: float
    attention: float
    one_shot: float
    gemm: float
    bytes_per_s: float
    call_s: float


# Round figures for AVX2 and fp32 that put the crossing near 180 new tokens, where noisy runs of
# tests/bench/bench_attention.py had it. Not a calibration; only the ratios choose.
CPU_RATES = Rates(
    absorbed=95e9, attention=75e9, one_shot=72e9, gemm=100e9, bytes_per_s=8e9, call_s=30e-6
)


@dataclass(frozen=True, slots=True)
class FormChooser:
    """The cost model. `forced` overrules it for prefill and extend; decode is always absorbed."""

    dims: MLADims
    max_rows: int
    rates: Rates
    forced: Form | None = None

    def choose(self, num_new: int, num_context: int, *, is_decode: bool = False) -> Form:
        """The cheapest form for Sq = num_new, Sk = num_context. O(1).

        A one-shot that does not fit the workspace is the same computation in chunks.
        """
        if is_decode:
            return "absorbed"
        fits = num_new + num_context <= self.max_rows
        if self.forced is not None:
            return self.forced if fits or self.forced != "one_shot" else "non_absorbed"
        costs: dict[Form, float] = {
            "absorbed": self.absorbed_s(num_new, num_context),
            "non_absorbed": self.chunked_s(num_new, num_context),
        }
        if fits and num_context:
            costs["one_shot"] = self.one_shot_s(num_new, num_context)
        return min(costs, key=lambda form: costs[form])

    def absorbed_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, absorbed."""
        d = self.dims
        pairs = _pairs(num_new, num_context)
        attend = pairs * d.num_heads * 2 * (2 * d.latent + d.rope) / self.rates.absorbed
        read = 2 * (num_context + num_new) * d.row * 4 / self.rates.bytes_per_s
        return max(attend, read) + self._decompress_s(num_new) + 2 * self.rates.call_s

    def chunked_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, decompressed, in context chunks."""
        d = self.dims
        flops = _pairs(num_new, num_context) * d.num_heads * 2 * (d.qk + d.value)
        chunks = -(-num_context // self.max_rows)
        merge = chunks * num_new * d.num_heads * d.value * 4 * 5 / self.rates.bytes_per_s
        calls = (2 + 3 * chunks) * self.rates.call_s
        rows = num_new + num_context
        return flops / self.rates.attention + self._decompress_s(rows) + merge + calls

    def one_shot_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, prefix and new rows in one call."""
        d = self.dims
        flops = _pairs(num_new, num_context) * d.num_heads * 2 * (d.qk + d.value)
        rows = num_new + num_context
        return flops / self.rates.one_shot + self._decompress_s(rows) + 2 * self.rates.call_s

    def _decompress_s(self, rows: int) -> float:
        """Or, in the absorbed form, the absorption of `rows` queries and outputs: as many FLOPs."""
        d = self.dims
        return rows * d.num_heads * 2 * d.latent * (d.nope + d.value) / self.rates.gemm


def _pairs(num_new: int, num_context: int) -> float:
    return num_new * num_context + num_new * (num_new + 1) / 2
