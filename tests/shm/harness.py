"""What the tests of `shm` share: small pools, a loop for the attach socket, processes that can be killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.errors import Status
from kvtier.shm.attach import AttachRequest, ChunksRequest, Connection, Greeting, Listener
from kvtier.shm.liveness import OwnerLock, SessionLocks
from kvtier.shm.mapping import sealed_memfd
from kvtier.shm.shape import PoolShape
from kvtier.shm.tables import Tables

SMALL = PoolShape((64, 4096, 8192), frames=10, chunk_frames=4)
"""Ten pages in two shards; three chunks of 4, 4 and 2 frames."""


def request(shape: PoolShape = SMALL, role: str = "mover", group: str = "engine") -> AttachRequest:
    return AttachRequest(group, role, 0, 1, shape.geometry, bytes(32))


def chunk_fds(shape: PoolShape, first: int = 0, count: int | None = None) -> list[int]:
    """Descriptors of fresh chunks; the caller's."""
    last = shape.chunks if count is None else first + count
    return [sealed_memfd(f"test-{number}", shape.chunk_bytes(number)) for number in range(first, last)]


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """A child process that runs `body` and ends with 0, or with 1 after an exception. Yields its process id.

    At the end it is killed and waited for, where the test has not done so.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """Wait for a child; its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class MiniServer:
    """The attach side of a server in a thread: one pool, whose chunks the test announces by `announce(n)`."""

    def __init__(self, run_dir: Path, shape: PoolShape = SMALL) -> None:
        self.shape = shape
        self.owner = OwnerLock(run_dir)
        self.locks = SessionLocks(run_dir)
        self.tables = Tables(shape, leases=16, sessions=4, namespaces=4)
        self.listener = Listener(run_dir, Greeting(self.tables.pool_id, 3))
        self.chunks = chunk_fds(shape)
        self.announced = 0
        self.connections: list[Connection] = []
        self.mapped: list[int] = []
        """`start` of each chunk request, in order."""
        self.sent: list[int] = []
        """Descriptors in each message of chunks."""
        self.pidfds: dict[int, int] = {}
        self.refusal: tuple[Status, str, tuple[int, ...] | None] | None = None
        self.deaf = False
        """Accept and greet, but answer nothing."""
        self._sid = 100
        self._wake, self._woken = socket.socketpair()
        self._stop = False
        self._work: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Have the loop's thread do it; returns when it is done."""
        done = threading.Event()
        self._work += [work, done.set]
        self._wake.send(b"x")
        assert done.wait(10)

    def announce(self, chunks: int) -> None:
        def work() -> None:
            self.announced = chunks
            for connection in self.connections:
                self._send_chunks(connection)

        self.do(work)

    def stop(self) -> None:
        self._stop = True
        self._wake.send(b"x")
        self._thread.join(10)
        for connection in self.connections:
            connection.close()
        for fd in (*self.chunks, *self.pidfds.values()):
            os.close(fd)
        self.listener.close()
        self.tables.close()
        self.locks.close()
        self.owner.release()
        self._wake.close()
        self._woken.close()

    def _run(self) -> None:
        while not self._stop:
            ready = select.select([self.listener, self._woken, *self.connections], [], [], 10)[0]
            if self._woken in ready:
                self._woken.recv(100)
                while self._work:
                    self._work.pop(0)()
            if self.listener in ready:
                self.connections += self.listener.accept()
            for connection in [one for one in ready if isinstance(one, Connection)]:
                self._serve(connection)

    def _serve(self, connection: Connection) -> None:
        for message in connection.receive():
            if isinstance(message, ChunksRequest):
                self.mapped.append(message.start)
                self._send_chunks(connection)
            elif self.refusal is not None:
                connection.refused(*self.refusal)
            elif not self.deaf:
                self._sid += 1
                connection.tag = self._sid
                self.pidfds[self._sid] = connection.take_pidfd()
                lock = self.locks.grant(self._sid)
                connection.attached(
                    self._sid, self.tables.pool_id, 3, self.shape, lock, self.tables.read_fd, complete=True
                )
                os.close(lock)
        if connection.closed:
            self.connections.remove(connection)
            connection.close()

    def _send_chunks(self, connection: Connection) -> None:
        sent = connection.send_chunks(self.chunks[: self.announced])
        if sent:
            self.sent.append(sent)
