"""The pool's memory: how it is cut into chunks, its reservation (server), and its mapping (clients).

A pool is a list of chunks, each one sealed memfd of whole frames; within a chunk it is shard-major:
`[shard][frame][bytes of that shard]`. The server reserves the chunks one after the other in a child process and
hands their descriptors out; it never maps them. A client maps a chunk and closes its descriptor.

Imports numpy, the standard library and the ground floor. Always true: a frame that is counted in `frames` is
reserved (fallocate) and touched, so that nobody meets SIGBUS; sizes never change (sealed).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvtier.config import GIB, MIB, format_size
from kvtier.errors import ConfigError, ProtocolError, UsageError
from kvtier.layout import SHARD_ALIGN, KVLayout
from kvtier.shm import reserver
from kvtier.shm.mapping import SIZE_SEALS, Bytes, map_shared, populate, sealed_memfd

MAX_FRAMES = 2**31 - 1


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
    def of(
        cls, layout: KVLayout | tuple[int, ...], pool_bytes: int, chunk_bytes: int | None = None
    ) -> PoolShape:
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
        if pool.step(): cache.grow(pool.frames); hand pool.chunks out
        if pool.finished: unregister; log pool.error if there is one

    `headroom()` tells how many more bytes this host and cgroup allow; it is asked before each step of
    `step_bytes`, and `margin_bytes` of it are left to others. After an error the pool stays at what was reserved.
    Belongs to one thread, the process's main one: the child dies with it (PDEATHSIG), however it ends.

    `frames`: usable so far, all of the reserved chunks. `chunks`: their descriptors, in order, which belong to this
    object. `reserved_bytes`: for progress, with those of the unfinished chunk. `finished`: nothing more will
    come. `error`: why not all came, with needed, available and remedy.
    """

    def __init__(
        self,
        shape: PoolShape,
        *,
        headroom: Callable[[], int] | None = None,
        step_bytes: int = 32 * MIB,
        margin_bytes: int = 32 * MIB,
    ) -> None:
        if step_bytes < 1 or step_bytes % MIB:
            raise UsageError(f"step_bytes={step_bytes}: expected a multiple of 1 MiB")
        self.shape = shape
        self.frames = 0
        self.chunks: list[int] = []
        self.reserved_bytes = 0
        self.finished = False
        self.error: str | None = None
        self._headroom = headroom
        self._step_bytes = step_bytes
        self._margin_bytes = margin_bytes
        self._chunk = -1  # the descriptor of the chunk being reserved
        self._done = 0  # bytes of it
        self._pid = 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        try:
            ours.setblocking(False)
            self._pid = _start_reserver(theirs.fileno())
        except OSError as error:
            self._fail(f"cannot start {sys.executable}: {error}")
        finally:
            theirs.close()
        if not self.finished:
            self._order()

    def fileno(self) -> int:
        """Readable when `step()` has something to do; -1 when finished."""
        return self._socket.fileno()

    def step(self) -> bool:
        """Take the child's report and order its next step. True when `frames` rose or `finished` was reached."""
        if self.finished:
            return False
        try:
            report = self._socket.recv(reserver.REPORT.size)
        except BlockingIOError:
            return False
        except ConnectionError:
            report = b""
        if len(report) != reserver.REPORT.size:
            self._fail(_ending(self._end_child(kill=False)))
            return True
        length, number = reserver.REPORT.unpack(report)
        if number:
            self._fail(os.strerror(number))
            return True
        self._done += length
        self.reserved_bytes += length
        whole = self._done == self.shape.chunk_bytes(len(self.chunks))
        if whole:
            self.chunks.append(self._chunk)
            self._chunk, self._done = -1, 0
            self.frames = self.shape.frames_below(len(self.chunks))
            if self.frames == self.shape.frames:
                self.finished = True
                self._end_child(kill=True)
                return True
        self._order()
        return whole or self.finished

    def close(self) -> None:
        """Ends the child and closes all descriptors, in bounded time. Clients keep what they have mapped."""
        self.finished = True
        self._end_child(kill=True)
        for fd in (*self.chunks, self._chunk):
            if fd >= 0:
                os.close(fd)
        self.chunks, self._chunk, self.frames = [], -1, 0

    def _order(self) -> None:
        """Have the child take the next step, if there is room for it."""
        length = min(self._step_bytes, self.shape.chunk_bytes(len(self.chunks)) - self._done)
        if self._headroom is not None and self._headroom() < length + self._margin_bytes:
            self._fail("not enough memory is left")
            return
        order = reserver.ORDER.pack(self._done, length)
        try:
            if self._chunk < 0:
                self._chunk = sealed_memfd(
                    f"kvtier-{len(self.chunks)}", self.shape.chunk_bytes(len(self.chunks))
                )
                socket.send_fds(self._socket, [order], [self._chunk])
            else:
                self._socket.send(order)
        except ConnectionError:
            return  # the child has ended: the next step() reads that
        except OSError as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        needed, left = self.shape.pool_bytes, self._headroom() if self._headroom is not None else None
        available = "" if left is None else f", available now {format_size(left)}"
        self.error = (
            f"reserving the pool stopped: {why}. Needed {format_size(needed)}, reserved "
            f"{format_size(len(self.chunks) * self.shape.chunk_frames * self.shape.page_bytes)}{available}. The pool "
            f"goes on with {self.frames} of {self.shape.frames} pages. Raise the memory limit of this container or "
            "cgroup, or give a smaller --size"
        )
        self.finished = True
        self._end_child(kill=True)
        if self._chunk >= 0:
            os.close(self._chunk)  # gives back what was reserved of it
        self.reserved_bytes -= self._done
        self._chunk, self._done = -1, 0

    def _end_child(self, *, kill: bool) -> int | None:
        """Closes the socket and reaps the child; its wait status, None when there was none or it would not end."""
        self._socket.close()
        pid, self._pid = self._pid, 0
        if not pid:
            return None
        if kill:
            os.kill(pid, signal.SIGKILL)
        pidfd = os.pidfd_open(pid)
        try:
            # Its socket is closed, or it was killed: both end it in a moment, unless the kernel is stuck.
            if not select.select([pidfd], [], [], _CHILD_END_S)[0]:
                return None
        finally:
            os.close(pidfd)
        return os.waitpid(pid, 0)[1]


_CHILD_END_S = 2.0


def _start_reserver(fd: int) -> int:
    """Starts the reserving child with `fd` as its descriptor 3; its process id. A program of its own: small, and
    without this process's threads, locks and memory."""
    program = [sys.executable, "-I", "-S", str(Path(reserver.__file__)), str(os.getpid())]
    actions = [(os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0), (os.POSIX_SPAWN_DUP2, fd, 3)]
    return os.posix_spawn(sys.executable, program, os.environ, file_actions=actions)


def _ending(status: int | None) -> str:
    if status is not None and os.WIFSIGNALED(status):
        if os.WTERMSIG(status) == signal.SIGKILL:
            return "the kernel killed the reserving process, as it does when a memory limit is reached"
        return f"the reserving process died of {signal.Signals(os.WTERMSIG(status)).name}"
    return "the reserving process ended early"


class PoolView:
    """A client's mapping of the pool: grows as chunks are announced; one owner thread.

    Mappings are MADV_DONTFORK and MADV_DONTDUMP (R21): in a forked child every call is a UsageError. A mapping
    lives as long as any array made from it, also after `close()`; the memory goes with the last of them.

    `frames`: mapped so far, frames below this number can be used. `chunks`: how many chunks that is.
    """

    def __init__(self, shape: PoolShape, *, writable: bool = True) -> None:
        self.shape = shape
        self.writable = writable
        self.frames = 0
        self.chunks = 0
        self._pid = os.getpid()
        self._closed = False
        # [chunk][shard] -> uint8[frames, bytes], as mapped and as given out to readers.
        self._arrays: list[list[Bytes]] = []
        self._readers: list[list[Bytes]] = []

    def add(self, fds: Sequence[int]) -> None:
        """Map the next chunks, all or none; the descriptors are closed, also on error (R28).

        ProtocolError when one is not such a chunk (size, seals), there are too many, or the kernel refuses to map.
        """
        self._check_usable()
        mapped = []
        try:
            for chunk, fd in enumerate(fds, self.chunks):
                mapped.append(self._map(chunk, fd))
        finally:
            for fd in fds:
                os.close(fd)
        for arrays in mapped:
            self._arrays.append(arrays)
            self._readers.append([_read_only(array) for array in arrays])
        self.chunks = len(self._arrays)
        self.frames = self.shape.frames_below(self.chunks)

    def page(self, frame: int, shard: int = 0, *, write: bool = False) -> Bytes:
        """uint8[bytes of that shard] of one frame, no copy; read-only unless `write`.

        UsageError when the frame is not mapped (yet), the shard does not exist, or the view is closed or read-only.
        """
        if not 0 <= frame < self.frames or os.getpid() != self._pid:
            self._check_usable()
            raise UsageError(f"frame {frame}: expected 0 to {self.frames - 1}, what is mapped so far")
        chunk, within = divmod(frame, self.shape.chunk_frames)
        array: Bytes = self.shard(chunk, shard, write=write)[within]
        return array

    def shard(self, chunk: int, shard: int, *, write: bool = False) -> Bytes:
        """uint8[frames of the chunk, bytes of that shard]: one contiguous run. Errors as `page`."""
        if self._closed or os.getpid() != self._pid or (write and not self.writable):
            self._check_usable()
            raise UsageError("this view of the pool is read-only")
        if chunk < 0 or shard < 0:
            raise UsageError(f"chunk {chunk}, shard {shard}: expected zero or more")
        try:
            return (self._arrays if write else self._readers)[chunk][shard]
        except IndexError:
            raise UsageError(
                f"chunk {chunk}, shard {shard}: expected below {self.chunks} and {len(self.shape.shard_bytes)}"
            ) from None

    def populate(self, chunk: int, shard: int | None = None) -> bool:
        """Fault a chunk's pages (of one shard, or all) into this process's page table now, not at the first copy.

        Blocks, with the GIL free: call it from a thread that may wait. False where the kernel cannot (before 5.14).
        """
        shards = range(len(self.shape.shard_bytes)) if shard is None else (shard,)
        return all([populate(self.shard(chunk, number), write=self.writable) for number in shards])

    def close(self) -> None:
        """No new arrays; unmaps what no array uses any more. Idempotent; in a forked child it does nothing."""
        if os.getpid() == self._pid:
            self._closed = True
            self._arrays, self._readers, self.frames, self.chunks = [], [], 0, 0

    def _map(self, chunk: int, fd: int) -> list[Bytes]:
        if chunk >= self.shape.chunks:
            raise ProtocolError(f"chunk {chunk}: the pool has {self.shape.chunks}")
        try:
            size, seals = os.fstat(fd).st_size, fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if size != self.shape.chunk_bytes(chunk) or seals & SIZE_SEALS != SIZE_SEALS:
                raise ProtocolError(
                    f"chunk {chunk} has {size} bytes, seals {seals:#x}: expected "
                    f"{self.shape.chunk_bytes(chunk)}, {SIZE_SEALS:#x}"
                )
            memory = map_shared(fd, size, writable=self.writable)
        except OSError as error:
            raise ProtocolError(f"chunk {chunk}: {error}") from error
        frames, at, arrays = self.shape.frames_of(chunk), 0, []
        for shard_bytes in self.shape.shard_bytes:
            arrays.append(memory[at : at + frames * shard_bytes].reshape(frames, shard_bytes))
            at += frames * shard_bytes
        return arrays

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(
                "this view of the pool belongs to the parent process: a forked child has no mapping (R21)"
            )
        if self._closed:
            raise UsageError("this view of the pool is closed")


def _read_only(array: Bytes) -> Bytes:
    view = array.view()
    view.flags.writeable = False
    return view
