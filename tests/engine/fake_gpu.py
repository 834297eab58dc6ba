"""A GPU that computes nothing: torch's fake tensors, which check shapes, dtypes and devices.

Every operation with tensors of two devices fails, as it would on a real one. This torch may be
built without CUDA, so what asks for a device guard is spelled out in operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.models import attention, dummy, packed, quantize, tensors, transfer
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model

aten = torch.ops.aten
# What answers on the host, or in a shape that the host has to ask for.
ASKING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten._unique2.default,
    aten.repeat_interleave.Tensor,
}
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
    if find_spec("triton") is not None:
        from stepscope.models import paged_kernel

        patch.setattr(paged_kernel, "attend", paged_kernel.paged_attention)
    patch.setattr(packed, "_row_codes", lambda device: quantize.rows_to_fp8)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


class NoWaiting(TorchDispatchMode):
    """Fails where a real GPU would be waited for; `moves` counts the copies that nobody waits for.

    Those go through `moved` and `download` alone, which `fake_gpu` replaces; any other operation
    with tensors of host and device is a copy from or to ordinary memory.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        if func in ASKING and any(a.device.type == "cuda" for a in given):
            raise AssertionError(f"{func} waits for the device")
        masks = any(a.dtype in (torch.bool, torch.uint8) for a in given[1:])
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_) and masks:
            raise AssertionError(f"{func} by a mask asks the device how many there are")
        out = func(*args, **(kwargs or {}))
        made = [a for a in pytree.tree_leaves(out) if isinstance(a, torch.Tensor)]
        copies = func.overloadpacket in (aten._to_copy, aten.copy_, aten.lift_fresh_copy)
        # A number of the host may be an operand, it travels with the launch; but not be copied.
        counted = [a for a in (*given, *made) if copies or a.dim()]
        if len({a.device.type for a in counted}) > 1:
            raise AssertionError(f"{func} copies between host and device and waits")
        return out


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
