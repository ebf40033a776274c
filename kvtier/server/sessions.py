"""Who is attached: one `Session` for each attach, from its answer to its end or its proven death.

The server's own half of a session (descriptors, routing id); leases and frames are the core's. Imports `shm`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvtier.shm.attach import Connection


@dataclass(slots=True, eq=False)
class Session:
    """One attach. `pidfd` belongs to it; `connection` is None once that has ended.

    `pid` is for people: 0 when it is in another PID namespace. `since`: time.monotonic() of the attach.
    """

    sid: int
    role: str
    group: str
    pidfd: int
    connection: Connection | None
    pid: int
    since: float
    mapped: int = 0
    """Frames below it are mapped, as far as it has said (R28)."""
    routing: bytes | None = None
    """Of the data socket that said hello; None before."""
    doubted: bool = False
    """Its connection or its process has ended without a detach: probed until it is proven dead (R20)."""


class Sessions:
    """All sessions by id. Closes what belongs to a session when that is dropped; `unwatch` is told before."""

    def __init__(self) -> None:
        self._by_sid: dict[int, Session] = {}
        self.unwatch: Callable[[Session], None] = lambda session: None

    def __len__(self) -> int:
        return len(self._by_sid)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_sid.values()))

    def get(self, sid: int) -> Session | None:
        return self._by_sid.get(sid)

    def add(self, session: Session) -> None:
        self._by_sid[session.sid] = session

    def new_sid(self) -> int:
        """64 random bits, never 0 (which means no session) and not in use (R1)."""
        while True:
            sid = int.from_bytes(os.urandom(8), "little")
            if sid and sid not in self._by_sid:
                return sid

    def drop(self, session: Session) -> None:
        """The session is over: forget it. Its connection stays open until the client closes it."""
        del self._by_sid[session.sid]
        self.unwatch(session)
        if session.connection is not None:
            session.connection.tag = None
        os.close(session.pidfd)

    def doubted(self) -> list[Session]:
        return [session for session in self._by_sid.values() if session.doubted]
