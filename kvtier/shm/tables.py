"""Writing the tables beside the pool (R14, R15, R16): the server's side of `table_format`.

One memfd, written by the server before each answer and mapped read-only by clients. `Tables.apply` takes the
core's writes and is the only writer; each of its steps is one array operation or one store, in the order of
R15, so that a SIGKILL between (or within) any two leaves tables that can be read again.

Imports numpy, `core.writes`, `shm` and the ground floor. Always true:

- A frame's word {gen 24, state 8} changes by single aligned stores only, of the word or of its state byte
  (which cannot tear, nor touch the generation).
- A frame is WRITING, READY, DOOMED or QUARANTINED only while its other fields are whole.
- A record's mark is cleared before another use of the record begins, and set when it is whole. A record
  that counts changes by single aligned stores.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.config import format_size
from kvtier.core import writes as w
from kvtier.errors import ConfigError, PreflightError
from kvtier.keys import KEY_BYTES
from kvtier.shm.mapping import map_shared, sealed_memfd
from kvtier.shm.shape import PoolShape
from kvtier.shm.table_format import (
    ABSENT,
    EPOCH,
    FORMAT,
    FRAME,
    HEADER,
    HEARTBEAT,
    MAGIC,
    MAX_SHARDS,
    SHARDS_AT,
    TableArrays,
    TableView,
    index_of,
    table_bytes,
)

__all__ = ["TableView", "Tables"]

_KEY = np.dtype("V32")
_BODY = np.dtype("V60")  # a line without its word
_SLAB = 4096  # lines of a claim that are laid out at a time


def _column(lines: npt.NDArray[Any], dtype: npt.DTypeLike, offset: int) -> npt.NDArray[Any]:
    """One value of each line, `offset` bytes into it: a strided view."""
    memory = lines.view(np.uint8)
    return np.ndarray((len(lines),), dtype=dtype, buffer=memory, offset=offset, strides=(lines.itemsize,))


class _Stage:
    """Lines of a claim, laid out before they are scattered in one array operation."""

    def __init__(self, count: int) -> None:
        lines = np.zeros(count, dtype=FRAME)
        self.key = _column(lines, _KEY, 0)
        self.tag = _column(lines, np.uint64, 32)
        self.parent = _column(lines, np.int32, 56)
        self.owner = _column(lines, np.uint64, 48)  # lease and stamp
        self.bodies = _column(lines, _BODY, 0)


class Tables(TableArrays):
    """The server's tables: made once per pool, written by one thread.

    `fd` reads and writes, `read_fd` is the same memory on a read-only description (what clients get); both
    belong to this object. `pool_id`: 16 random bytes.
    """

    def __init__(
        self,
        shape: PoolShape,
        *,
        fingerprint: bytes = bytes(32),
        server_gen: int = 1,
        pool_id: bytes | None = None,
        sessions: int = 256,
        leases: int = 65_536,
        namespaces: int = 4_096,
    ) -> None:
        """New, zeroed tables, reserved so that no write can fail later. `fingerprint`: of the layout that
        formatted the pool (it refuses nobody). PreflightError when there is no memory for them, ConfigError
        for too many shards."""
        if len(shape.shard_bytes) > MAX_SHARDS:
            raise ConfigError(f"{len(shape.shard_bytes)} shards: expected at most {MAX_SHARDS}")
        self.pool_id = os.urandom(16) if pool_id is None else pool_id
        size = table_bytes(shape.frames, sessions, leases, namespaces)
        try:
            self.fd = sealed_memfd("kvtier-tables", size)
        except OSError as error:
            raise PreflightError(f"tables of {format_size(size)}: {error}; give a smaller --size") from error
        try:
            os.posix_fallocate(self.fd, 0, size)
            memory = map_shared(self.fd, size, writable=True)
            self.read_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self.fd)
            raise PreflightError(f"tables of {format_size(size)}: {error}; give a smaller --size") from error
        super().__init__(memory, shape, sessions, leases, namespaces)
        HEADER.pack_into(
            memory,
            0,
            bytes(8),
            server_gen,
            0,
            0,
            self.pool_id,
            fingerprint,
            FORMAT,
            shape.geometry[0],
            shape.frames,
            shape.chunk_frames,
            len(shape.shard_bytes),
            sessions,
            leases,
            namespaces,
        )
        struct.pack_into(f"<{len(shape.shard_bytes)}Q", memory, SHARDS_AT, *shape.shard_bytes)
        # One store says that the rest is there.
        self._header[0] = int.from_bytes(MAGIC, "little")

        self._states = self.frames["state"]
        self._parents = self.frames["parent"]
        self._bodies = _column(self.frames, _BODY, 0)
        self._stage = _Stage(min(_SLAB, shape.frames))
        # Records as 64-bit words: a store to an element of such a view is one aligned store.
        self._lease_words = memoryview(self.leases.view(np.uint8)).cast("Q")
        self._session_words = memoryview(self.sessions.view(np.uint8)).cast("Q")
        self._namespace_words = memoryview(self.namespaces.view(np.uint8)).cast("Q")
        self._steps_of: dict[type, Callable[[Any], Iterator[None]]] = {
            w.Free: self._state_step(w.FREE),
            w.Ready: self._state_step(w.READY),
            w.Doom: self._state_step(w.DOOMED),
            w.Quarantine: self._state_step(w.QUARANTINED),
            w.Claim: self._claim,
            w.Reparent: self._reparent,
            w.LeaseRecord: self._lease,
            w.LeaseEnd: self._lease_end,
            w.SessionRecord: self._session,
            w.SessionNumber: self._session_number,
            w.SessionEnd: self._session_end,
            w.EpochRecord: self._epoch,
            w.NamespaceEnd: self._namespace_end,
            w.PoolEpoch: self._pool_epoch,
        }

    def apply(self, writes: Iterable[w.Write]) -> None:
        """Carry out the core's writes (`HostCache.take_writes()`) in their order."""
        steps_of = self._steps_of
        for write in writes:
            for _ in steps_of[type(write)](write):
                pass

    def steps(self, writes: Iterable[w.Write]) -> Iterator[None]:
        """As `apply`, one step of R15 for each `next()`: a test can look at the tables in between."""
        steps_of = self._steps_of
        for write in writes:
            yield from steps_of[type(write)](write)

    def beat(self, now_ns: int) -> None:
        """Write the heartbeat: nanoseconds of CLOCK_MONOTONIC."""
        self._header[HEARTBEAT] = now_ns

    def close(self) -> None:
        """Closes both descriptors; the mapping goes with the last array of it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self.read_fd)
        self.fd = self.read_fd = -1

    # --- frames ---

    def _state_step(self, state: int) -> Callable[[Any], Iterator[None]]:
        def step(write: Any) -> Iterator[None]:
            # In the order of `frames`: numpy stores element by element, so a kill leaves a front part done.
            self._states[index_of(write.frames)] = state
            yield

        return step

    def _claim(self, claim: w.Claim) -> Iterator[None]:
        frames = np.asarray(claim.frames, dtype=np.int32)
        index = frames.astype(np.intp)
        words = self._words[index]
        words &= 0xFFFFFF00
        words += 256  # FREE, the next generation; 24 bits wrap in the 32-bit word
        self._words[index] = words
        yield
        count = len(frames)
        keys = np.frombuffer(claim.keys, dtype=_KEY, count=count)
        tags = np.ndarray((count,), dtype=np.uint64, buffer=claim.keys, strides=(KEY_BYTES,))
        parent, tag = claim.parent_frame, int.from_bytes(claim.parent_tag, "little")
        stage = self._stage
        for at in range(0, count, _SLAB):
            end = min(at + _SLAB, count)
            rows = end - at
            stage.key[:rows] = keys[at:end]
            stage.tag[0], stage.tag[1:rows] = tag, tags[at : end - 1]
            stage.parent[0], stage.parent[1:rows] = parent, frames[at : end - 1]
            stage.owner[:rows] = claim.lease | claim.stamp << 32
            self._bodies[index[at:end]] = stage.bodies[:rows]
            parent, tag = int(frames[end - 1]), int(tags[end - 1])
            yield
        self._states[index] = w.WRITING
        yield

    def _reparent(self, write: w.Reparent) -> Iterator[None]:
        self._parents[write.frame] = write.parent_frame
        yield

    # --- records: [sid, number, deepest, epoch, quiet, pages, kind, -] ---

    def _lease(self, write: w.LeaseRecord) -> Iterator[None]:
        words, at = self._lease_words, write.lease * 8
        deepest = write.deepest_frame & 0xFFFFFFFF
        if write.deepest_frame >= 0:
            deepest |= int(self._words[write.deepest_frame] >> 8) << 32
        values = (deepest, write.epoch, write.quiet_mask, write.pages)
        if words[at + 6] == write.kind and words[at] == write.sid and words[at + 1] == write.number:
            # The record counts and must go on counting: one store for each word that is another.
            for word, value in enumerate(values, at + 2):
                if words[word] != value:
                    words[word] = value
                    yield
            return
        words[at + 6] = 0
        yield
        words[at], words[at + 1] = write.sid, write.number
        words[at + 2], words[at + 3], words[at + 4], words[at + 5] = values
        yield
        words[at + 6] = write.kind
        yield

    def _lease_end(self, write: w.LeaseEnd) -> Iterator[None]:
        self._lease_words[write.lease * 8 + 6] = 0
        yield

    # --- records: [sid, group hash, last number, rank and ranks, role, -, -, -] ---

    def _session(self, write: w.SessionRecord) -> Iterator[None]:
        words, at = self._session_words, write.slot * 8
        words[at + 4] = 0
        yield
        words[at], words[at + 1] = write.sid, int.from_bytes(write.group_hash, "little")
        words[at + 2], words[at + 3] = write.last_number, write.rank | write.ranks << 32
        yield
        words[at + 4] = write.role
        yield

    def _session_number(self, write: w.SessionNumber) -> Iterator[None]:
        self._session_words[write.slot * 8 + 2] = write.last_number
        yield

    def _session_end(self, write: w.SessionEnd) -> Iterator[None]:
        self._session_words[write.slot * 8 + 4] = 0
        yield

    # --- records: [ns, ns, epoch, used] ---

    def _epoch(self, write: w.EpochRecord) -> Iterator[None]:
        words, at = self._namespace_words, write.ns_index * 4
        low, high = int.from_bytes(write.ns[:8], "little"), int.from_bytes(write.ns[8:16], "little")
        if not (words[at + 3] and words[at] == low and words[at + 1] == high):
            words[at + 3] = 0
            yield
            words[at], words[at + 1], words[at + 2] = low, high, write.epoch
            yield
            words[at + 3] = 1
            yield
            return
        words[at + 2] = write.epoch
        yield

    def _namespace_end(self, write: w.NamespaceEnd) -> Iterator[None]:
        self._namespace_words[write.ns_index * 4 + 3] = 0
        yield

    def _pool_epoch(self, write: w.PoolEpoch) -> Iterator[None]:
        self._header[EPOCH] = write.counter
        yield
        self._header[ABSENT] = write.absent
        yield
