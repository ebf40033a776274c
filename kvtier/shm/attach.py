"""Attaching, from the client's side: `connect` and what it gives (R19, R21, R24, R28).

The connection stays open: its end tells that the server has gone (R24), and tells the server that the client
may have (which proves nothing, R20). Imports the standard library, `shm` and the ground floor; hands on what
the server's side (`listener`) and the messages (`handover`) give to other rooms.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
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
    answer,
    bytes_of,
    close_all,
    integer,
    integers,
    peer,
    readable,
    receive,
    send,
)
from kvtier.shm.listener import Connection, Listener
from kvtier.shm.region import PoolView
from kvtier.shm.tables import TableView

__all__ = [
    "VERSION",
    "AttachRequest",
    "Attachment",
    "ChunksRequest",
    "Connection",
    "Greeting",
    "Listener",
    "Refusal",
    "connect",
]


@dataclass(frozen=True)
class Refusal:
    """Why there is no attachment: AWAY (nobody there, or no answer in time), or the server's status and text.

    `geometry`: the pool's, when it is another one than asked for (for a GeometryError).
    """

    status: Status
    text: str
    geometry: tuple[int, ...] | None = None


class Attachment:
    """One attach of this process, as planner or as mover: what `connect` returns. One owner thread at a time.

    In a forked child it is inert (R21): `closed()` is True, nothing is sent and nothing closed.

    `pool` and `tables`: the mapped memory, growing by `poll_chunks()`. `complete`: was the group complete
    with this attach? `why`: why the connection ended, "" while it has not.
    """

    def __init__(
        self, sock: socket.socket, lock_fd: int, pool: PoolView, tables: TableView, message: dict[str, Any]
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._lock_fd = lock_fd
        self._pid = os.getpid()
        self.pool = pool
        self.tables = tables
        self.sid: int = message["sid"]
        self.pool_id: bytes = message["pool_id"]
        self.server_gen: int = message["server_gen"]
        self.complete: bool = message["complete"]
        self.why = ""
        self._ask()

    def fileno(self) -> int:
        """Readable when chunks, or the end, have come; -1 when closed."""
        return self._socket.fileno()

    def poll_chunks(self) -> int:
        """Map what has been announced, and tell the server so (R28). Never blocks. Returns the new frames."""
        before = self.pool.frames
        try:
            while not self.closed():
                received = receive(self._socket, MAX_FDS)
                if received is None:
                    break
                self._take(*received)
                self._ask()
        except (ProtocolError, Ended) as error:
            self.why = str(error)
        return self.pool.frames - before

    def wait_chunks(self, frames: int, timeout_s: float) -> bool:
        """Until `frames` are mapped; False when time ran out, or the connection ended before."""
        deadline = time.monotonic() + timeout_s
        while self.pool.frames < frames and not self.closed():
            if not readable(self._socket, deadline):
                break
            self.poll_chunks()
        return self.pool.frames >= frames

    def closed(self) -> bool:
        """Has the server gone, or sent what is no message (R24; `why`)? Never blocks."""
        if self._pid != os.getpid() or self._socket.fileno() < 0:
            return True
        if not self.why:
            try:
                if not self._socket.recv(1, socket.MSG_PEEK):
                    self.why = "the server closed the connection"
            except BlockingIOError:
                pass
            except OSError as error:
                self.why = str(error)
        return bool(self.why)

    def close(self) -> None:
        """Ends the connection, then lets go of the mappings (which live as long as arrays of them do) and the
        lock.

        Only when no copy runs any more: the lock's end is half of the proof of death. Never unlocks, only
        closes (R20). Idempotent.
        """
        if self._pid != os.getpid() or self._socket.fileno() < 0:
            return
        self.why = self.why or "closed"
        self._socket.close()
        self.pool.close()
        os.close(self._lock_fd)

    def _ask(self) -> None:
        try:
            send(self._socket, {"kind": "chunks", "start": self.pool.chunks}, [])
        except OSError as error:
            self.why = str(error)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        if (
            message.get("kind") != "chunks"
            or message.get("start") != self.pool.chunks
            or message.get("count") != len(fds)
        ):
            close_all(fds)
            raise ProtocolError(
                f"expected chunks from {self.pool.chunks} on, got {message} with {len(fds)} descriptors"
            )
        self.pool.add(fds)


def connect(
    run_dir: Path | str, request: AttachRequest, *, timeout_s: float, writable: bool | None = None
) -> Attachment | Refusal:
    """Attach to the sidecar of `run_dir`. Waits at most `timeout_s` in all; chunks come later
    (`poll_chunks`).

    `writable`: map the pool for writing; by default a mover does and a planner does not. ConfigError when the
    run directory is unsafe or its path too long (an operator's mistake); whatever else goes wrong is a
    Refusal. Any thread may call this and hand the attachment over to its owner.
    """
    deadline = time.monotonic() + timeout_s
    try:
        path = rundir.check_run_dir(run_dir) / rundir.ATTACH_SOCKET
    except FileNotFoundError:
        return Refusal(Status.AWAY, f"no sidecar: there is no run directory {run_dir}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(timeout_s)
        sock.connect(str(path))
        if peer(sock)[1] != os.geteuid():
            raise ProtocolError(f"the server at {path} runs as another user, uid {peer(sock)[1]}")
        _greeting(*answer(sock, deadline))
        pidfd = os.pidfd_open(os.getpid())
        try:
            send(sock, {"kind": "attach", **asdict(request)}, [pidfd])
        finally:
            os.close(pidfd)
        message, fds = answer(sock, deadline)
        result = _attachment(sock, message, fds, request.role == "mover" if writable is None else writable)
    except (Ended, OSError) as error:
        # TimeoutError too, and ENOENT, ECONNREFUSED, EAGAIN of a full backlog.
        sock.close()
        return Refusal(Status.AWAY, f"no sidecar answers at {path}: {error}")
    except ProtocolError as error:
        sock.close()
        return Refusal(Status.BAD, f"the sidecar at {path} answers what is no answer: {error}")
    if isinstance(result, Refusal):
        sock.close()
    return result


def _greeting(message: dict[str, Any], fds: list[int]) -> Greeting:
    close_all(fds)
    if message.get("kind") != "greeting" or fds:
        raise ProtocolError(f"expected a greeting, got {message.get('kind')!r}")
    return Greeting(bytes_of(message, "pool_id", (0, 16)), integer(message, "server_gen", 0, 2**63))


def _attachment(
    sock: socket.socket, message: dict[str, Any], fds: list[int], writable: bool
) -> Attachment | Refusal:
    if message.get("kind") == "refused":
        close_all(fds)
        geometry = message.get("geometry")
        try:
            status = Status(message["status"])
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"refused with status {error}") from error
        return Refusal(status, str(message.get("text")), integers(message, "geometry") if geometry else None)
    try:
        if message.get("kind") != "attached" or len(fds) != 2:
            raise ProtocolError(f"expected attached, got {message.get('kind')!r} with {len(fds)} descriptors")
        integer(message, "sid", 0, 2**64 - 1)
        integer(message, "server_gen", 0, 2**63)
        bytes_of(message, "pool_id", (16,))
        if not isinstance(message.get("complete"), bool):
            raise ProtocolError("complete: expected true or false")
        tables = TableView(fds.pop())
        if tables.pool_id != message["pool_id"]:
            raise ProtocolError("the tables are of another pool")
        return Attachment(sock, fds.pop(), PoolView(tables.shape, writable=writable), tables, message)
    finally:
        close_all(fds)
