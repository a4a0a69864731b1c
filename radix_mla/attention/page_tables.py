"""`DevicePageTables`: the page tables of running sequences, resident on the device.

    step n      row 3  | 7 | 8 | 40 |
    step n + 1  row 3  | 7 | 8 | 40 | 41 |        one entry is sent: the table grew
    step n + 2  row 3  | 7 | 9 | 40 | 41 |        three are sent: a commit found page 9 in the tree

A row is found again by what it holds. The last page of a running sequence takes its next row, so
it belongs to that sequence alone and names it; what is sent is decided by comparing whole tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from radix_mla.upload import to_device


class DevicePageTables:
    """`tensor` int32 [max_num_seqs + 1, max_pages]; entries behind a table's end are stale.

    The last row is for padding: every entry is `set_padding`'s page. The tensor never moves: CUDA
    graphs may read it. The host keeps a copy of every row.
    """

    def __init__(self, max_num_seqs: int, max_pages: int, device: torch.device | str) -> None:
        self.tensor = torch.zeros(max_num_seqs + 1, max_pages, dtype=torch.int32, device=device)
        self._held = [b""] * max_num_seqs  # int32 pages of each row, as bytes: compared by memcmp
        self._owner: dict[bytes, int] = {}  # last page -> row
        self._used = np.zeros(max_num_seqs, dtype=np.int64)  # the update that named a row last
        self._rows: list[int] = []  # of the last update, by place in the batch
        self._clock = 0
        self.num_sent = 0  # entries copied to the device so far

    @property
    def max_num_seqs(self) -> int:
        return len(self._held)

    @property
    def max_pages(self) -> int:
        return self.tensor.shape[1]

    @property
    def padding_row(self) -> int:
        return len(self._held)

    def set_padding(self, page: int) -> None:
        self.tensor[self.padding_row].fill_(page)

    def update(self, tables: Sequence[np.ndarray]) -> np.ndarray:
        """Rows int64 [B] that hold `tables` (int32) once the copies queued here are done.

        Sends changed tails only. The order of the batch is free. O(pages) of memcmp on the host.
        """
        assert len(tables) <= self.max_num_seqs, f"{len(tables)} of {self.max_num_seqs} sequences"
        self._clock += 1
        wanted = [table.tobytes() for table in tables]
        rows = self._match(wanted)
        changes = [
            self._change(row, new)
            for row, new in zip(rows, wanted, strict=True)
            if self._held[row] != new
        ]
        self._rows = rows
        if any(len(pages) for *_, pages in changes):
            self._send(changes)
        return np.array(rows, dtype=np.int64)

    def _match(self, wanted: list[bytes]) -> list[int]:
        """A row for each table: one that holds its beginning or its end, else the one unused
        longest. A wrong guess costs copies, never correctness.
        """
        rows = [-1] * len(wanted)
        for i, new in enumerate(wanted):
            row = self._rows[i] if i < len(self._rows) else -1  # most batches keep their order
            if not (self._is_free(row) and self._held[row] and new.startswith(self._held[row])):
                row = next(filter(self._is_free, self._candidates(new)), -1)
            if row >= 0:
                rows[i] = row
                self._used[row] = self._clock
        if -1 in rows:
            free = iter(np.argsort(self._used, kind="stable").tolist())
            for i, row in enumerate(rows):
                if row < 0:
                    rows[i] = next(free)
                    self._used[rows[i]] = self._clock
        return rows

    def _is_free(self, row: int) -> bool:
        return row >= 0 and self._used[row] != self._clock

    def _candidates(self, new: bytes) -> Iterator[int]:
        """Rows whose last page is one of the last two of `new`; -1: none."""
        for end in range(len(new), max(0, len(new) - 8), -4):
            yield self._owner.get(new[end - 4 : end], -1)

    def _change(self, row: int, new: bytes) -> tuple[int, int, np.ndarray]:
        """Makes the host's row `new`; returns (row, first changed column, pages from there on)."""
        held = self._held[row]
        pages = np.frombuffer(new, dtype=np.int32)
        first = len(held) // 4
        if not new.startswith(held):
            common = min(len(held), len(new)) // 4
            old = np.frombuffer(held, dtype=np.int32, count=common)
            differs = old != pages[:common]
            first = int(differs.argmax()) if differs.any() else common
        if held and self._owner.get(held[-4:]) == row:
            del self._owner[held[-4:]]
        self._owner[new[-4:]] = row
        self._held[row] = new
        return row, first, pages[first:]

    def _send(self, changes: list[tuple[int, int, np.ndarray]]) -> None:
        """One copy of (flat place, page) pairs, scattered on the device."""
        width = self.max_pages
        for row, first, pages in changes:
            assert first + len(pages) <= width, f"row {row}: {first + len(pages)} of {width} pages"
        places = [np.arange(r * width + f, r * width + f + len(p)) for r, f, p in changes]
        pairs = np.stack((np.concatenate(places), np.concatenate([p for *_, p in changes])))
        sent = to_device(pairs.astype(np.int64), self.tensor.device)
        self.tensor.view(-1).index_copy_(0, sent[0], sent[1].to(torch.int32))
        self.num_sent += pairs.shape[1]
