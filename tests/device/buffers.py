"""KV buffers of many shapes for tests of copies, and a slow, plain reference of what a copy must do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvtier.device.base import KVBuffers, Piece
from kvtier.layout import KVLayout, Plane


def joined(layers: int = 3, row_bytes: int = 24, slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """A `MemoryManager`'s: one tensor [layers, slots, row_bytes], a plane for each layer."""
    memory = torch.zeros((layers, slots, row_bytes), dtype=torch.uint8)
    layout = KVLayout(
        page_tokens, (tuple(Plane(f"{layer}.kv", row_bytes) for layer in range(layers)),), "test"
    )
    return KVBuffers(layout, tuple(memory))


def separate(row_bytes: Sequence[int] = (24, 8, 5000), slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """Every plane in memory of its own, with rows of its own size."""
    layout = KVLayout(page_tokens, (tuple(Plane(f"{i}", size) for i, size in enumerate(row_bytes)),), "test")
    return KVBuffers(layout, tuple(torch.zeros((slots, size), dtype=torch.uint8) for size in row_bytes))


def interleaved(layers: int = 3, row_bytes: int = 24, slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """[slots, layers, row_bytes]: a plane's rows stand at a stride of `layers` rows."""
    memory = torch.zeros((slots, layers, row_bytes), dtype=torch.uint8)
    layout = KVLayout(
        page_tokens, (tuple(Plane(f"{layer}.kv", row_bytes) for layer in range(layers)),), "test"
    )
    return KVBuffers(layout, tuple(memory[:, layer] for layer in range(layers)))


def odd_stride(layers: int = 3, row_bytes: int = 24, slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """Rows with padding between, so that a stride is no multiple of a row."""
    memory = torch.zeros((layers, slots, row_bytes + 7), dtype=torch.uint8)
    layout = KVLayout(
        page_tokens, (tuple(Plane(f"{layer}.kv", row_bytes) for layer in range(layers)),), "test"
    )
    return KVBuffers(layout, tuple(memory[layer, :, :row_bytes] for layer in range(layers)))


def mixed_units(slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """Two planes of one token a row, two of 4 tokens a row, one of 8."""
    planes = (
        Plane("0.kv", 24, 1),
        Plane("1.kv", 24, 1),
        Plane("0.scale", 10, 4),
        Plane("1.scale", 10, 4),
        Plane("index", 7, 8),
    )
    kv = torch.zeros((2, slots, 24), dtype=torch.uint8)
    scale = torch.zeros((2, slots // 4, 10), dtype=torch.uint8)
    index = torch.zeros((slots // 8, 7), dtype=torch.uint8)
    return KVBuffers(KVLayout(page_tokens, (planes,), "test"), (*kv, *scale, index))


def blocks(unit_tokens: int = 4, units: int = 10, page_tokens: int = 8) -> KVBuffers:
    """The engine's unit is a block of 4 tokens; K and V apart, as planes at a stride of two."""
    memory = torch.zeros((units, 2, 96), dtype=torch.uint8)
    planes = (Plane("0.k", 96, unit_tokens), Plane("0.v", 96, unit_tokens))
    return KVBuffers(KVLayout(page_tokens, (planes,), "test"), (memory[:, 0], memory[:, 1]))


def uneven(row_bytes: int = 24, slots: int = 40, page_tokens: int = 8) -> KVBuffers:
    """Planes of one tensor, but at no even spacing, and not in the order of their addresses."""
    memory = torch.zeros((6, slots, row_bytes), dtype=torch.uint8)
    planes = tuple(Plane(f"{number}.kv", row_bytes) for number in range(5))
    return KVBuffers(
        KVLayout(page_tokens, (planes,), "test"), tuple(memory[number] for number in (0, 1, 3, 5, 2))
    )


KINDS = {
    "uneven": uneven,
    "joined": joined,
    "separate": separate,
    "interleaved": interleaved,
    "odd_stride": odd_stride,
    "mixed_units": mixed_units,
    "blocks": blocks,
}


def fill_random(buffers: KVBuffers, seed: int = 0) -> None:
    """Random bytes in every plane."""
    generator = torch.Generator().manual_seed(seed)
    for plane in buffers.planes:
        plane.copy_(torch.randint(0, 256, plane.shape, dtype=torch.uint8, generator=generator))


def image(buffers: KVBuffers) -> list[np.ndarray]:
    """A copy of every plane."""
    return [plane.numpy().copy() for plane in buffers.planes]


def reference(buffers: KVBuffers, device: list[np.ndarray], page: np.ndarray, piece: Piece) -> None:
    """What copying `piece` must do to `device` (planes) or to `page`: row by row, by the definitions."""
    layout, shard = buffers.layout, buffers.shard
    planes, offsets = layout.shards[shard], layout.plane_offsets(shard)
    for plane, offset, rows in zip(planes, offsets, device, strict=True):
        ratio = plane.unit_tokens // layout.unit_tokens
        for number, unit in enumerate(piece.units.tolist()):
            at = offset + (piece.first + number) // ratio * plane.row_bytes
            if piece.load:
                rows[unit // ratio] = page[at : at + plane.row_bytes]
            else:
                page[at : at + plane.row_bytes] = rows[unit // ratio]


def units_for(
    buffers: KVBuffers, first: int, count: int, seed: int = 0, run: int | None = None
) -> np.ndarray:
    """`count` units from position `first` on, no two alike, in runs of `run` (None: as short as can be)."""
    finest = buffers.unit_tokens
    ratio = max(plane.unit_tokens // finest for plane in buffers.layout.shards[buffers.shard])
    length = max(ratio, (run or 1) // ratio * ratio)
    whole = -(-(first % length + count) // length)
    starts = np.random.default_rng(seed).permutation(buffers.units // length)[:whole]
    assert len(starts) == whole, "the buffers are too small for this test"
    units = (starts[:, None] * length + np.arange(length)).ravel()
    return units[first % length :][:count].astype(np.int32)
