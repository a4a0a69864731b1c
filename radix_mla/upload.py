"""Host arrays to the device, and answers back, without waiting for more than there is to wait for.

A copy from pageable memory blocks the host until it has been staged; one from pinned memory is
queued like a kernel. torch's pinned allocator keeps a block until the copies queued from it are
done, so these buffers may be dropped at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

_ALIGN = 4  # elements: each packed array starts at a multiple of 16 bytes


def to_device(array: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """A tensor of `array` on `device`; shares its memory on CPU, is queued on a GPU."""
    tensor = torch.from_numpy(array)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def pack_int32(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[torch.Tensor]:
    """int32 tensors of 1-D integer arrays, all moved by one copy."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-len(array) // _ALIGN) * _ALIGN
    packed = np.zeros(end, dtype=np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + len(array)] = array
    tensor = to_device(packed, device)
    return [tensor[start : start + len(a)] for start, a in zip(starts, arrays, strict=True)]


class Readback:
    """A copy of a tensor as it is at this point of the stream; work queued later is not waited for.

    Without a GPU it is the tensor itself.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> torch.Tensor:
        """The copy, on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
