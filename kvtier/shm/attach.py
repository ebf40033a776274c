"""The attach socket: who may map the pool, and how its descriptors change hands (R19, R24, R28).

A Unix SOCK_SEQPACKET socket in the run directory. A message is one msgpack map and at most 64 descriptors:

    server -> client   greeting   on connect: pool id (b"" before the first attach), server_gen       (R24)
    client -> server   attach     group, role, rank, ranks, geometry ..., and the client's pidfd
    server -> client   attached   sid, pool id; with two descriptors: session lock, tables (read-only)
                       refused    status, text; for another geometry the pool's
    client -> server   chunks     start: it has mapped all before `start`, and waits for more         (R28)
    server -> client   chunks     start, count, and that many descriptors; now, or once they are reserved

The connection stays open: its end tells either side that the other has gone (R24), but proves nothing (R20).
No policy here: the server decides what is answered. Imports msgpack, the standard library, `shm` and the
ground floor. Always true: whatever comes in, the worst is a closed connection; no received descriptor leaks.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack

from kvtier.errors import ConfigError, ProtocolError, Status, UsageError
from kvtier.shm import rundir
from kvtier.shm.liveness import has_ended, is_pidfd
from kvtier.shm.region import PoolShape, PoolView
from kvtier.shm.tables import TableView

VERSION = 1
MAX_FDS = 64
"""Descriptors in one message (R28); the kernel's own limit is 253."""
MAX_BYTES = 64 * 1024
"""Bytes of one message."""
MAX_SHARDS = 256

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Greeting:
    """What a client is told on connecting. `pool_id` is b"" while there is no pool."""

    pool_id: bytes
    server_gen: int


@dataclass(frozen=True)
class AttachRequest:
    """Who wants to attach, and with what; checked for types and ranges only.

    `role`: "planner" or "mover"; `rank` of `ranks` movers (0 for a planner). `geometry`, `fingerprint` (32 bytes)
    and `format`: of the `KVLayout`. `boot_id`: of the client's machine. `numa_node`: of its GPU, -1 unknown.
    `versions`: lowest and highest version of this protocol that the client speaks.
    """

    group: str
    role: str
    rank: int
    ranks: int
    geometry: tuple[int, ...]
    fingerprint: bytes
    format: str = ""
    boot_id: str = ""
    numa_node: int = -1
    versions: tuple[int, int] = (VERSION, VERSION)


@dataclass(frozen=True)
class ChunksRequest:
    """The client has mapped all chunks before `start`, and waits for more.

    Its `mapped` mark is `shape.frames_below(start)` (R28).
    """

    start: int


# --- the server's side ------------------------------------------------------------------------------


class Connection:
    """One client's connection on the server's side. Never blocks; belongs to the server's loop.

    `pid`: the peer's, as the kernel tells it (0 from another PID namespace). `pidfd`: the client's, from its attach
    request, -1 before; it belongs to this object until `take_pidfd()`. `wanted`: the first chunk that the client
    waits for, None when it has not asked. `closed`: the peer has gone, or broke the protocol (`why`): close it.
    `since`: when it connected (CLOCK_MONOTONIC, seconds). `tag`: free for the server, its session.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self.pid = _peer(sock)[0]
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
                received = _receive(self._socket, 1)
                if received is None:
                    break
                requests.append(self._request(*received))
        except _Ended as error:
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
                request = _attach_request(message)
                if len(fds) != 1 or not is_pidfd(fds[0]) or has_ended(fds[0]):
                    raise ProtocolError("attach: expected the pidfd of a living process")
                self._asked = True
                self.pidfd = fds.pop()
                return request
            if kind == "chunks" and self._shape is not None and self.wanted is None and not fds:
                self.wanted = _integer(message, "start", 0, self._shape.chunks)
                return ChunksRequest(self.wanted)
        finally:
            _close_all(fds)
        raise ProtocolError(f"{kind!r} with {len(fds)} descriptors is no message that may come now")

    def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        if self.closed:
            return
        try:
            _send(self._socket, message, fds)
        except OSError as error:
            # Gone, or a client that does not read: it gets no more than its socket's buffer holds.
            self._end(f"cannot send: {error}")

    def _end(self, why: str) -> None:
        if not self.closed:
            self.closed, self.why = True, why


class Listener:
    """The attach socket itself (0600). Only for who holds the owner lock (R25): an old socket's file is replaced.

    `greeting`: told to each new connection; the server changes it when a pool is made.
    """

    def __init__(self, run_dir: Path | str, greeting: Greeting) -> None:
        """ConfigError when the run directory is unsafe."""
        self.greeting = greeting
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
        while True:
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:
                return connections
            except ConnectionError:
                continue  # it went away while it waited
            except OSError as error:
                # No descriptors left: those who wait stay in the backlog, the server lives.
                _log.warning("attach socket: %s", error)
                return connections
            if _peer(sock)[1] != os.geteuid() or len(connections) >= room:
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


# --- the client's side ------------------------------------------------------------------------------


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

    `pool` and `tables`: the mapped memory, growing by `poll_chunks()`. `complete`: was the group complete with
    this attach? `why`: why the connection ended, "" while it has not.
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
                received = _receive(self._socket, MAX_FDS)
                if received is None:
                    break
                self._take(*received)
                self._ask()
        except (ProtocolError, _Ended) as error:
            self.why = str(error)
        return self.pool.frames - before

    def wait_chunks(self, frames: int, timeout_s: float) -> bool:
        """Until `frames` are mapped; False when time ran out, or the connection ended before."""
        deadline = time.monotonic() + timeout_s
        while self.pool.frames < frames and not self.closed():
            if not _readable(self._socket, deadline):
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
        """Ends the connection, then lets go of the mappings (which live as long as arrays of them do) and the lock.

        Only when no copy runs any more: the lock's end is half of the proof of death. Never unlocks, only closes (R20).
        Idempotent.
        """
        if self._pid != os.getpid() or self._socket.fileno() < 0:
            return
        self.why = self.why or "closed"
        self._socket.close()
        self.pool.close()
        os.close(self._lock_fd)

    def _ask(self) -> None:
        try:
            _send(self._socket, {"kind": "chunks", "start": self.pool.chunks}, [])
        except OSError as error:
            self.why = str(error)

    def _take(self, message: dict[str, Any], fds: list[int]) -> None:
        if (
            message.get("kind") != "chunks"
            or message.get("start") != self.pool.chunks
            or message.get("count") != len(fds)
        ):
            _close_all(fds)
            raise ProtocolError(
                f"expected chunks from {self.pool.chunks} on, got {message} with {len(fds)} descriptors"
            )
        self.pool.add(fds)


def connect(
    run_dir: Path | str, request: AttachRequest, *, timeout_s: float, writable: bool | None = None
) -> Attachment | Refusal:
    """Attach to the sidecar of `run_dir`. Waits at most `timeout_s` in all; chunks come later (`poll_chunks`).

    `writable`: map the pool for writing; by default a mover does and a planner does not. ConfigError when the run
    directory is unsafe or its path too long (an operator's mistake); whatever else goes wrong is a Refusal. Any
    thread may call this and hand the attachment over to its owner.
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
        if _peer(sock)[1] != os.geteuid():
            raise ProtocolError(f"the server at {path} runs as another user, uid {_peer(sock)[1]}")
        _greeting(*_answer(sock, deadline))
        pidfd = os.pidfd_open(os.getpid())
        try:
            _send(sock, {"kind": "attach", **asdict(request)}, [pidfd])
        finally:
            os.close(pidfd)
        message, fds = _answer(sock, deadline)
        result = _attachment(sock, message, fds, request.role == "mover" if writable is None else writable)
    except (_Ended, OSError) as error:
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
    _close_all(fds)
    if message.get("kind") != "greeting" or fds:
        raise ProtocolError(f"expected a greeting, got {message.get('kind')!r}")
    return Greeting(_bytes(message, "pool_id", (0, 16)), _integer(message, "server_gen", 0, 2**63))


def _attachment(
    sock: socket.socket, message: dict[str, Any], fds: list[int], writable: bool
) -> Attachment | Refusal:
    if message.get("kind") == "refused":
        _close_all(fds)
        geometry = message.get("geometry")
        try:
            status = Status(message["status"])
        except (KeyError, ValueError) as error:
            raise ProtocolError(f"refused with status {error}") from error
        return Refusal(status, str(message.get("text")), _integers(message, "geometry") if geometry else None)
    try:
        if message.get("kind") != "attached" or len(fds) != 2:
            raise ProtocolError(f"expected attached, got {message.get('kind')!r} with {len(fds)} descriptors")
        _integer(message, "sid", 0, 2**64 - 1)
        _integer(message, "server_gen", 0, 2**63)
        _bytes(message, "pool_id", (16,))
        if not isinstance(message.get("complete"), bool):
            raise ProtocolError("complete: expected true or false")
        tables = TableView(fds.pop())
        if tables.pool_id != message["pool_id"]:
            raise ProtocolError("the tables are of another pool")
        return Attachment(sock, fds.pop(), PoolView(tables.shape, writable=writable), tables, message)
    finally:
        _close_all(fds)


# --- messages ---------------------------------------------------------------------------------------


class _Ended(Exception):
    """The other side has gone."""


def _send(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    if len(fds) > MAX_FDS:
        raise UsageError(f"{len(fds)} descriptors in one message: expected at most {MAX_FDS}")
    data = msgpack.packb(message)
    if len(data) > MAX_BYTES:
        raise UsageError(f"a message of {len(data)} bytes: expected at most {MAX_BYTES}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def _receive(sock: socket.socket, max_fds: int) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its descriptors, which are the caller's; None when there is none (yet).

    _Ended at the end; ProtocolError for what is no message, or one whose descriptors did not all arrive (R28).
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(max_fds * 4), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None
    except ConnectionError as error:
        raise _Ended(str(error)) from error
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) // 4 * 4])
    received = fds.tolist()
    try:
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                f"descriptors were lost: {len(received)} of them arrived, at most {max_fds} are expected here; "
                "or this process has too many open files (ulimit -n)"
            )
        if len(received) > max_fds:
            raise ProtocolError(f"{len(received)} descriptors: expected at most {max_fds}")
        if flags & socket.MSG_TRUNC:
            raise ProtocolError(f"a message of more than {MAX_BYTES} bytes")
        if not data:
            raise _Ended("the other side closed the connection")
        message = _unpacked(data)
    except BaseException:
        _close_all(received)
        raise
    return message, received


def _unpacked(data: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_map_len=64, max_array_len=MAX_SHARDS + 1
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"no msgpack message: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise ProtocolError("a message is a map with names as keys")
    return message


def _answer(sock: socket.socket, deadline: float) -> tuple[dict[str, Any], list[int]]:
    """The next message of a blocking socket, before the deadline; OSError (timeout) after it."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    received = _receive(sock, MAX_FDS)
    if received is None:
        raise TimeoutError("no answer in time")
    return received


def _readable(sock: socket.socket, deadline: float) -> bool:
    import select

    return bool(select.select([sock], [], [], max(0.0, deadline - time.monotonic()))[0])


def _attach_request(message: dict[str, Any]) -> AttachRequest:
    versions = _integers(message, "versions")
    if len(versions) != 2:
        raise ProtocolError("versions: expected the lowest and the highest")
    ranks = _integer(message, "ranks", 1, MAX_SHARDS)
    return AttachRequest(
        group=_text(message, "group", 256),
        role=_text(message, "role", 16),
        rank=_integer(message, "rank", 0, ranks - 1),
        ranks=ranks,
        geometry=_integers(message, "geometry"),
        fingerprint=_bytes(message, "fingerprint", (32,)),
        format=_text(message, "format", 4096),
        boot_id=_text(message, "boot_id", 64),
        numa_node=_integer(message, "numa_node", -1, 4096),
        versions=(versions[0], versions[1]),
    )


def _integer(message: dict[str, Any], name: str, low: int, high: int) -> int:
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r}: expected an integer of {low} to {high}")
    return value


def _integers(message: dict[str, Any], name: str) -> tuple[int, ...]:
    value = message.get(name)
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in value
    ):
        raise ProtocolError(f"{name}={value!r}: expected integers, zero or more")
    return tuple(value)


def _text(message: dict[str, Any], name: str, longest: int) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise ProtocolError(f"{name}={value!r}: expected text of at most {longest} characters")
    return value


def _bytes(message: dict[str, Any], name: str, lengths: tuple[int, ...]) -> bytes:
    value = message.get(name)
    if not isinstance(value, bytes) or len(value) not in lengths:
        raise ProtocolError(f"{name}={value!r}: expected bytes of length {' or '.join(map(str, lengths))}")
    return value


def _peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side, as the kernel tells them."""
    credentials = struct.Struct("@iII")
    pid, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return pid, uid


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
