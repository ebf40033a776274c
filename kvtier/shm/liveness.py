"""Who lives: a lock per session and a pidfd prove a client's death (R19, R20); one lock names the owner (R25).

Imports the standard library and the ground floor. Always true: only a free lock *and* a readable pidfd are
DEAD; whatever cannot be told is SUSPECT.
"""

from __future__ import annotations

import enum
from pathlib import Path


class Liveness(enum.Enum):
    """What a probe tells of a session's process."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """The lock is free but the process has not ended, or the probe failed: no new leases, nothing freed."""
    DEAD = "dead"
    """Lock free and pidfd readable: no file of the process is left that could still touch the pool."""


class SessionLocks:
    """The server's lock file: one byte for each session, locked on the description that the client gets.

    The byte is chosen by the session's id (never given again), so a slot can be used again while a forked
    child of its former session still holds the old lock.
    """

    def __init__(self, run_dir: Path | str) -> None:
        """Makes (or opens) the lock file in a run directory that the caller owns."""
        raise NotImplementedError

    def grant(self, sid: int) -> int:
        """A new descriptor on a description of its own that holds the session's lock. Send it, then close it.
        UsageError when that session's lock is held already."""
        raise NotImplementedError

    def is_free(self, sid: int) -> bool:
        """Is the session's lock held by nobody? OSError when it cannot be told."""
        raise NotImplementedError

    def probe(self, sid: int, pidfd: int) -> Liveness:
        """R20. Never raises and never blocks."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class OwnerLock:
    """One server per run directory (R25). Take it before any bind; keep it open for as long as the server lives.

        owner = OwnerLock(run_dir)      # makes run_dir (0700) if need be; OwnedError names the other server
        ...
        owner.release()                 # removes sockets, lock files, and the directory if a server made it

    `fd` is inheritable by choice of who starts the server.
    """

    run_dir: Path
    fd: int

    def __init__(self, path: Path | str) -> None:
        raise NotImplementedError

    def release(self) -> None:
        """Removes what the server has made in the run directory, then lets go of it. Idempotent."""
        raise NotImplementedError
