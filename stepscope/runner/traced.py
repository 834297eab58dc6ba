"""The decoder's forward as a graph that torch's compiler takes, with attention left out of it.

Attention is one opaque operator per layer, which calls whatever backend the runner has. So the
compiler sees no cache, no context length and no mask; the gather keeps its laps; and every backend,
window, cap and KV format is as it is elsewhere. What is traced is the decoder's own code.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.engine.plan import Lap
from stepscope.models.backends import Attention
from stepscope.models.decoder import Decoder
from stepscope.spec import ModelSpec

MOST_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Step:
    """What the operator needs to know of the step that is under way."""

    attention: Attention
    local: list[bool]  # of each layer
    batch: Any
    lap: Lap


class _Current(threading.local):
    """Of this thread: the program calls the operator in the thread that called it."""

    step: Step | None = None


_current = _Current()


@contextmanager
def under_way(step: Step) -> Iterator[None]:
    _current.step = step
    try:
        yield
    finally:
        _current.step = None


# Not torch.library.custom_op: its wrapper costs as much as the attention of one short request.
_library = torch.library.Library("stepscope", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("attend(Tensor qkv, int layer, int width) -> Tensor")  # type: ignore[no-untyped-call]


def _attend(qkv: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """(T, width) for the rotated qkv of a layer."""
    step = _current.step
    assert step is not None, "attention outside a step"
    return step.attention(layer, step.local[layer], qkv, step.batch, step.lap)


def _shape(qkv: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], width)


_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("stepscope::attend", _shape, lib=_library)


class _EveryRow:
    sampled_rows: torch.Tensor | None = None


class _Outside:
    """In place of an attention backend while the decoder is traced."""

    def __init__(self, spec: ModelSpec) -> None:
        self._width = spec.heads * spec.head_dim

    def __call__(
        self, layer: int, local: bool, qkv: torch.Tensor, batch: Any, lap: Lap
    ) -> torch.Tensor:
        y: torch.Tensor = torch.ops.stepscope.attend(qkv, layer, self._width)
        return y


class Forward(torch.nn.Module):
    """(embedded tokens (T, hidden), positions (T,)) -> logits (T, vocab).

    The weights are buffers, so that the compiler may treat them as constants.
    """

    def __init__(self, spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._spec = spec
        self._names = {name: name.replace(".", "_") for name in weights}
        for name, weight in weights.items():
            self.register_buffer(self._names[name], weight)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        weights = {name: getattr(self, buffer) for name, buffer in self._names.items()}
        decoder = Decoder(self._spec, weights)
        attention: Any = _Outside(self._spec)
        return decoder.from_embeddings(x, positions, _EveryRow(), attention, lambda phase: None)


@torch.no_grad()
def trace(
    spec: ModelSpec, weights: dict[str, torch.Tensor], rows: int
) -> torch.export.ExportedProgram:
    """For any number of rows; `rows` is what the compiler tunes for, at least 2."""
    x = weights["embed"].new_zeros(rows, spec.hidden)
    dimension = torch.export.Dim("rows", min=1, max=MOST_ROWS)
    return torch.export.export(
        Forward(spec, weights).eval(),
        (x, torch.zeros(rows, dtype=torch.int64, device=x.device)),
        dynamic_shapes=({0: dimension}, {0: dimension}),
        strict=False,
    )
