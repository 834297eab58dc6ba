"""A GPU that computes nothing: torch's fake tensors, which check shapes, dtypes and devices.

Every operation with tensors of two devices fails, as it would on a real one. This torch may be
built without CUDA, so what asks for a device guard is spelled out in operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from stepscope.models import attention, dummy, tensors, transfer
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model

aten = torch.ops.aten
getitem, setitem = torch.Tensor.__getitem__, torch.Tensor.__setitem__
copy = torch.Tensor.copy_


@contextmanager
def fake_gpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors made in it are fake; `cuda` is a device like any other."""
    patch.setattr(torch.Tensor, "__getitem__", _getitem)
    patch.setattr(torch.Tensor, "__setitem__", _setitem)
    patch.setattr(torch.Tensor, "copy_", _copy)
    for module in (transfer, attention):
        patch.setattr(module, "moved", _moved)
    patch.setattr(tensors, "_device_memory", lambda device: None)
    patch.setattr(dummy, "_normal", lambda seed, device: torch.zeros(4 << 20, device=device))
    processors = SimpleNamespace(multi_processor_count=132)
    patch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def on_gpu(name: str, dtype: str = "bf16", **overrides: int) -> Decoder:
    model = load_model(f"dummy:{name}", dtype, overrides=overrides, device="cuda")
    return Decoder(model.spec, model.weights)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device=device)


def _copy(tensor: Any, source: Any) -> Any:
    return (aten.copy_ if isinstance(tensor, FakeTensor) else copy)(tensor, source)


def _view(tensor: Any, index: Any) -> Any:
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, torch.Tensor) for i in index):
        return aten.index(tensor, list(index))
    given = sum(i is not None and i is not Ellipsis for i in index)
    at = 0
    for i in index:
        if i is Ellipsis:
            at += tensor.dim() - given
        elif isinstance(i, int):
            tensor = aten.select(tensor, at, i)
        else:
            tensor = _part(tensor, at, i)
            at += 1
    return tensor


def _part(tensor: Any, at: int, i: slice | None) -> Any:
    if i is None:
        return aten.unsqueeze(tensor, at)
    if i == slice(None):
        return tensor
    return aten.slice(tensor, at, i.start, i.stop, i.step or 1)


def _getitem(tensor: Any, index: Any) -> Any:
    return _view(tensor, index) if isinstance(tensor, FakeTensor) else getitem(tensor, index)


def _setitem(tensor: Any, index: Any, value: Any) -> None:
    if not isinstance(tensor, FakeTensor):
        setitem(tensor, index, value)
        return
    listed = index if isinstance(index, tuple) else (index,)
    if any(isinstance(i, torch.Tensor) for i in listed):
        aten.index_put_(tensor, list(listed), value)
    elif isinstance(value, torch.Tensor):
        aten.copy_(_view(tensor, index), value)
    else:
        aten.fill_(_view(tensor, index), value)
