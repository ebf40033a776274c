"""MemoryManager: the KV buffers of one rank, and the allocator of their token slots.

May import torch, `device/` and the ground floor; single-threaded. Always true: slot `size` of every layer
is the hold slot (`HOLD_TOKEN_MEMINDEX`); it exists in the buffer, no request ever owns it, and it follows a
resize. For multi-head and grouped-query attention: one row holds all K heads, then all V heads.

Other buffers are subclasses. A subclass sets what its sizes depend on, then calls `super().__init__`, and
overrides these hooks (`buffers.py` has latent and quantised KV, `docs/memory.md` an example of one's own):

    get_cell_size()            KV bytes of one token; called before there are buffers (`profile_size`)
    _init_buffers(size)        make the tensors, `size + 1` rows in each, with zeros in them
    _free_buffers()            let them go
    _planes()                  (name, tensor [size + 1, ...]) of each plane, row after row in memory
    _format()                  what gives a row's bytes their meaning, as text
    get_att_input_params(i)    what the attention of layer `i` reads
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import torch

from kvtier.device.base import KVBuffers
from kvtier.errors import UsageError
from kvtier.layout import KVLayout, Plane, default_page_tokens
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.indices import Int32
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.profile import agree_min, free_bytes


class MemoryManager:
    """KV buffers for `size` tokens: `kv_buffer` is [layer_num, size + 1, 2 * head_num, head_dim].

    `size`: None for as many as `profile_size(mem_fraction)` says. `head_num` counts KV heads of this rank.
    The buffers start as zeros. `owner` names the one thread that may call; hand it to everything else that
    manages this memory. `free_count`: as `KvCacheAllocator` takes it.
    """

    kv_buffer: torch.Tensor

    def __init__(
        self,
        size: int | None,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device = "cpu",
        *,
        mem_fraction: float = 0.9,
        free_count: Any = None,
    ) -> None:
        if head_num < 1 or head_dim < 1 or layer_num < 1:
            raise UsageError(
                f"head_num={head_num}, head_dim={head_dim}, layer_num={layer_num}: expected 1 or more"
            )
        self.owner = ThreadOwner()
        self.dtype = dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.layer_num = layer_num
        self.device = torch.device(device)
        self._buffer_bytes = 0
        if size is None:
            size = self.profile_size(mem_fraction)
        self.allocator = KvCacheAllocator(
            size, self.owner, pinned=self.device.type == "cuda", free_count=free_count
        )
        self._make(size)

    @property
    def size(self) -> int:
        """Tokens that fit."""
        return self.allocator.size

    @property
    def HOLD_TOKEN_MEMINDEX(self) -> int:
        """The slot that means nowhere: what padding reads and writes. Equal to `size`."""
        return self.allocator.size

    # -- hooks ---------------------------------------------------------------------------------------

    def get_cell_size(self) -> int:
        """KV bytes of one token, all layers of this rank."""
        return self.layer_num * 2 * self.head_num * self.head_dim * self.dtype.itemsize

    def _init_buffers(self, size: int) -> None:
        self.kv_buffer = self._zeros((self.layer_num, size + 1, 2 * self.head_num, self.head_dim), self.dtype)

    def _free_buffers(self) -> None:
        del self.kv_buffer

    def _planes(self) -> Sequence[tuple[str, torch.Tensor]]:
        return [(f"{layer}.kv", rows) for layer, rows in enumerate(self.kv_buffer)]

    def _format(self) -> str:
        return f"kv[2x{self.head_num},{self.head_dim}] {self.dtype}"

    def get_att_input_params(self, layer_index: int) -> tuple[torch.Tensor, ...]:
        """K and V of one layer: views [size + 1, head_num, head_dim]."""
        layer = self.kv_buffer[layer_index]
        return layer[:, : self.head_num], layer[:, self.head_num :]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """For hooks: a new tensor on the device, zeros; on the CPU in huge pages where they can be had."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device.type == "cpu":
            _advise_huge_pages(tensor)
        # Zeros, not what was there: padding reads the hold slot, and 0 * NaN is NaN.
        tensor.view(torch.uint8).zero_()
        return tensor

    # -- slots ---------------------------------------------------------------------------------------

    def alloc(self, need_size: int) -> Int32:
        """As `KvCacheAllocator.alloc`."""
        return self.allocator.alloc(need_size)

    def free(self, free_index: Any) -> None:
        """As `KvCacheAllocator.free`."""
        self.allocator.free(free_index)

    def free_all(self) -> None:
        """As `KvCacheAllocator.free_all`."""
        self.allocator.free_all()

    # -- size ----------------------------------------------------------------------------------------

    def profile_size(
        self, mem_fraction: float, *, available_bytes: int | None = None, group: Any = None
    ) -> int:
        """Tokens whose KV fits `mem_fraction` of the memory that is free, the same on every rank.

        Free is what the device has left, and what these buffers take now (`resize_mem` gives that back
        first). `available_bytes`: instead of measuring. Where torch.distributed is initialised every rank
        must call, and the smallest answer counts: one all-reduce, on `group` (gloo) or one of its own.
        UsageError where not one token fits; ProfileError where a rank could not measure, on all of them.
        """
        self.owner.check("profile_size")
        if not 0 < mem_fraction <= 1:
            raise UsageError(f"mem_fraction={mem_fraction}: expected more than 0, at most 1")
        tokens, cell = -1, self.get_cell_size()
        try:
            free = free_bytes(self.device) if available_bytes is None else available_bytes
            # One row more than tokens: the hold slot.
            tokens = max(0, int((free + self._buffer_bytes) * mem_fraction) // cell - 1)
        finally:  # also where that failed, so that no rank waits for this one
            agreed = agree_min(tokens, "size of the KV buffers", group)
        if agreed < 1:
            raise UsageError(
                f"profile_size({mem_fraction}): the smallest rank has room for no token; here one takes "
                f"{cell} bytes in two rows, and {free} bytes of {self.device} are free: use a smaller model "
                "or a larger fraction, or free memory first"
            )
        return agreed

    def resize_mem(self, new_size: int) -> None:
        """New, empty buffers for `new_size` tokens. UsageError while slots are in use or claimed.

        Views and `kv_buffers()` of the old buffers are stale after it. Where the new ones cannot be made, the
        old size is made again, empty, and the error raised.
        """
        old_size = self.size
        self.allocator.resize(new_size)
        self._free_buffers()
        try:
            self._make(new_size)
        except BaseException:
            self.allocator.resize(old_size)
            self._make(old_size)
            raise

    def _make(self, size: int) -> None:
        self._buffer_bytes = 0
        self._init_buffers(size)
        self._buffer_bytes = (size + 1) * self.get_cell_size()

    # -- for a worker --------------------------------------------------------------------------------

    def kv_buffers(
        self,
        page_tokens: int | None = None,
        *,
        engine: str = "",
        shard: int = 0,
        shards: int = 1,
        replica: int = 0,
        replicas: int = 1,
    ) -> KVBuffers:
        """These buffers as a `Worker` takes them: one row per token in each plane.

        `page_tokens`: tokens of a host page; None for the default size. `engine` goes into the layout's
        format, for all that changes what the bytes mean and that is not seen here (backend, RoPE form).
        Model and revision belong in the `Namespace`. `shards`: how many different, equally large parts the
        ranks hold (tensor parallelism), `shard`: which of them is here; `replicas`, `replica`: the same for
        ranks that hold the same part. The planes share the buffers' memory, with the hold slot.
        """
        names, planes = [], []
        for name, tensor in self._planes():
            if tensor.shape[0] != self.size + 1 or not tensor.is_contiguous():
                raise UsageError(
                    f"_planes: {name!r} is {tuple(tensor.shape)}, strides {tensor.stride()}; expected "
                    f"{self.size + 1} rows, one after the other"
                )
            names.append(name)
            planes.append(tensor.view(torch.uint8).view(self.size + 1, -1))
        cell = sum(plane.shape[1] for plane in planes)
        if cell != self.get_cell_size():
            raise UsageError(
                f"{type(self).__name__}: get_cell_size() says {self.get_cell_size()} bytes, its planes have "
                f"{cell} a token"
            )
        if page_tokens is None:
            page_tokens = default_page_tokens(cell * shards)
        part = tuple(Plane(name, plane.shape[1]) for name, plane in zip(names, planes, strict=True))
        layout = KVLayout(
            page_tokens, (part,) * shards, format=f"kvtier.memory/1 {self._format()} {engine}".rstrip()
        )
        return KVBuffers(layout, tuple(planes), shard, replica, replicas)


def _advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages under a tensor that nobody has touched yet: copies of scattered slots gain 5 to 10%.

    A wish: where the kernel knows none, or this is no Linux, nothing happens.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes - begin) // mmap.PAGESIZE * mmap.PAGESIZE
    if advice is not None and length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), ctypes.c_int(advice))
