"""Many small arrays in one copy."""

from __future__ import annotations

import numpy as np
import torch

from stepscope.models.transfer import ALIGNED, pack, unpack, upload

ARRAYS = [
    np.array([3, -1, 1 << 40]),
    np.empty(0, dtype=np.int64),
    np.arange(15, dtype=np.int32).reshape(3, 5),
    np.array([0.5], dtype=np.float32),
    np.empty(0, dtype=np.int64),
]


def test_what_was_packed_comes_out() -> None:
    packed, places = pack(ARRAYS)
    found = unpack(packed, ARRAYS, places)
    for tensor, array in zip(found, ARRAYS, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype and tensor.is_contiguous()
        assert tensor.storage_offset() * tensor.element_size() % ALIGNED == 0


def test_writing_into_one_leaves_the_others() -> None:
    packed, places = pack(ARRAYS)
    found = unpack(packed, ARRAYS, places)
    found[0].fill_(-1)
    found[2].fill_(-1)
    assert found[3].tolist() == [0.5]


def test_on_the_host_nothing_is_packed() -> None:
    for tensor, array in zip(upload(ARRAYS, torch.device("cpu")), ARRAYS, strict=True):
        assert np.shares_memory(tensor.numpy(), array) or not array.size
