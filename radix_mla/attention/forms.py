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
    from radix_mla.attention.metadata import RaggedBatch
    from radix_mla.attention.workspace import MLADims

Form = Literal["absorbed", "non_absorbed", "one_shot"]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches: FLOP/s of each kernel, bytes/s of memory, seconds a call.

    `one_shot` is attention with a prefix in the same call; FLOPs are counted without padding, but
    for tiles: a sequence's Sq counts in whole tiles of `tile_queries` in multi-head attention, its
    Sq · H in tiles of `tile_rows` in absorbed attention. `value_bytes`: of one KV value.
    `capture_gain_s`: what a layer of a captured step saves over launches from the host; absorbed
    requests of at most `captured_tokens` new ones can have it.
    """

    absorbed: float
    attention: float
    one_shot: float
    gemm: float
    bytes_per_s: float
    call_s: float
    value_bytes: int = 4
    tile_queries: int = 1
    tile_rows: int = 1
    captured_tokens: int = 0
    capture_gain_s: float = 0.0


# Round figures for AVX2 and fp32 that put the crossing near 180 new tokens, where noisy runs of
# tests/bench/bench_attention.py had it. Not a calibration; only the ratios choose.
CPU_RATES = Rates(
    absorbed=95e9, attention=75e9, one_shot=72e9, gemm=100e9, bytes_per_s=8e9, call_s=30e-6
)
# Fitted to graph replays of the fa3,flashmla pair, 16 and 128 heads, 16 to 2,048 new tokens on 0 to
# 32k (tests/bench/gpu/calibrate_forms.py): the form chosen by them takes 1.009 times the best one's
# time on average, 1.19 at worst. They are rates of this formula, not of kernels.
H200_RATES = Rates(
    absorbed=594e12,
    attention=800e12,
    one_shot=704e12,
    gemm=503e12,
    bytes_per_s=4e12,
    call_s=15.3e-6,
    value_bytes=2,
    tile_queries=128,
    tile_rows=64,
    captured_tokens=512,
    capture_gain_s=100e-6,
)


def rates_of(device: str) -> Rates:
    """The table of a device; a GPU without its own gets the H200's: only ratios choose."""
    return H200_RATES if device.startswith("cuda") else CPU_RATES


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

    def all_absorbed(self, batch: RaggedBatch) -> bool:
        """Whether every sequence of the step takes the absorbed form."""
        return all(
            self.choose(num_new, num_context) == "absorbed"
            for num_new, num_context, is_decode in zip(
                batch.num_new.tolist(),
                batch.num_context.tolist(),
                batch.is_decode.tolist(),
                strict=True,
            )
            if not is_decode
        )

    def absorbed_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, absorbed."""
        d = self.dims
        rows = num_new * d.num_heads
        tiles = _round_up(rows, self.rates.tile_rows) / rows
        pairs = _pairs(num_new, num_context) * tiles
        attend = pairs * d.num_heads * 2 * (2 * d.latent + d.rope) / self.rates.absorbed
        size = self.rates.value_bytes
        read = 2 * (num_context + num_new) * d.row * size / self.rates.bytes_per_s
        gain = self.rates.capture_gain_s if num_new <= self.rates.captured_tokens else 0.0
        return max(attend, read) + self._decompress_s(num_new) + 2 * self.rates.call_s - gain

    def chunked_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, decompressed, in context chunks."""
        d = self.dims
        flops = self._mha_flops(num_new, num_context)
        chunks = -(-num_context // self.max_rows)
        moved = num_new * d.num_heads * d.value * self.rates.value_bytes * 5  # of one merge
        merge = chunks * moved / self.rates.bytes_per_s
        calls = (2 + 3 * chunks) * self.rates.call_s
        rows = num_new + num_context
        return flops / self.rates.attention + self._decompress_s(rows) + merge + calls

    def one_shot_s(self, num_new: int, num_context: int) -> float:
        """Estimated seconds of a layer, prefix and new rows in one call."""
        flops = self._mha_flops(num_new, num_context)
        rows = num_new + num_context
        return flops / self.rates.one_shot + self._decompress_s(rows) + 2 * self.rates.call_s

    def _mha_flops(self, num_new: int, num_context: int) -> float:
        d = self.dims
        tiles = _round_up(num_new, self.rates.tile_queries) / num_new
        return _pairs(num_new, num_context) * tiles * d.num_heads * 2 * (d.qk + d.value)

    def _decompress_s(self, rows: int) -> float:
        """Or, in the absorbed form, the absorption of `rows` queries and outputs: as many FLOPs."""
        d = self.dims
        return rows * d.num_heads * 2 * d.latent * (d.nope + d.value) / self.rates.gemm


def _pairs(num_new: int, num_context: int) -> float:
    return num_new * num_context + num_new * (num_new + 1) / 2


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
