"""Who may attach, and what a newcomer gets (R1, R2, R19, R24, R28, R30).

Decides about the messages of the attach socket; `shm.attach` carries them. Always true: a refused attach has
changed nothing that another session could notice.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable

from kvtier.errors import KVTierError, Status, UsageError
from kvtier.server.hostpool import HostPool
from kvtier.server.sessions import Session
from kvtier.server.state import State
from kvtier.shm.attach import VERSION, AttachRequest, ChunksRequest, Connection
from kvtier.shm.liveness import SessionLocks
from kvtier.shm.rundir import boot_id
from kvtier.shm.shape import PoolShape

KNOWN_REFUSALS = 256
"""Of so many refusals it is remembered that they were logged, the latest ones."""

log = logging.getLogger(__name__)


class Admission:
    """`pool_changed` is called after the pool was formatted (again): the loop watches its memory then."""

    def __init__(self, state: State, locks: SessionLocks, pool_changed: Callable[[], None]) -> None:
        self._state = state
        self._locks = locks
        self._pool_changed = pool_changed
        self._boot_id = boot_id()
        self._refusals: OrderedDict[tuple[str, str], None] = OrderedDict()

    def attach(self, connection: Connection, request: AttachRequest, now: float) -> Session | None:
        """Answer one attach request: the new session, or None when it was refused."""
        refusal = self._unfit(connection, request) or self._format(request)
        if refusal is None:
            admitted = self._admit(connection, request, now)
            if isinstance(admitted, Session):
                return admitted
            refusal = admitted
        status, text, geometry = refusal
        self._state.counters.refused_attaches += 1
        self._log_refusal(request, text)
        connection.refused(status, text, geometry)
        return None

    def chunks(self, connection: Connection, request: ChunksRequest) -> None:
        """The client has mapped what it was given, and waits for more (R28)."""
        session = connection.tag
        if isinstance(session, Session):
            self._state.mapped(session, request.start)
            connection.send_chunks(self._state.pool.memory.chunks)

    def _log_refusal(self, request: AttachRequest, text: str) -> None:
        """Who is refused asks again and again: once for each group and reason it is a warning."""
        known = (request.group, text)
        new = known not in self._refusals
        self._refusals[known] = None
        self._refusals.move_to_end(known)
        if len(self._refusals) > KNOWN_REFUSALS:
            self._refusals.popitem(last=False)
        log.log(
            logging.WARNING if new else logging.DEBUG,
            "refused %s %d of group %s: %s%s",
            request.role,
            request.rank,
            request.group,
            text,
            " (further ones of this group for this reason are only counted)" if new else "",
        )

    def _unfit(self, connection: Connection, request: AttachRequest) -> _Refusal | None:
        low, high = request.versions
        if not low <= VERSION <= high:
            return Status.BAD, f"protocol version {low} to {high}: this server speaks {VERSION}", None
        if connection.tag is not None:
            return Status.BAD, "this connection is attached already: open another", None
        if request.boot_id and self._boot_id and request.boot_id != self._boot_id:
            return (
                Status.BAD,
                "the client runs on another kernel: sidecar and engines must share a host",
                None,
            )
        if self._state.draining:
            return Status.BUSY, "this sidecar is draining: it takes nobody in, and will end", None
        if connection.pidfd < 0:
            return Status.BAD, "no pidfd came with the attach: it is needed to notice a death (R19)", None
        return None

    def _format(self, request: AttachRequest) -> _Refusal | None:
        """Makes the pool at the first attach, and again for another geometry when nobody is there (R30)."""
        state = self._state
        old = state.formatted
        if old is not None and old.shape.geometry == request.geometry:
            return None
        if old is not None and len(state.sessions):
            return (
                Status.BAD,
                f"the pool has geometry {_geometry(old.shape.geometry)} and is in use, this engine needs "
                f"{_geometry(request.geometry)}; start a second sidecar for it: "
                "kvtier serve --size SIZE --run-dir OTHER_DIR, and give the engine that run directory",
                old.shape.geometry,
            )
        try:
            PoolShape.of(request.geometry, state.pool_bytes)  # ConfigError before anything is given up
            # The old memory first: there may not be room for both.
            if old is not None:
                state.formatted = None
                lost = old.cache.stats()["frames_ready"]
                old.close()
                log.warning(
                    "group %s brings another layout: the pool is emptied, %d cached pages are lost; to keep "
                    "both, run a second sidecar with another --run-dir",
                    request.group,
                    lost,
                )
            state.formatted = HostPool(
                request.geometry,
                state.pool_bytes,
                fingerprint=request.fingerprint,
                server_gen=state.server_gen,
                patience_s=state.patience_s,
            )
        except (KVTierError, OSError) as error:
            self._pool_changed()
            return Status.BAD, f"cannot make a pool for this layout: {error}", None
        state.counters.formats += 1
        shape = state.formatted.shape
        log.info(
            "pool %s: %d frames of %d bytes, geometry %s",
            "formatted" if old is None else "formatted again",
            shape.frames,
            shape.page_bytes,
            _geometry(shape.geometry),
        )
        self._pool_changed()
        return None

    def _admit(self, connection: Connection, request: AttachRequest, now: float) -> Session | _Refusal:
        state, pool = self._state, self._state.pool
        sid = state.sessions.new_sid()
        try:
            attached = pool.cache.attach(sid, request.group, request.role, request.rank, request.ranks, now)
        except UsageError as error:
            return Status.BAD, str(error), None
        if attached.status != Status.OK:
            return attached.status, attached.text, None
        pool.write()
        try:
            lock_fd = self._locks.grant(sid)
        except OSError as error:
            pool.cache.detach(sid, True, now)
            pool.write()
            return Status.BUSY, f"no lock for a session: {error}", None
        session = Session(
            sid, request.role, request.group, connection.take_pidfd(), connection, connection.pid, now
        )
        state.sessions.add(session)
        state.settled = False
        connection.tag = session
        try:
            connection.attached(
                sid,
                pool.pool_id,
                state.server_gen,
                pool.shape,
                lock_fd,
                pool.tables.read_fd,
                complete=attached.complete,
            )
        finally:
            # Its own copy goes at once: from now on only the client holds the lock (R19).
            os.close(lock_fd)
        state.counters.attaches += 1
        log.info("attached %s %d/%d of group %s", request.role, request.rank, request.ranks, request.group)
        return session


_Refusal = tuple[Status, str, tuple[int, ...] | None]


def _geometry(geometry: tuple[int, ...]) -> str:
    return f"{geometry[0]} tokens a page, shards of {' + '.join(map(str, geometry[1:]))} bytes"
