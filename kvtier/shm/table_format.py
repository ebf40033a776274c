"""The format of the tables in shared memory, and the reading of them (R14, R16).

Header, sessions, leases, namespaces, and one 64-byte line per frame lie in one memfd. The last field of each
record is its mark: the record counts only while it is set. Little-endian machines only: a frame's state is
the low byte of its word {gen 24, state 8}. Imports numpy, `shm` and the ground floor.
"""

from __future__ import annotations

import os
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import ConfigError, ProtocolError
from kvtier.shm.mapping import Bytes, map_shared
from kvtier.shm.shape import PoolShape

MAGIC = b"kvtierT\x01"
FORMAT = 1

Gens = npt.NDArray[np.uint32]

# The fixed part of the header; `<Q` shard sizes follow it. Words that change while clients look are
# 8-aligned.
HEADER = struct.Struct("<8sQQQ16s32sIIIIIIII")
SERVER_GEN, HEARTBEAT, EPOCH, ABSENT = 1, 2, 3, 14
SHARDS_AT = 128
HEADER_BYTES = 4096
MAX_SHARDS = (HEADER_BYTES - SHARDS_AT) // 8

SESSION = np.dtype(
    {
        "names": ["sid", "group_hash", "last_number", "rank", "ranks", "role"],
        "formats": ["<u8", "V8", "<u8", "<u4", "<u4", "<u8"],
        "offsets": [0, 8, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
"""A session; `role` is its mark."""

LEASE = np.dtype(
    {
        "names": ["sid", "number", "deepest_frame", "deepest_gen", "epoch", "quiet", "pages", "kind"],
        "formats": ["<u8", "<u8", "<i4", "<u4", "<u8", "<u8", "<u8", "<u8"],
        "offsets": [0, 8, 16, 20, 24, 32, 40, 48],
        "itemsize": 64,
    }
)
"""A lease; `kind` is its mark."""

NAMESPACE = np.dtype(
    {
        "names": ["ns", "epoch", "used"],
        "formats": ["V16", "<u8", "<u8"],
        "offsets": [0, 16, 24],
        "itemsize": 32,
    }
)
"""A namespace; `used` is its mark."""

FRAME = np.dtype(
    {
        "names": ["key", "tag", "checksum", "lease", "stamp", "parent", "word", "state"],
        "formats": ["V32", "V8", "<u8", "<i4", "<u4", "<i4", "<u4", "u1"],
        "offsets": [0, 32, 40, 48, 52, 56, 60, 60],
        "itemsize": 64,
    }
)
"""A frame's line. `tag`: first 8 bytes of the parent's key; `parent`: its frame, or -1 - namespace index.
`checksum`: 0 until a tier has read the page. `state` is the low byte of `word`."""


class TableArrays:
    """The parts of a mapped table as structured arrays (views, no copies)."""

    def __init__(self, memory: Bytes, shape: PoolShape, sessions: int, leases: int, namespaces: int) -> None:
        at = HEADER_BYTES

        def part(dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
            nonlocal at
            view = memory[at : at + count * dtype.itemsize].view(dtype)
            at += view.nbytes
            return view

        self.shape = shape
        self.sessions = part(SESSION, sessions)
        self.leases = part(LEASE, leases)
        self.namespaces = part(NAMESPACE, namespaces)
        at = -(-at // 4096) * 4096
        self.frames = part(FRAME, shape.frames)
        self._header = memoryview(memory)[:HEADER_BYTES].cast("Q")
        self._words = self.frames["word"]

    @property
    def heartbeat_ns(self) -> int:
        """When the server last wrote its heartbeat (CLOCK_MONOTONIC)."""
        return self._header[HEARTBEAT]

    @property
    def server_gen(self) -> int:
        return self._header[SERVER_GEN]

    @property
    def epochs(self) -> tuple[int, int]:
        """The pool's epoch counter, and the epoch of namespaces without an entry."""
        return self._header[EPOCH], self._header[ABSENT]

    def gens(self, frames: npt.ArrayLike) -> Gens:
        """uint32[n]: the generations of these n frames now (R31). `frames`: int32 array or array('i')."""
        words: Gens = self._words[index_of(frames)]
        words >>= 8
        return words


def index_of(frames: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """int32 frames as an index; numpy takes one of its own type in half the time."""
    return np.asarray(frames, dtype=np.int32).astype(np.intp)


def table_bytes(frames: int, sessions: int, leases: int, namespaces: int) -> int:
    fixed = sessions * SESSION.itemsize + leases * LEASE.itemsize + namespaces * NAMESPACE.itemsize
    return -(-(HEADER_BYTES + fixed) // 4096) * 4096 + frames * FRAME.itemsize


class TableView(TableArrays):
    """A client's read-only look at the tables. `fd` is closed once it is mapped, also on error.

    ProtocolError when the bytes are not tables of this format, or fewer than they say.
    """

    def __init__(self, fd: int) -> None:
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES:
                raise ProtocolError(f"tables of {size} bytes: expected at least {HEADER_BYTES}")
            memory = map_shared(fd, size, writable=False)
        except OSError as error:
            raise ProtocolError(f"tables: {error}") from error
        finally:
            os.close(fd)
        (
            magic,
            _,
            _,
            _,
            self.pool_id,
            self.fingerprint,
            number,
            tokens,
            frames,
            chunk_frames,
            shards,
            *counts,
        ) = HEADER.unpack_from(memory)
        if magic != MAGIC or number != FORMAT:
            raise ProtocolError(f"tables begin with {magic!r}, format {number}: expected {MAGIC!r}, {FORMAT}")
        if not 1 <= shards <= MAX_SHARDS or table_bytes(frames, *counts) != size:
            raise ProtocolError(
                f"tables of {size} bytes, {shards} shards: expected {table_bytes(frames, *counts)} bytes"
            )
        sizes = struct.unpack_from(f"<{shards}Q", memory, SHARDS_AT)
        try:
            shape = PoolShape((tokens, *sizes), frames, chunk_frames)
        except ConfigError as error:
            raise ProtocolError(f"tables: {error}") from error
        super().__init__(memory, shape, *counts)
