"""The attach socket on the server's side: one listener, and a connection for each client (R19, R24, R28).

No policy here: the server decides what is answered. Imports the standard library, `shm` and the ground floor.
Always true: nothing blocks, and whatever comes in, the worst is a closed connection.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.errors import ProtocolError, Status
from kvtier.shm import rundir
from kvtier.shm.handover import (
    MAX_FDS,
    VERSION,
    AttachRequest,
    ChunksRequest,
    Ended,
    Greeting,
    attach_request,
    close_all,
    integer,
    peer,
    receive,
    send,
)
from kvtier.shm.liveness import has_ended, is_pidfd
from kvtier.shm.region import PoolShape

_log = logging.getLogger(__name__)


class Connection:
    """One client's connection on the server's side. Never blocks; belongs to the server's loop.

    `pid`: the peer's, as the kernel tells it (0 from another PID namespace). `pidfd`: the client's, from its
    attach request, -1 before; it belongs to this object until `take_pidfd()`. `wanted`: the first chunk that
    the client waits for, None when it has not asked. `closed`: the peer has gone, or broke the protocol
    (`why`): close it. `since`: when it connected (CLOCK_MONOTONIC, seconds). `tag`: free for the server, its
    session.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.pid = peer(sock)[0]
        self.pidfd = -1
        self.wanted: int | None = None
        self.closed = False
        self.why = ""
        self.since = time.monotonic()
        self.tag: Any = None
        self._asked = False  # an attach request came
        self._shape: PoolShape | None = None  # it was granted

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> list[AttachRequest | ChunksRequest]:
        """What has come in. Sets `closed` at the end, and on whatever is no right message at this point."""
        requests: list[AttachRequest | ChunksRequest] = []
        try:
            while not self.closed:
                received = receive(self._socket, 1)
                if received is None:
                    break
                requests.append(self._request(*received))
        except Ended as error:
            self._end(str(error))
        except ProtocolError as error:
            _log.warning("attach socket, process %d: %s", self.pid, error)
            self._end(str(error))
        return requests

    def attached(
        self,
        sid: int,
        pool_id: bytes,
        server_gen: int,
        shape: PoolShape,
        lock_fd: int,
        table_fd: int,
        complete: bool,
    ) -> None:
        """Grant the attach. The descriptors stay the caller's, who closes `lock_fd` now (R19).

        `complete`: are all of the group attached with this one?
        """
        self._shape = shape
        self._send(
            {
                "kind": "attached",
                "sid": sid,
                "pool_id": pool_id,
                "server_gen": server_gen,
                "complete": complete,
            },
            [lock_fd, table_fd],
        )

    def refused(self, status: Status, text: str, geometry: tuple[int, ...] | None = None) -> None:
        """Refuse the attach; the client goes away. `geometry`: the pool's, when it is another one (R30)."""
        self._send({"kind": "refused", "status": int(status), "text": text, "geometry": geometry}, [])

    def send_chunks(self, fds: list[int]) -> int:
        """Hand out what the client waits for. `fds`: those of all reserved chunks (`Pool.chunks`).

        At most 64, in one message for each request. Returns how many; 0 when nothing is due.
        """
        if self.wanted is None or self.closed:
            return 0
        due = fds[self.wanted : self.wanted + MAX_FDS]
        if due:
            self._send({"kind": "chunks", "start": self.wanted, "count": len(due)}, due)
            self.wanted = None
        return len(due)

    def greet(self, greeting: Greeting) -> None:
        self._send({"kind": "greeting", "v": VERSION, **asdict(greeting)}, [])

    def take_pidfd(self) -> int:
        """The pidfd becomes the caller's."""
        pidfd, self.pidfd = self.pidfd, -1
        return pidfd

    def close(self) -> None:
        """Idempotent."""
        self._end("closed by the server")
        self._socket.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _request(self, message: dict[str, Any], fds: list[int]) -> AttachRequest | ChunksRequest:
        kind = message.pop("kind", None)
        try:
            if kind == "attach" and not self._asked:
                request = attach_request(message)
                if len(fds) != 1 or not is_pidfd(fds[0]) or has_ended(fds[0]):
                    raise ProtocolError("attach: expected the pidfd of a living process")
                self._asked = True
                self.pidfd = fds.pop()
                return request
            if kind == "chunks" and self._shape is not None and self.wanted is None and not fds:
                self.wanted = integer(message, "start", 0, self._shape.chunks)
                return ChunksRequest(self.wanted)
        finally:
            close_all(fds)
        raise ProtocolError(f"{kind!r} with {len(fds)} descriptors is no message that may come now")

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        if self.closed:
            return
        try:
            send(self._socket, message, fds)
        except OSError as error:
            # Gone, or a client that does not read: it gets no more than its socket's buffer holds.
            self._end(f"cannot send: {error}")

    def _end(self, why: str) -> None:
        if not self.closed:
            self.closed, self.why = True, why


class Listener:
    """The attach socket itself (0600). Only for who holds the owner lock (R25): an old socket's file is
    replaced.

    `greeting`: told to each new connection; the server changes it when a pool is made. `starved`: the last
    `accept` found no descriptor left for those who wait; the socket stays readable, so look away for a while.
    """

    def __init__(self, run_dir: Path | str, greeting: Greeting) -> None:
        """ConfigError when the run directory is unsafe."""
        self.greeting = greeting
        self.starved = False
        self._path = str(rundir.check_run_dir(run_dir) / rundir.ATTACH_SOCKET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._socket.bind(self._path)
            # Nobody else can come between these lines: the directory is closed to others.
            os.chmod(self._path, 0o600)
            self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self, room: int = 512) -> list[Connection]:
        """Those who wait, greeted. Other users, and all beyond `room` connections, are closed at once."""
        connections: list[Connection] = []
        self.starved = False
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return connections
            except ConnectionError:
                continue  # it went away while it waited
            except OSError as error:
                # No descriptors left: those who wait stay in the backlog, the server lives.
                self.starved = True
                _log.warning("attach socket: %s; newcomers wait (raise ulimit -n)", error)
                return connections
            if peer(sock)[1] != os.geteuid() or len(connections) >= room:
                sock.close()
                continue
            connection = Connection(sock)
            connection.greet(self.greeting)
            connections.append(connection)

    def close(self) -> None:
        """Closes the socket and removes its file; connections stay as they are. Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
