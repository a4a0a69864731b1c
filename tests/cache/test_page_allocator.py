"""PageAllocator: a stack of free pages that notices misuse."""

from __future__ import annotations

import numpy as np
import pytest

from radix_mla.cache.page_allocator import PageAllocator
from radix_mla.errors import AuditError, NoSpace


def _pages(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)


def test_all_pages_are_handed_out_once() -> None:
    allocator = PageAllocator(10)
    taken = np.concatenate([allocator.allocate(3), allocator.allocate(0), allocator.allocate(7)])
    assert sorted(taken) == list(range(10))
    assert allocator.num_free == 0
    allocator.free(taken)
    assert allocator.num_free == 10
    allocator.audit()


def test_too_many_pages_take_nothing() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    with pytest.raises(NoSpace) as caught:
        allocator.allocate(2)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert allocator.num_free == 1


@pytest.mark.parametrize("pages", [(5,), (0, 5), (0, 1, 0), (-1,), (8,)], ids=str)
def test_wrong_frees_are_found_and_change_nothing(pages: tuple[int, ...]) -> None:
    allocator = PageAllocator(8)
    allocator.allocate(4)  # pages 0 to 3
    with pytest.raises(AuditError):
        allocator.free(_pages(*pages))
    assert allocator.num_free == 4
    allocator.audit()
    allocator.free(_pages(0, 1, 2, 3))
    allocator.audit()


def test_a_corrupt_free_mark_is_found() -> None:
    allocator = PageAllocator(8)
    taken = allocator.allocate(2)
    allocator._is_free[taken[0]] = True
    with pytest.raises(AuditError, match="differ"):
        allocator.audit()
