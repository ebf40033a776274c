"""The pool's memory: how it is cut into chunks, its reservation (server), and its mapping (clients).

A pool is a list of chunks, each one sealed memfd of whole frames; within a chunk it is shard-major:
`[shard][frame][bytes of that shard]`. The server reserves the chunks one after the other in a child process and
hands their descriptors out; it never maps them. A client maps a chunk and closes its descriptor.

Imports numpy, the standard library and the ground floor. Always true: a frame that is counted in `frames` is
reserved (fallocate) and touched, so that nobody meets SIGBUS; sizes never change (sealed).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.config import GIB, MIB, format_size
from kvtier.errors import ConfigError, UsageError
from kvtier.layout import SHARD_ALIGN, KVLayout
from kvtier.shm.mapping import map_shared, populate

Bytes = npt.NDArray[np.uint8]


class Place(NamedTuple):
    """Where one shard of one frame lies: chunk number, offset in bytes in that chunk, bytes."""

    chunk: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class PoolShape:
    """How a pool is cut: what must be equal in all processes that map it.

    `geometry`: page tokens, then the bytes of each shard (`KVLayout.geometry`). `frames`: of the whole pool.
    `chunk_frames`: of each chunk but perhaps the last. ConfigError for numbers that make no pool.
    """

    geometry: tuple[int, ...]
    frames: int
    chunk_frames: int

    def __post_init__(self) -> None:
        sizes = self.geometry[1:]
        if not sizes or self.geometry[0] < 1 or any(size < 1 or size % SHARD_ALIGN for size in sizes):
            raise ConfigError(
                f"geometry {self.geometry}: expected page tokens, then bytes of each shard in multiples of {SHARD_ALIGN}"
            )
        if not 1 <= self.frames <= MAX_FRAMES or not 1 <= self.chunk_frames <= self.frames:
            raise ConfigError(
                f"frames={self.frames}, chunk_frames={self.chunk_frames}: expected 1 <= chunk_frames <= frames <= {MAX_FRAMES}"
            )

    @classmethod
    def of(cls, layout: KVLayout | tuple[int, ...], pool_bytes: int, chunk_bytes: int | None = None) -> PoolShape:
        """As many whole frames as `pool_bytes` holds. ConfigError when that is none.

        `layout` may be the geometry itself. `chunk_bytes` is for tests; the default is `chunk_size(pool_bytes)`.
        """
        geometry = layout.geometry if isinstance(layout, KVLayout) else layout
        page_bytes = sum(geometry[1:])
        frames = pool_bytes // page_bytes if page_bytes > 0 else 0
        if page_bytes > 0 and frames < 1:
            raise ConfigError(
                f"a pool of {format_size(pool_bytes)} holds no page: one page of this layout has "
                f"{format_size(page_bytes)}; give --size {format_size(page_bytes).replace(' ', '')} or more"
            )
        wanted = chunk_size(pool_bytes) if chunk_bytes is None else chunk_bytes
        return cls(geometry, frames, min(frames, max(1, -(-wanted // max(1, page_bytes)))))

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        return self.geometry[1:]

    @cached_property
    def page_bytes(self) -> int:
        return sum(self.geometry[1:])

    @property
    def pool_bytes(self) -> int:
        """Exactly what is taken: never more than what was asked for."""
        return self.frames * self.page_bytes

    @property
    def chunks(self) -> int:
        return -(-self.frames // self.chunk_frames)

    def frames_of(self, chunk: int) -> int:
        """How many frames `chunk` has; UsageError when there is no such chunk."""
        if not 0 <= chunk < self.chunks:
            raise UsageError(f"chunk {chunk}: expected 0 to {self.chunks - 1}")
        return min(self.chunk_frames, self.frames - chunk * self.chunk_frames)

    def chunk_bytes(self, chunk: int) -> int:
        return self.frames_of(chunk) * self.page_bytes

    def frames_below(self, chunks: int) -> int:
        """Frames in the first `chunks` chunks: the `mapped` mark of who has mapped that many (R28)."""
        return min(self.frames, max(0, chunks) * self.chunk_frames)

    def where(self, frame: int, shard: int) -> Place:
        """UsageError when the frame or the shard does not exist."""
        if not 0 <= frame < self.frames or not 0 <= shard < len(self.shard_bytes):
            raise UsageError(
                f"frame {frame}, shard {shard}: expected below {self.frames} and {len(self.shard_bytes)}"
            )
        chunk, within = divmod(frame, self.chunk_frames)
        size = self.shard_bytes[shard]
        before = self.frames_of(chunk) * sum(self.shard_bytes[:shard])
        return Place(chunk, before + within * size, size)


MAX_FRAMES = 2**31 - 1


def chunk_size(pool_bytes: int) -> int:
    """Bytes of a chunk, before rounding to whole frames: max(1 GiB, pool/256), an eighth of a small pool (R28).

    So a small pool comes up step by step too, and no pool has more than 256 chunks.
    """
    return max(-(-pool_bytes // 256), min(GIB, max(16 * MIB, -(-pool_bytes // 8))))


class Pool:
    """The server's side: makes and reserves the chunks in a child process, step by step (R29).

    Never blocks and never maps a chunk. Poll `fileno()` for reading and call `step()` when it is readable:

        pool = Pool(shape, headroom=preflight.headroom)
        poller.register(pool.fileno(), POLLIN)
        ...
        if pool.step(): cache.grow(pool.frames); hand chunks out
        if pool.error: log it; the pool stays at what was reserved

    `headroom()` tells how many more bytes this host and cgroup allow; it is asked before each step. `error` is None or
    a text (what was needed, available, and the remedy). `finished`: nothing more will come, all reserved or failed.
    Belongs to one thread. The child dies with this process, however that ends.
    """

    shape: PoolShape
    frames: int
    """Usable so far: all frames of the reserved chunks."""
    chunks: list[int]
    """Descriptors of the reserved chunks, in order; they belong to this object (do not close)."""
    reserved_bytes: int
    """For progress: bytes reserved so far, those of the unfinished chunk too."""
    finished: bool
    error: str | None

    def __init__(
        self,
        shape: PoolShape,
        *,
        headroom: Callable[[], int] | None = None,
        step_bytes: int = 32 * MIB,
        margin_bytes: int = 32 * MIB,
    ) -> None:
        raise NotImplementedError

    def fileno(self) -> int:
        """Readable when `step()` has something to do; -1 when finished."""
        raise NotImplementedError

    def step(self) -> bool:
        """Take the child's reports and order its next step. True when `frames` rose or `finished` was reached."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the child (bounded) and closes all descriptors. Clients keep what they have mapped."""
        raise NotImplementedError


class PoolView:
    """A client's mapping of the pool: grows as chunks are announced, one owner thread.

    Mappings are MADV_DONTFORK and MADV_DONTDUMP (R21): in a forked child every call is a UsageError. A mapping lives
    as long as any array made from it, also after `close()`; the memory goes when the last of them does.
    """

    shape: PoolShape
    writable: bool
    frames: int
    """Mapped so far: frames below this number can be used."""
    chunks: int
    """How many chunks are mapped."""

    def __init__(self, shape: PoolShape, *, writable: bool = True) -> None:
        raise NotImplementedError

    def add(self, fds: Sequence[int]) -> None:
        """Map the next chunks; the descriptors are closed, also on error. ProtocolError when one is not such a chunk
        (wrong size, not sealed) or there are too many."""
        raise NotImplementedError

    def page(self, frame: int, shard: int = 0, *, write: bool = False) -> Bytes:
        """uint8[bytes of that shard] of one frame, no copy; read-only unless `write`.

        UsageError when the frame is not mapped (yet), the shard does not exist, or the view is closed or read-only.
        """
        raise NotImplementedError

    def shard(self, chunk: int, shard: int, *, write: bool = False) -> Bytes:
        """uint8[frames of the chunk, bytes of that shard]: one contiguous run (for pinning and prefaulting)."""
        raise NotImplementedError

    def populate(self, chunk: int, shard: int | None = None) -> None:
        """Fault the chunk's pages into this process's page table now (about 0.1 s a GiB), instead of at the first
        copy. Blocks and releases the GIL: call it from a thread that may wait."""
        raise NotImplementedError

    def close(self) -> None:
        """No new arrays; unmaps what no array uses any more. Idempotent; in a forked child it does nothing."""
        raise NotImplementedError
