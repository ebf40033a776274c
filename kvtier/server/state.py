"""What the parts of the server share: the pool (once there is one), the sessions, and plain counters."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from kvtier.core.results import Flushed
from kvtier.server.hostpool import HostPool
from kvtier.server.sessions import Session, Sessions

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What happened to messages and attaches since the server started."""

    requests: int = 0
    bad_requests: int = 0
    dropped_requests: int = 0
    """Messages of too many parts: nothing was read of them."""
    dropped_replies: int = 0
    """The peer had gone, or did not read its replies."""
    internal_errors: int = 0
    attaches: int = 0
    refused_attaches: int = 0
    deaths: int = 0
    forced_out: int = 0
    """Sessions that the operator ended without a proof of death."""
    formats: int = 0
    sweeps: int = 0


@dataclass(slots=True)
class State:
    """`server_gen`: rises with each server start (R1). `patience_s`: R8."""

    pool_bytes: int
    server_gen: int
    patience_s: float
    formatted: HostPool | None = None
    sessions: Sessions = field(default_factory=Sessions)
    counters: Counters = field(default_factory=Counters)
    settled: bool = True
    """Every session has mapped the whole pool: nothing on the attach sockets can change an answer."""
    draining: bool = False
    """No new leases, no attaches."""
    started: float = field(default_factory=time.monotonic)

    @property
    def pool(self) -> HostPool:
        """The pool, where there must be one: whoever has a session has a pool."""
        if self.formatted is None:
            raise RuntimeError("a session without a pool")
        return self.formatted

    def mapped(self, session: Session, chunks: int) -> None:
        """The session has mapped that many chunks; leases give only what all of its group have (R28)."""
        pool = self.pool
        session.mapped = pool.shape.frames_below(chunks)
        pool.cache.mapped(session.sid, session.mapped)
        self.settled = all(one.mapped >= pool.shape.frames for one in self.sessions)

    def drain(self, on: bool) -> None:
        """Refuse new leases and attaches from now on, or no longer."""
        self.draining = on
        if self.formatted is not None:
            self.formatted.cache.draining = on

    def flush(self, ns: bytes | None, now: float) -> Flushed:
        """Forget the pages of one namespace, or of all (R13); the tables say so when this returns."""
        pool = self.pool
        flushed = pool.cache.flush(ns, now)
        pool.cleaning = True
        pool.write()
        return flushed

    def doubt(self, session: Session) -> None:
        """The session may be dying: no new leases, nothing freed, until it is proven dead (R20)."""
        if not session.doubted:
            session.doubted = True
            self.pool.cache.suspect(session.sid)
            self.pool.write()

    def bury(self, session: Session, now: float) -> None:
        """The session's process is proven dead: its frames come back (R20)."""
        self.pool.cache.died(session.sid, now)
        self.pool.write()
        self.sessions.drop(session)
        self.counters.deaths += 1
        log.warning("%s of group %s died: its leases are ended", session.role, session.group)

    def leave(self, session: Session, quiet: bool, now: float) -> None:
        """The session detaches. Without `quiet` what it holds waits for the proof of death (R11)."""
        self.pool.cache.detach(session.sid, quiet, now)
        self.pool.write()
        if quiet:
            self.sessions.drop(session)
        else:
            session.doubted = True
