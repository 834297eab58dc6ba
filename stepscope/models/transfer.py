"""Between host and device, without waiting: index tensors go up, token ids come down.

From ordinary memory CUDA copies only after everything queued before, with the host waiting for it;
from pinned memory it copies in its turn, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

DTYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


def to_device(
    values: np.ndarray | Sequence[float],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A tensor of these values on the device, of this dtype or that of the values."""
    array = np.ascontiguousarray(values)
    tensor = torch.from_numpy(array)
    if dtype is not None:
        tensor = tensor.to(dtype)
    return moved(tensor, device)


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


ALIGNED = 64  # bytes: Triton's kernels load wider from addresses in 16s, and any dtype fits


def upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Each array on the device, all in one copy: on CUDA a copy takes longer than its bytes."""
    if device.type != "cuda" or len(arrays) == 1:
        return [to_device(array, device) for array in arrays]
    packed, places = pack(arrays)
    return unpack(moved(packed, device), arrays, places)


def pack(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, list[int]]:
    """All their bytes, and where in them each array begins."""
    places = [0, *np.cumsum([-(-array.nbytes // ALIGNED) * ALIGNED for array in arrays]).tolist()]
    packed = np.empty(places[-1], dtype=np.uint8)
    for at, array in zip(places, arrays, strict=False):
        packed[at : at + array.nbytes].view(array.dtype)[:] = array.reshape(-1)
    return torch.from_numpy(packed), places[:-1]


def unpack(
    packed: torch.Tensor, arrays: Sequence[np.ndarray], places: Sequence[int]
) -> list[torch.Tensor]:
    """Views of the packed bytes, of the arrays' dtypes and shapes."""
    return [
        packed[at : at + array.nbytes].view(DTYPES[array.dtype.type]).view(array.shape)
        for at, array in zip(places, arrays, strict=True)
    ]


class Download:
    """A copy to the host that was queued behind the work that makes it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._done.record()

    def wait(self) -> torch.Tensor:
        """The values, once the device has come so far: a synchronisation."""
        self._done.synchronize()
        return self._host


def download(tensor: torch.Tensor) -> torch.Tensor | Download:
    """Queued on CUDA; on a CPU the tensor itself."""
    return Download(tensor) if tensor.device.type == "cuda" else tensor


def on_host(values: torch.Tensor | Download) -> torch.Tensor:
    return values.wait() if isinstance(values, Download) else values
