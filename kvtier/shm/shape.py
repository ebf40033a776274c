"""`PoolShape`: how a pool is cut into chunks and frames. Values only; imports the ground floor.

Within a chunk a pool is shard-major: `[shard][frame][bytes of that shard]`, so that one (frame, shard) is one
contiguous run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvtier.config import GIB, MIB, format_size
from kvtier.errors import ConfigError, UsageError
from kvtier.layout import SHARD_ALIGN, KVLayout

MAX_FRAMES = 2**31 - 1
MAX_PAGE_TOKENS = 2**31 - 1


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
        tokens = self.geometry[0] if self.geometry else 0
        if (
            not sizes
            or not 1 <= tokens <= MAX_PAGE_TOKENS
            or any(size < 1 or size % SHARD_ALIGN for size in sizes)
        ):
            raise ConfigError(
                f"geometry {self.geometry}: expected page tokens of 1 to {MAX_PAGE_TOKENS}, then bytes of "
                f"each shard in multiples of {SHARD_ALIGN}"
            )
        if not 1 <= self.frames <= MAX_FRAMES or not 1 <= self.chunk_frames <= self.frames:
            raise ConfigError(
                f"frames={self.frames}, chunk_frames={self.chunk_frames}: expected 1 <= chunk_frames "
                f"<= frames <= {MAX_FRAMES}"
            )

    @classmethod
    def of(
        cls, layout: KVLayout | tuple[int, ...], pool_bytes: int, chunk_bytes: int | None = None
    ) -> PoolShape:
        """As many whole frames as `pool_bytes` holds. ConfigError when that is none.

        `layout` may be the geometry itself. `chunk_bytes` is for tests; the default is
        `chunk_size(pool_bytes)`.
        """
        geometry = layout.geometry if isinstance(layout, KVLayout) else layout
        page_bytes = sum(geometry[1:])
        frames = pool_bytes // page_bytes if page_bytes > 0 else 0
        if page_bytes > 0 and frames < 1:
            raise ConfigError(
                f"a pool of {format_size(pool_bytes)} holds no page: one page of this layout has "
                f"{format_size(page_bytes)}; give --size {-(-page_bytes // 1024)}KiB or more"
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


def chunk_size(pool_bytes: int) -> int:
    """Bytes of a chunk, before rounding to whole frames: max(1 GiB, pool/256), an eighth of a small pool
    (R28).

    So a small pool comes up step by step too, and no pool has more than 256 chunks.
    """
    return max(-(-pool_bytes // 256), min(GIB, max(16 * MIB, -(-pool_bytes // 8))))
