"""MemoryManager: the KV buffers of one rank, and the allocator of their token slots.

May import torch, `device/` and the ground floor; single-threaded. Always true: slot `size` of every layer
is the hold slot (`HOLD_TOKEN_MEMINDEX`); it exists in the buffer, no request ever owns it, and it follows a
resize. For multi-head and grouped-query attention: one row holds all K heads, then all V heads.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch

from kvtier.device.base import KVBuffers
from kvtier.errors import UsageError
from kvtier.layout import KVLayout, Plane, default_page_tokens
from kvtier.memory.allocator import Int32, KvCacheAllocator
from kvtier.memory.owner import ThreadOwner


class MemoryManager:
    """KV buffers for `size` tokens: `kv_buffer` is [layer_num, size + 1, 2 * head_num, head_dim].

    `head_num` counts KV heads of this rank. The buffers start as zeros. `owner` names the one thread that may
    call; hand it to everything else that manages this memory. Subclasses with other buffers override
    `_init_buffers` and `_free_buffers`.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device = "cpu",
    ) -> None:
        if head_num < 1 or head_dim < 1 or layer_num < 1:
            raise UsageError(
                f"head_num={head_num}, head_dim={head_dim}, layer_num={layer_num}: expected 1 or more"
            )
        self.owner = ThreadOwner()
        self.allocator = KvCacheAllocator(size, self.owner)
        self.dtype = dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.layer_num = layer_num
        self.device = torch.device(device)
        self.kv_buffer: torch.Tensor
        self._init_buffers(size)

    @property
    def size(self) -> int:
        """Tokens that fit."""
        return self.allocator.size

    @property
    def HOLD_TOKEN_MEMINDEX(self) -> int:
        """The slot that means nowhere: what padding reads and writes. Equal to `size`."""
        return self.allocator.size

    def _init_buffers(self, size: int) -> None:
        shape = (self.layer_num, size + 1, 2 * self.head_num, self.head_dim)
        self.kv_buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.device.type == "cpu":
            _advise_huge_pages(self.kv_buffer)
        # Zeros, not what was there: padding reads the hold slot, and 0 * NaN is NaN.
        self.kv_buffer.zero_()

    def _free_buffers(self) -> None:
        del self.kv_buffer

    def get_cell_size(self) -> int:
        """KV bytes of one token, all layers of this rank."""
        return self.layer_num * 2 * self.head_num * self.head_dim * self.dtype.itemsize

    def get_att_input_params(self, layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer: views [size + 1, head_num, head_dim]."""
        layer = self.kv_buffer[layer_index]
        return layer[:, : self.head_num], layer[:, self.head_num :]

    def alloc(self, need_size: int) -> Int32:
        """As `KvCacheAllocator.alloc`."""
        return self.allocator.alloc(need_size)

    def free(self, free_index: Any) -> None:
        """As `KvCacheAllocator.free`."""
        self.allocator.free(free_index)

    def free_all(self) -> None:
        """As `KvCacheAllocator.free_all`."""
        self.allocator.free_all()

    def resize_mem(self, new_size: int) -> None:
        """New, empty buffers for `new_size` tokens. UsageError while slots are in use or claimed.

        Views and `kv_buffers()` of the old buffers are stale after it.
        """
        self.allocator.resize(new_size)
        self._free_buffers()
        self._init_buffers(new_size)

    def kv_buffers(self, page_tokens: int | None = None, *, engine: str = "") -> KVBuffers:
        """These buffers as a `Worker` takes them: one plane per layer, one row per token, in one shard.

        `page_tokens`: tokens of a host page; None for the default size. `engine` goes into the layout's
        format, for all that changes what the bytes mean and that is not seen here (backend, RoPE form).
        Model and revision belong in the `Namespace`. The planes share the buffers' memory, with the
        hold slot.
        """
        row_bytes = 2 * self.head_num * self.head_dim * self.dtype.itemsize
        if page_tokens is None:
            page_tokens = default_page_tokens(self.get_cell_size())
        layout = KVLayout(
            page_tokens=page_tokens,
            shards=(tuple(Plane(f"{layer}.kv", row_bytes) for layer in range(self.layer_num)),),
            format=f"kvtier.memory/1 kv[2x{self.head_num},{self.head_dim}] {self.dtype} {engine}".rstrip(),
        )
        rows = self.kv_buffer.view(torch.uint8).view(self.layer_num, self.size + 1, row_bytes)
        return KVBuffers(layout=layout, planes=tuple(rows.unbind(0)))


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a tensor that nobody has touched yet: copies of scattered slots gain 5 to 10%.

    A wish: where the kernel knows none, or this is no Linux, nothing happens.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))
