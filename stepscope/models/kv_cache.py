"""Where K and V live: one tensor per layer, a row per token, rows addressed by slot.

slot = page x page_size + offset, so the pages of a request may lie anywhere. A row is K of all
kv heads, then V of all kv heads.
"""

from __future__ import annotations

import torch

from stepscope.spec import ModelSpec


class KvCache:
    """layers x (pages x page_size, 2 x kv_heads x head_dim), and one scratch for what is read."""

    def __init__(
        self, spec: ModelSpec, pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.row = 2 * spec.kv_heads * spec.head_dim
        self.page_size = page_size
        self.layers = [
            torch.zeros(pages * page_size, self.row, dtype=dtype, device=device)
            for _ in range(spec.layers)
        ]
        self._scratch = torch.empty(0, self.row, dtype=dtype, device=device)

    def write(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store the K and V rows (T, row) of this step's tokens."""
        self.layers[layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Scattered rows assembled, (len(slots), row), in a scratch that every layer reuses."""
        count = slots.shape[0]
        if self._scratch.shape[0] < count:
            self._scratch = self._scratch.new_empty(count * 5 // 4, self.row)
        out = self._scratch[:count]
        torch.index_select(self.layers[layer], 0, slots, out=out)
        return out

    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN: whoever reads a freed page then shows it (tests)."""
        for layer in self.layers:
            for page in pages:
                layer[page * self.page_size : (page + 1) * self.page_size] = float("nan")
