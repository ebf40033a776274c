"""The pool's memory: its reservation by the server (`Pool`), and its mapping by clients (`PoolView`).

A pool is a list of chunks, each one sealed memfd of whole frames (`PoolShape`). The server reserves them one
after the other in a child process and hands their descriptors out; it never maps them. A client maps a chunk
and closes its descriptor.

Imports numpy, the standard library, `shm` and the ground floor. Always true: a frame that is counted in
`frames` is reserved (fallocate) and touched, so that nobody meets SIGBUS; sizes never change (sealed).
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.config import MIB, format_size
from kvtier.errors import ProtocolError, UsageError
from kvtier.shm import reserver
from kvtier.shm.mapping import SIZE_SEALS, Bytes, map_shared, sealed_memfd
from kvtier.shm.shape import PoolShape

__all__ = ["Pool", "PoolShape", "PoolView"]

_CHILD_END_S = 2.0


class Pool:
    """The server's side: makes and reserves the chunks in a child process, step by step (R29).

    Never blocks and never maps a chunk. Poll `fileno()` for reading and call `step()` when it is readable:

        pool = Pool(shape, headroom=preflight.headroom)
        poller.register(pool.fileno(), POLLIN)
        ...
        if pool.step(): cache.grow(pool.frames); hand pool.chunks out
        if pool.finished: unregister; log pool.error if there is one

    `headroom()` tells how many more bytes this host and cgroup allow; it is asked before each step of
    `step_bytes`, and `margin_bytes` of it are left to others. After an error the pool stays at what was
    reserved. Belongs to one thread, the process's main one: the child dies with it (PDEATHSIG), however it
    ends.

    `frames`: usable so far, all of the reserved chunks. `chunks`: their descriptors, in order, which belong
    to this object. `reserved_bytes`: for progress, with those of the unfinished chunk. `finished`: nothing
    more will come. `error`: why not all came, with needed, available and remedy.
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
        """Take the child's report and order its next step. True when `frames` rose or it is finished."""
        if self.finished:
            return False
        try:
            report = self._socket.recv(reserver.REPORT.size)
        except BlockingIOError:
            return False
        except ConnectionError:
            report = b""
        if len(report) != reserver.REPORT.size:
            self._socket.close()
            self._fail(_ending(self._reap()))
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
                self._dismiss()
                self._reap()
                return True
        self._order()
        return whole or self.finished

    def close(self) -> None:
        """Ends the child and closes all descriptors, in bounded time. Clients keep what they have mapped."""
        self.finished = True
        self._dismiss()
        self._reap()
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
                number = len(self.chunks)
                self._chunk = sealed_memfd(f"kvtier-{number}", self.shape.chunk_bytes(number))
                socket.send_fds(self._socket, [order], [self._chunk])
            else:
                self._socket.send(order)
        except ConnectionError:
            return  # the child has ended: the next step() reads that
        except OSError as error:
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        available = "" if self._headroom is None else f", available {format_size(self._headroom())}"
        self.error = (
            f"reserving the pool stopped: {why}. Needed {format_size(self.shape.pool_bytes)}, reserved "
            f"{format_size(self.frames * self.shape.page_bytes)}{available}. The pool goes on with "
            f"{self.frames} of {self.shape.frames} pages; raise the memory limit of this container or "
            "host, or give a smaller --size"
        )
        self.finished = True
        if self._chunk >= 0:
            os.close(self._chunk)
        # The child has the last descriptor of the unfinished chunk and gives its memory back as it ends; that
        # may take a while, so close() reaps it, not the server's loop.
        self._dismiss()
        self.reserved_bytes -= self._done
        self._chunk, self._done = -1, 0

    def _dismiss(self) -> None:
        """Ends the child; does not wait for it."""
        self._socket.close()
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)

    def _reap(self) -> int | None:
        """The child's wait status, once it has ended; None when there is none, or it does not end in time."""
        if not self._pid:
            return None
        pidfd = os.pidfd_open(self._pid)
        try:
            # It was killed or has closed its socket: a moment, unless the kernel is stuck.
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not poller.poll(_CHILD_END_S * 1000):
                return None
        finally:
            os.close(pidfd)
        pid, self._pid = self._pid, 0
        return os.waitpid(pid, 0)[1]


def _start_reserver(fd: int) -> int:
    """Starts the reserving child with `fd` as its descriptor 3; its process id. A program of its own: small,
    and without this process's threads, locks and memory."""
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

    Mappings are MADV_DONTFORK and MADV_DONTDUMP (R21): in a forked child every call is a UsageError. A
    mapping lives as long as any array made from it, also after `close()`; the memory goes with the last of
    them.

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

        ProtocolError when one is not such a chunk (size, seals), there are too many, or the kernel refuses to
        map.
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

        UsageError when the frame is not mapped (yet), the shard does not exist, or the view is closed or
        read-only.
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
                f"chunk {chunk}, shard {shard}: expected below {self.chunks} and "
                f"{len(self.shape.shard_bytes)}"
            ) from None

    def close(self) -> None:
        """No new arrays; unmaps what no array uses any more. Idempotent; inert in a forked child."""
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
