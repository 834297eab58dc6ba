"""Where K and V live: one tensor per layer, a row per token, rows addressed by slot.

slot = page x page_size + offset, so the pages of a request may lie anywhere. A row is K of all
kv heads, then V of all kv heads. Rows may be stored in fewer bytes than the model computes in; then
`gather` converts them back, and takes that much longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from stepscope.engine.plan import Move
from stepscope.spec import ModelSpec

STORED_AS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def kv_cache(
    spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """The cache that stores what spec.kv_dtype says; dtype is what the model computes in."""
    if spec.kv_dtype == "int8":
        return Int8KvCache(spec, pages, page_size, dtype, device)
    stored = STORED_AS[spec.kv_dtype]
    kind = KvCache if stored == dtype else CastKvCache
    return kind(spec, pages, page_size, dtype, device, stored)


class KvCache:
    """layers x (pages x page_size, 2 x kv_heads x head_dim), and one scratch for what is read."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        self.row = 2 * spec.kv_heads * spec.head_dim
        self.page_size = page_size
        self.computed = dtype
        slots = pages * page_size
        self.layers = [
            torch.zeros(slots, self.row, dtype=stored or dtype, device=device)
            for _ in range(spec.layers)
        ]
        self.scales: list[torch.Tensor] = []  # of stored codes, a layer each
        self._scratch = torch.empty(0, self.row, dtype=dtype, device=device)
        self._host: list[torch.Tensor] = []

    @property
    def row_bytes(self) -> int:
        """Bytes that one token's K and V take in one layer, as stored."""
        return self.row * self.layers[0].element_size()

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the K and V rows (T, row) of this step's tokens."""
        self.layers[layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, places: torch.Tensor, rows_each: int = 1) -> torch.Tensor:
        """Scattered rows assembled, (rows, row), in a scratch that every layer reuses.

        places: slots, or pages if rows_each is the page size.
        """
        self._scratch, out = _room(self._scratch, places.shape[0] * rows_each)
        _select(self.layers[layer], places, rows_each, out)
        return out

    # ------------------------------------------------------------ moving pages

    def move(self, moves: Sequence[Move]) -> None:
        """In order. Neighbours that go the same way between cache and host go together."""
        for kind, same in groupby(moves, key=lambda move: move.kind):
            if kind == "copy":
                for move in same:
                    self._copy_rows(move)
            else:
                together = list(same)
                sources = self._slots([move.source for move in together])
                targets = self._slots([move.target for move in together])
                if kind == "out":
                    self._grow_host((1 + max(move.target for move in together)) * self.page_size)
                    self._to_host(sources, targets)
                else:
                    self._from_host(sources, targets)

    def _copy_rows(self, move: Move) -> None:
        source, target = move.source * self.page_size, move.target * self.page_size
        for rows in self._stores():
            rows[target : target + move.rows] = rows[source : source + move.rows]

    def _grow_host(self, needed: int) -> None:
        """Host memory grows to the highest place that was ever taken."""
        stores = self._stores()
        if not self._host:
            self._host = [torch.empty(0, *rows.shape[1:], dtype=rows.dtype) for rows in stores]
        for index, held in enumerate(self._host):
            if held.shape[0] < needed:
                grown = held.new_empty(max(needed, 2 * held.shape[0]), *held.shape[1:])
                grown[: held.shape[0]] = held
                self._host[index] = grown

    def _to_host(self, slots: torch.Tensor, places: torch.Tensor) -> None:
        for rows, held in zip(self._stores(), self._host, strict=True):
            held[places] = rows[slots.to(rows.device)].cpu()

    def _from_host(self, places: torch.Tensor, slots: torch.Tensor) -> None:
        for rows, held in zip(self._stores(), self._host, strict=True):
            rows[slots.to(rows.device)] = held[places].to(rows.device)

    def _slots(self, pages: list[int]) -> torch.Tensor:
        begins = torch.tensor(pages)[:, None] * self.page_size
        return (begins + torch.arange(self.page_size)).reshape(-1)

    def _stores(self) -> list[torch.Tensor]:
        """Every tensor that has a row per slot."""
        return self.layers

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN: whoever reads a freed page then shows it (tests)."""
        for rows in self._stores():
            if rows.is_floating_point():
                for page in pages:
                    rows[page * self.page_size : (page + 1) * self.page_size] = float("nan")


class CastKvCache(KvCache):
    """Stored in another float type than the model computes in."""

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype,
    ) -> None:
        super().__init__(spec, pages, page_size, dtype, device, stored)
        self._read = self._scratch.to(stored)
        self._stored = stored

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        super().write(layer, slots, rows.to(self._stored))

    def gather(self, layer: int, places: torch.Tensor, rows_each: int = 1) -> torch.Tensor:
        count = places.shape[0] * rows_each
        self._scratch, out = _room(self._scratch, count)
        self._read, read = _room(self._read, count)
        _select(self.layers[layer], places, rows_each, read)
        return out.copy_(read)


class Int8KvCache(KvCache):
    """Storage only: each head's K and each head's V of a token is 8-bit codes times one scale.

    scale = largest magnitude / 127, in fp32 (symmetric absmax quantization, as in LLM.int8(),
    Dettmers et al., 2022, applied to rows). The model computes with what `gather` makes of them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, pages, page_size, dtype, device, torch.int8)
        heads, slots = 2 * spec.kv_heads, pages * page_size
        self._heads = (heads, spec.head_dim)
        self.scales = [torch.zeros(slots, heads, device=device) for _ in range(spec.layers)]
        self._codes = torch.empty(0, self.row, dtype=torch.int8, device=device)
        self._scale = torch.empty(0, heads, device=device)

    @property
    def row_bytes(self) -> int:
        return super().row_bytes + self.scales[0].shape[1] * self.scales[0].element_size()

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        values = rows.float().view(-1, *self._heads)
        # A row of zeros has codes of zero at any scale but 0.
        scale = values.abs().amax(-1).div_(127).clamp_(min=1e-30)
        codes = (values / scale.unsqueeze(-1)).round_().to(torch.int8)
        self.layers[layer].index_copy_(0, slots, codes.flatten(1))
        self.scales[layer].index_copy_(0, slots, scale)

    def gather(self, layer: int, places: torch.Tensor, rows_each: int = 1) -> torch.Tensor:
        count = places.shape[0] * rows_each
        self._scratch, out = _room(self._scratch, count)
        self._codes, codes = _room(self._codes, count)
        self._scale, scale = _room(self._scale, count)
        _select(self.layers[layer], places, rows_each, codes)
        _select(self.scales[layer], places, rows_each, scale)
        # One type at a time: a product of mixed types took 30 times as long in bf16.
        out.copy_(codes).view(count, *self._heads).mul_(scale.to(out.dtype).unsqueeze(-1))
        return out

    def _stores(self) -> list[torch.Tensor]:
        return [*self.layers, *self.scales]


def _select(rows: torch.Tensor, places: torch.Tensor, rows_each: int, out: torch.Tensor) -> None:
    """Longer pieces are copied several times faster than as many bytes row by row."""
    piece = rows_each * rows.shape[1]
    torch.index_select(rows.view(-1, piece), 0, places, out=out.view(-1, piece))


def _room(scratch: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scratch, made larger where needed, and its first `count` rows."""
    if scratch.shape[0] < count:
        scratch = scratch.new_empty(count * 5 // 4, *scratch.shape[1:])
    return scratch, scratch[:count]
