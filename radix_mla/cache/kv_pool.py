"""`KVPool`: the one owner of KV memory, a buffer `[num_slots, L + R]` for each layer.

Slots of a page are consecutive: slot = page · page_size + row. After the last page comes one dummy
page, outside the prefix cache's ids, for padded batches. Rows are uninitialised until written: no
reader may look past a sequence's valid length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kernels.kv_gather import kv_gather
from kernels.latent_write import latent_write
from kernels.page_copy import page_copy, pool_table

if TYPE_CHECKING:
    from radix_mla.cache.kv_layout import KVLayout
    from radix_mla.cache.prefix_cache import PageCopy


class KVPool:
    """Device memory of all layers' rows; on CPU a page is touched when it is first written."""

    def __init__(
        self,
        layout: KVLayout,
        num_layers: int,
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size
        self.dummy_page = num_pages
        shape = ((num_pages + 1) * page_size, layout.width)
        self._layers = [
            torch.empty(shape, dtype=layout.dtype, device=device) for _ in range(num_layers)
        ]
        self._table = pool_table(self._layers)

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_bytes(self) -> int:
        """All layers, the dummy page included."""
        return sum(buffer.nbytes for buffer in self._layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return self.layout.row_bytes * self.num_layers

    def layer(self, index: int) -> torch.Tensor:
        """The buffer [num_slots + page_size, L + R] of a layer, in the layout's dtype."""
        return self._layers[index]

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Stores rows [N, L + R] (any float dtype, rounded here) at slots int64 [N]."""
        latent_write(self._layers[layer], slots, rows)

    def write_run(self, layer: int, first: int, rows: torch.Tensor) -> None:
        """`write` to the slots [first, first + N)."""
        self._layers[layer][first : first + rows.shape[0]] = rows

    def gather(self, layer: int, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Reads the rows at slots int64 [N] into out [N, L + R], in out's dtype; returns out."""
        return kv_gather(self._layers[layer], slots, out)

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Runs the page copies in their order, in all layers; only their `num_rows` rows move."""
        for batch in _independent(copies):
            src = self._first_slots([(c.src_page, c.num_rows) for c in batch])
            dst = self._first_slots([(c.dst_page, c.num_rows) for c in batch])
            page_copy(self._layers, src, dst, table=self._table)

    def _first_slots(self, pages: list[tuple[int, int]]) -> torch.Tensor:
        """int64, on the device: slots of the first rows of pages [(page, num_rows)]."""
        size = self.page_size
        slots = [np.arange(page * size, page * size + rows) for page, rows in pages]
        return torch.from_numpy(np.concatenate(slots)).to(self._layers[0].device)


def _independent(copies: Sequence[PageCopy]) -> Iterator[list[PageCopy]]:
    """Cuts copies into runs in which no page is both read and written, or written twice."""
    batch: list[PageCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if copy.dst_page in read or copy.dst_page in written or copy.src_page in written:
            yield batch
            batch, read, written = [], set(), set()
        batch.append(copy)
        read.add(copy.src_page)
        written.add(copy.dst_page)
    if batch:
        yield batch


def slots_of(page_table: np.ndarray, start: int, stop: int, page_size: int) -> np.ndarray:
    """int64 slots of a sequence's rows [start, stop); page_table int32 covers `stop` rows."""
    first, last = start // page_size, -(-stop // page_size)
    pages = page_table[first:last].astype(np.int64) * page_size
    slots = (pages[:, None] + np.arange(page_size)).reshape(-1)
    return slots[start - first * page_size : stop - first * page_size]
