"""What goes between the host and the device that a model is on, and does not hold the host up.

All copies of the steering operation go through here, so that they can be counted. Of pinned memory
torch knows which copies are under way, and gives none of it out again before they are made.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNED = 8
"""Bytes on whose multiples each array of `send_all` begins."""


def send(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Return an array as a tensor on the device of `like`: one copy to a GPU, none on the CPU."""
    if not like.is_cuda:
        return torch.from_numpy(array)
    return _pin(array).to(like.device, non_blocking=True)


def send_all(arrays: Sequence[npt.NDArray[Any]], like: Tensor) -> list[Tensor]:
    """Return arrays as tensors on the device of `like`, by one copy of them all."""
    starts = np.cumsum([0, *(-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays)]).tolist()
    joined = np.empty(starts[-1], np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        joined[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = send(joined, like)
    return [
        sent[start : start + array.nbytes].view(_dtype_of(array)).reshape(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def write(buffer: Tensor, array: npt.NDArray[Any]) -> None:
    """Write an array over the first rows of a buffer of its dtype."""
    source = _pin(array) if buffer.is_cuda else torch.from_numpy(array)
    buffer[: len(array)].copy_(source, non_blocking=True)


def fetch(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as an array, once the device has computed it: the host waits."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


class Arriving:
    """A tensor's copy to the host, which is under way: nobody waits for it before `read`.

    Where the device's later work has been waited for, it has arrived.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> npt.NDArray[Any]:
        """Wait for the copy and return it as an array."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array


def _pin(array: npt.NDArray[Any]) -> Tensor:
    pinned = torch.empty(array.shape, dtype=_dtype_of(array), pin_memory=True)
    pinned.numpy()[...] = array
    return pinned


def _dtype_of(array: npt.NDArray[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype
