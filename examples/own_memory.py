"""A MemoryManager of one's own: keys and values apart, and a small index key beside them, as sparse attention
has it.

It shows what an engine writes when none of kvtier's managers has its buffers: what the sizes depend on, then
`super().__init__`, then the hooks. Everything else (slots, resize, profiling, `kv_buffers()` for a worker,
the hold slot) is `MemoryManager`'s. `tests/memory/test_own_memory.py` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvtier.memory import MemoryManager


class IndexedMemoryManager(MemoryManager):
    """K and V: [layer_num, size + 1, head_num, head_dim]; index keys: [layer_num, size + 1, index_dim]."""

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    index_buffer: torch.Tensor

    def __init__(
        self,
        size: int | None,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device = "cpu",
        *,
        index_dim: int,
        **options: Any,
    ) -> None:
        self.index_dim = index_dim  # before the base class, which asks for sizes
        super().__init__(size, dtype, head_num, head_dim, layer_num, device, **options)

    def get_cell_size(self) -> int:
        return super().get_cell_size() + self.layer_num * self.index_dim * self.dtype.itemsize

    def _init_buffers(self, size: int) -> None:
        heads = (self.layer_num, size + 1, self.head_num, self.head_dim)
        self.k_buffer = self._zeros(heads, self.dtype)
        self.v_buffer = self._zeros(heads, self.dtype)
        self.index_buffer = self._zeros((self.layer_num, size + 1, self.index_dim), self.dtype)

    def _free_buffers(self) -> None:
        del self.k_buffer, self.v_buffer, self.index_buffer

    def _planes(self) -> Sequence[tuple[str, torch.Tensor]]:
        parts = (("k", self.k_buffer), ("v", self.v_buffer), ("index", self.index_buffer))
        return [
            (f"{layer}.{name}", buffer[layer]) for layer in range(self.layer_num) for name, buffer in parts
        ]

    def _format(self) -> str:
        return f"k+v[{self.head_num},{self.head_dim}]+index[{self.index_dim}] {self.dtype}"

    def get_att_input_params(self, layer_index: int) -> tuple[torch.Tensor, ...]:
        return self.k_buffer[layer_index], self.v_buffer[layer_index], self.index_buffer[layer_index]
