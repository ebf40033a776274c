"""The attach socket: who may map the pool, and how its descriptors change hands (R19, R24, R28).

A Unix SOCK_SEQPACKET socket in the run directory. A message is one msgpack map and at most 64 descriptors:

    server -> client   greeting   on connect: pool id (b"" before the first attach), server_gen       (R24)
    client -> server   attach     group, role, rank, ranks, geometry ... and the client's pidfd
    server -> client   attached   sid, shape, pool id, and two descriptors: session lock, tables (read-only)
                       refused    status, text; for another geometry both values
    client -> server   chunks     from: it has mapped all before `from`, and waits for more          (R28)
    server -> client   chunks     first, count, and that many descriptors; now, or when they are reserved

The connection stays open; its end is how either side learns that the other is gone (R24), but proves nothing (R20).
No policy here: the server decides what is answered. Imports msgpack, the standard library, `shm` and the
ground floor. Always true: whatever bytes come in, nothing is raised but a closed connection; no received descriptor leaks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import Status
from kvtier.shm.region import PoolShape, PoolView
from kvtier.shm.tables import TableView

VERSION = 1
MAX_FDS = 64
"""Descriptors in one message; the kernel's own limit is 253."""


@dataclass(frozen=True)
class Greeting:
    """What a client is told on connecting. `pool_id` is b"" while there is no pool."""

    pool_id: bytes
    server_gen: int


@dataclass(frozen=True)
class AttachRequest:
    """Who wants to attach, and with what. Values are checked for type and range only."""

    group: str
    role: str
    """"planner" or "mover"."""
    rank: int
    ranks: int
    geometry: tuple[int, ...]
    fingerprint: bytes
    """`KVLayout.fingerprint`, 32 bytes."""
    format: str = ""
    """`KVLayout.format`, for people."""
    boot_id: str = ""
    numa_node: int = -1
    versions: tuple[int, int] = (VERSION, VERSION)


@dataclass(frozen=True)
class ChunksRequest:
    """The client has mapped the chunks before `start`; `mapped` = frames below it (set by the server's Connection)."""

    start: int


# --- the server's side ------------------------------------------------------------------------------


class Connection:
    """One client's connection on the server's side; never blocks. Owned by the server's loop.

    `pidfd`: the client's, from its attach request; -1 before. Belongs to this object until `take_pidfd()`.
    `pid`: the peer's process id as the kernel tells it (0 from another PID namespace). `closed`: it has ended; close it.
    `tag`: free for the server (its session).
    """

    pid: int
    pidfd: int
    closed: bool
    tag: object
    wanted: int | None
    """The first chunk that the client waits for; None when it has not asked."""

    def fileno(self) -> int:
        raise NotImplementedError

    def receive(self) -> list[AttachRequest | ChunksRequest]:
        """What has come in; sets `closed` at the end, and on anything that is not a right message (logged)."""
        raise NotImplementedError

    def attached(self, sid: int, pool_id: bytes, server_gen: int, shape: PoolShape, lock_fd: int, table_fd: int,
                 complete: bool = False) -> None:
        """Answer an attach. The descriptors stay the caller's: close `lock_fd` afterwards (R19)."""
        raise NotImplementedError

    def refused(self, status: Status, text: str, geometry: tuple[int, ...] | None = None) -> None:
        """Answer an attach with a refusal; `geometry`: the pool's, when it is another one (R30)."""
        raise NotImplementedError

    def send_chunks(self, fds: list[int]) -> int:
        """Hand out what the client waits for: `fds` are the descriptors of all reserved chunks (`Pool.chunks`).
        At most 64 a message, one message for each request. Returns how many were sent, 0 when nothing is due."""
        raise NotImplementedError

    def take_pidfd(self) -> int:
        """The pidfd becomes the caller's."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Listener:
    """The attach socket itself (0600). Bind only while holding the owner lock (R25): an old socket file is replaced."""

    greeting: Greeting
    """Told to each new connection; the server changes it when a pool is made."""

    def __init__(self, run_dir: Path | str, greeting: Greeting, *, limit: int = 512) -> None:
        raise NotImplementedError

    def fileno(self) -> int:
        raise NotImplementedError

    def accept(self) -> list[Connection]:
        """All connections that wait, greeted. Another user's, and those beyond `limit`, are closed at once."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes the socket and removes its file; connections stay as they are."""
        raise NotImplementedError


# --- the client's side ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """Why there is no attachment: AWAY (nobody there, or no answer in time), or the server's status and text."""

    status: Status
    text: str
    geometry: tuple[int, ...] | None = None
    """The pool's geometry, when the refusal is that it differs (raise GeometryError)."""


class Attachment:
    """One attach of this process, as planner or mover: what `connect` returns. One owner thread.

    In a forked child it is inert (R21): `closed()` is True, nothing is sent, nothing closed.
    """

    sid: int
    pool_id: bytes
    server_gen: int
    complete: bool
    """Was the group complete with this attach?"""
    pool: PoolView
    tables: TableView

    def fileno(self) -> int:
        """Readable when chunks, or the end, have come; -1 when closed."""
        raise NotImplementedError

    def poll_chunks(self) -> int:
        """Map what has been announced, and tell the server (R28). Never blocks. Returns how many frames are new."""
        raise NotImplementedError

    def wait_chunks(self, frames: int, timeout_s: float) -> bool:
        """Until at least `frames` are mapped; False when time ran out or the connection ended."""
        raise NotImplementedError

    def closed(self) -> bool:
        """Has the server closed the connection, or sent what is no message (R24)? Never blocks."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends the connection and lets go of lock and mappings (which live as long as arrays of them do).
        Only when no copy runs: the lock's end is half of the proof of death. Never unlocks. Idempotent."""
        raise NotImplementedError


def connect(
    run_dir: Path | str, request: AttachRequest, *, timeout_s: float, writable: bool | None = None
) -> Attachment | Refusal:
    """Attach to the sidecar of `run_dir`. Waits at most `timeout_s` in all; chunks come later (`poll_chunks`).

    `writable`: map the pool for writing (default: as a mover, yes; as a planner, no). ConfigError when the run directory
    or its path is unsafe (an operator's mistake); everything else is a Refusal. May be called in any thread, the
    attachment belongs to whoever uses it first... by handing over.
    """
    raise NotImplementedError
