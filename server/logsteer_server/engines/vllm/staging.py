"""Asynchronous copies between the host and the model's device.

All copies of the steering operation go through this module, so that tests can count them. torch
reuses pinned memory only after pending copies from it have completed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ALIGNED = 8
"""Alignment in bytes of each array in `send_all`."""


def send(array: npt.NDArray[Any], like: Tensor) -> Tensor:
    """Return an array as a tensor on the device of `like`: one copy to a GPU, none on the CPU."""
    if not like.is_cuda:
        return torch.from_numpy(array)
    return _pin(array).to(like.device, non_blocking=True)


def send_all(arrays: Sequence[npt.NDArray[Any]], like: Tensor) -> list[Tensor]:
    """Return arrays as tensors on the device of `like`, with one copy for all of them."""
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
    """Wait until the device has computed a tensor, and return it as an array."""
    array: npt.NDArray[Any] = tensor.cpu().numpy()
    return array


class Arriving:
    """A pending copy of a tensor to the host; only `read` waits for it."""

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
