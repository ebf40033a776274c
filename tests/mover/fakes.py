"""A session without a sidecar, for tests of the mover: a pool in this process that the test changes."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvtier.device.base import Copier, KVBuffers
from kvtier.mover import Mover
from kvtier.wire.plan import Cancel, Copy, Kind, Lane, Seen, encode

POOL = b"a pool of tests."


class FakePool:
    """What the mover uses of a `PoolView`: chunks of 25 frames, and how far it is mapped."""

    def __init__(self, shard_bytes: tuple[int, ...], frames: int) -> None:
        self.frames = frames
        self.chunks = -(-frames // 25)
        self.arrays = [np.zeros((frames, size), np.uint8) for size in shard_bytes]

    def shard(self, chunk: int, shard: int, *, write: bool = False) -> np.ndarray:
        view = self.arrays[shard][25 * chunk : 25 * (chunk + 1)]
        view.flags.writeable = write
        return view


class FakeClient:
    """A `CacheClient` as the mover sees it. The test calls `go_away` and `come_back`; the mover the rest."""

    def __init__(self, frames: int = 64) -> None:
        self._frames = frames
        self._changed = os.eventfd(0, os.EFD_NONBLOCK)
        self._server_pool = POOL
        self.refused: Exception | None = None
        self.attached = False
        self.lost = False
        self.attachment_no = 0
        self.pool_id = b""
        self.pool: Any = None
        self.generations = np.zeros(frames, np.uint32)
        self.released = threading.Event()
        self.closed: list[bool] = []

    def start(self, **settings: Any) -> FakeClient:
        """Stands for the constructor."""
        self.settings = settings
        self._attach()
        return self

    def go_away(self) -> None:
        """The server has gone."""
        self._server_pool = b""
        os.eventfd_write(self._changed, 1)

    def come_back(self, pool_id: bytes = POOL) -> None:
        """A server is there again."""
        self._server_pool = pool_id
        os.eventfd_write(self._changed, 1)

    def _attach(self) -> None:
        if self._server_pool and not self.lost:
            self.attached, self.pool_id = True, self._server_pool
            self.attachment_no += 1
            self.pool = FakePool(self.settings["layout"].shard_bytes, self._frames)

    def poll(self) -> list[Any]:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._changed)
        if self.attached and self._server_pool != self.pool_id:
            self.attached, self.lost = False, True
        if not self.attached:
            self._attach()
        return []

    def wait(self, timeout_s: float, fd: int | None = None) -> bool:
        return bool(select.select([self._changed, *([fd] if fd is not None else [])], [], [], timeout_s)[0])

    def gens(self, frames: np.ndarray) -> np.ndarray:
        return self.generations[frames]

    def release(self) -> None:
        self.lost, self.pool = False, None
        self.released.set()
        os.eventfd_write(self._changed, 1)

    def close(self, quiet: bool = True, timeout_s: float | None = None) -> None:
        self.closed.append(quiet)
        self.attached = False


class Rig:
    """A mover over a fake session, and a planner's part: numbers, plans, waiting."""

    def __init__(self, buffers: KVBuffers, mover: Mover, client: FakeClient) -> None:
        self.buffers, self.mover, self.client = buffers, mover, client
        self._tasks = 0
        self._seqs = dict.fromkeys(Lane, 0)
        self._failed = 0

    def copy(self, kind: Kind, frames: Any, units: Any, *, first: int = 0, lane: Lane | None = None) -> Copy:
        """The next task; a load expects the frames' generations as they are now."""
        self._tasks += 1
        lane = (Lane.SHORT_LOADS if kind == Kind.LOAD else Lane.OFFLOADS) if lane is None else lane
        self._seqs[lane] += 1
        frames = np.asarray(frames, np.int32)
        gens = self.client.generations[frames] if kind == Kind.LOAD else np.empty(0, np.uint32)
        units = np.asarray(units, np.int32)
        return Copy(self._tasks, kind, lane, self._seqs[lane], frames, units, first, gens)

    def give(self, *commands: Copy | Cancel, pool_id: bytes = POOL) -> None:
        """Send `commands` to the mover, bound to its last mark."""
        self.mover.apply(encode(commands, pool_id))

    def finished(self, *copies: Copy, timeout_s: float = 5.0) -> Seen:
        """Wait until all `copies` are over; what failed since the last call."""
        for _ in range(1000):
            seen = self.mover.progress().read(self._failed)
            if all(seen.done[copy.lane] >= copy.seq for copy in copies):
                self._failed = seen.failed
                return seen
            assert self.mover.wait_progress(timeout_s), f"copies did not finish: {seen}"
        raise AssertionError("unreachable")

    def done(self, copy: Copy) -> bool:
        """Is it over now?"""
        return self.mover.progress().read().done[copy.lane] >= copy.seq

    @property
    def pages(self) -> np.ndarray:
        """The pool's pages of this rank's shard: uint8 [frames, shard bytes]."""
        pages: np.ndarray = self.client.pool.arrays[self.buffers.shard]
        return pages


@contextlib.contextmanager
def rig(
    monkeypatch: pytest.MonkeyPatch,
    buffers: KVBuffers,
    copier: Copier | None = None,
    frames: int = 64,
    **settings: Any,
) -> Iterator[Rig]:
    """A mover over `buffers`, marked once; closed at the end."""
    client = FakeClient(frames)
    monkeypatch.setattr("kvtier.mover.mover.CacheClient", lambda run_dir, **given: client.start(**given))
    monkeypatch.setattr("kvtier.mover.copying.IDLE_S", 60.0)  # no timer hides a wake-up that is missing
    monkeypatch.setattr("kvtier.mover.copying.populate", lambda array, write: True)
    mover = Mover(buffers, "/nowhere", "group", copier=copier, **settings)
    try:
        mover.mark()
        yield Rig(buffers, mover, client)
    finally:
        mover.close()
