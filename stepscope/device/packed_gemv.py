"""Matrix-vector products straight from int8 and int4 codes, at the model's own shapes.

fp8 has none here: it is not for CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from stepscope.device.ceilings import Call, Plan, Rate, best_rate, gemv_shapes, interleaved_ns
from stepscope.spec import FP8, INT4_GROUPS, ModelSpec, matrix_bytes

if TYPE_CHECKING:
    import torch

Weight = tuple["torch.Tensor", "torch.Tensor"]  # codes; scales, in int4 with zeros


def packed_gemv_rates(spec: ModelSpec, plan: Plan) -> dict[str, Rate]:
    """Bytes of codes and int4 scales per second for one token, as `ceilings.gemv_rates`.

    Shapes that are not multiplied in the model's own format (models/quantize.py) are left out: the
    head of an int4 model, and widths that torch's products do not take.
    """
    import torch

    if spec.dtype == FP8:
        return {}
    group = INT4_GROUPS.get(spec.dtype)
    shapes = [shape for shape in gemv_shapes(spec) if _fits(*shape, group)]
    most = max((rows * cols for _, rows, cols in shapes), default=0)
    room = max(most, min(plan.most_gemv_bytes, spec.weight_bytes) * (2 if group else 1))
    codes = torch.zeros(room // 2 if group else room, dtype=torch.uint8)
    scales = torch.ones(2 * room // group if group else spec.vocab, dtype=torch.bfloat16)
    calls: dict[str, Call] = {}
    for name, rows, cols in shapes:
        weights = cycle(_weights(codes, scales, rows, cols, group))
        x = torch.ones(1, cols, dtype=torch.bfloat16)
        calls[name] = partial(_int4, x, weights, group) if group else partial(_int8, x, weights)
    found = interleaved_ns(calls, plan)
    return {
        name: best_rate(matrix_bytes(rows * cols, spec.dtype), {"packed": found[name]})
        for name, rows, cols in shapes
    }


def _fits(name: str, rows: int, cols: int, group: int | None) -> bool:
    if group is None:
        return cols % 16 == 0
    return name not in ("head", "router") and rows % 16 == 0 and cols % group == 0


def _weights(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, cols: int, group: int | None
) -> list[Weight]:
    """As many as fit, side by side, so that each call streams another one."""
    count = rows * cols
    if group is None:
        import torch

        starts = range(0, len(codes) - count + 1, count)
        cut = [codes[at : at + count].view(torch.int8).view(rows, cols) for at in starts]
        return [(one, scales[:rows].clone()) for one in cut]
    half, pairs = count // 2, 2 * count // group
    return [
        (
            codes[i * half : (i + 1) * half].view(rows, cols // 2),
            scales[i * pairs : (i + 1) * pairs].view(cols // group, rows, 2),
        )
        for i in range(len(codes) // half)
    ]


def _int8(x: torch.Tensor, weights: Iterator[Weight]) -> torch.Tensor:
    import torch

    y: torch.Tensor = torch.ops.aten._weight_int8pack_mm(x, *next(weights))
    return y


def _int4(x: torch.Tensor, weights: Iterator[Weight], group: int) -> torch.Tensor:
    import torch

    codes, scales = next(weights)
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, codes, group, scales)
    return y
