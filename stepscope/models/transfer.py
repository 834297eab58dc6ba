"""Between host and device, without waiting: index tensors go up, token ids come down.

From ordinary memory CUDA copies only after everything queued before, with the host waiting for it;
from pinned memory it copies in its turn, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


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
