"""MemoryManagers of other KV than keys and values as they are: latent (MLA), and quantised with scales.

May import torch and the rest of `memory/`. Each is a subclass by the hooks that `memory_manager.py` names,
and nothing else: allocator, resize, profile and `kv_buffers()` are `MemoryManager`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvtier.errors import UsageError
from kvtier.memory.memory_manager import MemoryManager

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


class MLAMemoryManager(MemoryManager):
    """Multi-head latent attention: one latent and one RoPE key a token and layer, for all heads.

    `kv_buffer` is [layer_num, size + 1, 1, kv_lora_rank + rope_dim]. All tensor-parallel ranks hold the same
    bytes: say so with `kv_buffers(replica=rank, replicas=ranks)`.
    """

    def __init__(
        self,
        size: int | None,
        dtype: torch.dtype,
        kv_lora_rank: int,
        rope_dim: int,
        layer_num: int,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        if kv_lora_rank < 1 or rope_dim < 0:
            raise UsageError(f"kv_lora_rank={kv_lora_rank}, rope_dim={rope_dim}: expected 1 and 0 or more")
        self.kv_lora_rank = kv_lora_rank
        self.rope_dim = rope_dim
        super().__init__(size, dtype, 1, kv_lora_rank + rope_dim, layer_num, device, **options)

    def get_cell_size(self) -> int:
        """One row of latent and RoPE key for each layer."""
        return self.layer_num * self.head_dim * self.dtype.itemsize

    def _init_buffers(self, size: int) -> None:
        self.kv_buffer = self._zeros((self.layer_num, size + 1, 1, self.head_dim), self.dtype)

    def _format(self) -> str:
        return f"mla[{self.kv_lora_rank}+{self.rope_dim}] {self.dtype}"

    def get_att_input_params(self, layer_index: int) -> tuple[torch.Tensor, ...]:
        """Latent [size + 1, 1, kv_lora_rank] and RoPE key [size + 1, 1, rope_dim] of one layer: views."""
        layer = self.kv_buffer[layer_index]
        return layer[..., : self.kv_lora_rank], layer[..., self.kv_lora_rank :]


class QuantizedKV(NamedTuple):
    """Views of one layer: `k`, `v` [size + 1, head_num, head_dim], scales [size + 1, head_num, groups]."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class QuantizedMemoryManager(MemoryManager):
    """Keys and values as int8 or fp8 (e4m3fn, e5m2), with a scale for each `group_size` numbers of a head.

    `kv_buffer` is [layer_num, size + 1, 2 * head_num, head_dim] of `dtype`; `scale_buffer` is [layer_num,
    size + 1, 2 * head_num, groups] of `scale_dtype`. A number is worth itself times its scale. A token's
    scales travel with it: they are a plane of their own beside each layer's.
    """

    scale_buffer: torch.Tensor

    def __init__(
        self,
        size: int | None,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str | torch.device = "cpu",
        *,
        scale_dtype: torch.dtype = torch.float32,
        group_size: int | None = None,
        **options: Any,
    ) -> None:
        self.group_size = head_dim if group_size is None else group_size
        if dtype not in _LARGEST or self.group_size < 1 or head_dim % self.group_size:
            raise UsageError(
                f"dtype={dtype}, group_size={self.group_size}: expected one of {[str(d) for d in _LARGEST]}, "
                f"and a divisor of head_dim={head_dim}"
            )
        self.scale_dtype = scale_dtype
        self.groups = head_dim // self.group_size
        super().__init__(size, dtype, head_num, head_dim, layer_num, device, **options)

    def get_cell_size(self) -> int:
        """Numbers and scales."""
        scales = self.layer_num * 2 * self.head_num * self.groups * self.scale_dtype.itemsize
        return super().get_cell_size() + scales

    def _init_buffers(self, size: int) -> None:
        super()._init_buffers(size)
        shape = (self.layer_num, size + 1, 2 * self.head_num, self.groups)
        self.scale_buffer = self._zeros(shape, self.scale_dtype)

    def _free_buffers(self) -> None:
        super()._free_buffers()
        del self.scale_buffer

    def _planes(self) -> Sequence[tuple[str, torch.Tensor]]:
        scales = [(f"{layer}.scale", rows) for layer, rows in enumerate(self.scale_buffer)]
        return [plane for pair in zip(super()._planes(), scales, strict=True) for plane in pair]

    def _format(self) -> str:
        return f"{super()._format()} scale {self.scale_dtype} of {self.group_size}"

    def get_att_input_params(self, layer_index: int) -> QuantizedKV:
        """Numbers and scales of one layer, as views."""
        numbers, scales = self.kv_buffer[layer_index], self.scale_buffer[layer_index]
        heads = self.head_num
        return QuantizedKV(numbers[:, :heads], numbers[:, heads:], scales[:, :heads], scales[:, heads:])

    def quantize(self, layer_index: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write `kv` [n, 2 * head_num, head_dim] to `slots`: absolute maximum over each group.

        A reference; an engine with a kernel for it writes the buffers itself.
        """
        grouped = kv.float().reshape(*kv.shape[:-1], self.groups, self.group_size)
        largest = _LARGEST[self.dtype]
        scales = (grouped.abs().amax(-1) / largest).to(self.scale_dtype)
        divisors = scales.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        numbers = (grouped / divisors).clamp(-largest, largest).flatten(-2)
        if not self.dtype.is_floating_point:
            numbers = numbers.round()
        rows = slots.long()
        # Indexed writes know no fp8: the same bytes as uint8.
        self.kv_buffer[layer_index].view(torch.uint8)[rows] = numbers.to(self.dtype).view(torch.uint8)
        self.scale_buffer[layer_index][rows] = scales

    def dequantize(self, layer_index: int, slots: torch.Tensor) -> torch.Tensor:
        """What `slots` hold, as float32 [n, 2 * head_num, head_dim]."""
        rows = slots.long()
        numbers = self.kv_buffer[layer_index].view(torch.uint8)[rows].view(self.dtype).float()
        scales = self.scale_buffer[layer_index][rows].float()
        grouped = numbers.view(*scales.shape, self.group_size) * scales[..., None]
        return grouped.flatten(-2)
