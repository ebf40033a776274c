"""The tables beside the pool: header, sessions, leases, namespaces, and one 64-byte line per frame (R14, R16).

One memfd, written by the server before each answer and mapped read-only by clients. `Tables.apply` takes the
core's writes and is the only writer; each of its steps is one array operation, in the order of R15, so that a
SIGKILL between (or within) any two leaves a table that can be read again.

Imports numpy, `core.writes` and the ground floor. Little-endian machines only (the state is the low byte of
its word). Always true: the word {gen 24, state 8} of a frame is only written by single aligned stores; a frame
is WRITING or READY only while its other fields are whole; a record counts only while its own mark is set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from kvtier.shm.region import PoolShape

Gens = npt.NDArray[np.uint32]


class Tables:
    """The server's tables: made once per pool, written by one thread.

    `fingerprint`: of the layout that formatted the pool (R14: refuses nobody). `server_gen`: of this server start.
    """

    shape: PoolShape
    pool_id: bytes
    fd: int
    """For reading and writing; belongs to this object."""
    read_fd: int
    """The same memory on a read-only description: what clients get. Belongs to this object."""

    @classmethod
    def create(
        cls,
        shape: PoolShape,
        *,
        fingerprint: bytes = bytes(32),
        server_gen: int = 1,
        pool_id: bytes | None = None,
        sessions: int = 256,
        leases: int = 65_536,
        namespaces: int = 4_096,
    ) -> Tables:
        """New, zeroed tables with a random pool id (16 bytes), reserved, so that no write can fail later.
        PreflightError when there is no memory for them."""
        raise NotImplementedError

    def apply(self, writes: Iterable[object]) -> None:
        """Do the core's writes (`HostCache.take_writes()`) in their order."""
        raise NotImplementedError

    def gens(self, frames: npt.ArrayLike) -> Gens:
        """uint32[n]: the generations of these frames (R31). `frames`: int32 array or array('i')."""
        raise NotImplementedError

    def beat(self, now_ns: int) -> None:
        """Write the heartbeat, nanoseconds of CLOCK_MONOTONIC."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TableView:
    """A client's read-only look at the tables; the descriptor is closed once it is mapped, also on error.

    ProtocolError when the bytes are not tables of this format, or too short for what they say.
    """

    shape: PoolShape
    pool_id: bytes
    fingerprint: bytes

    def __init__(self, fd: int) -> None:
        raise NotImplementedError

    def gens(self, frames: npt.ArrayLike) -> Gens:
        """uint32[n]: the generations now; to be compared with those of `begin_load` after the copy (R31)."""
        raise NotImplementedError

    @property
    def heartbeat_ns(self) -> int:
        """When the server last wrote its heartbeat (CLOCK_MONOTONIC)."""
        raise NotImplementedError

    @property
    def server_gen(self) -> int:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
