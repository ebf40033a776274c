"""A request of the data socket, carried out: what is asked of the core, and what is answered.

Pure of sockets. Always true: every request gets a reply; one that is refused as a whole has changed nothing;
the tables are written before the reply exists (R15).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier._version import __version__
from kvtier.core.host_cache import HostCache
from kvtier.core.results import Ended as CoreEnded
from kvtier.core.results import Reason
from kvtier.errors import Status, UsageError
from kvtier.server.sessions import Session
from kvtier.server.state import State
from kvtier.wire.messages import (
    NO_FRAMES,
    NO_GENS,
    Abort,
    BeginLoad,
    BeginStore,
    Detach,
    DetachReply,
    Ended,
    EndReply,
    Finish,
    Flush,
    FlushReply,
    Frames,
    Hello,
    HelloReply,
    LoadGrant,
    LoadReply,
    Lookup,
    LookupReply,
    Op,
    Quiet,
    Reply,
    ReplyBody,
    Request,
    Stats,
    StatsReply,
    StoreGrant,
    StoreReply,
)

_NO_POOL = dict.fromkeys(HostCache(1, sessions=1, leases=1, namespaces=1).stats(), 0) | {
    f"missed_{reason}": 0 for name, reason in vars(Reason).items() if name.isupper()
}
"""What `HostCache.stats` names, and all that it may come to name."""

_KEPT_PAST_DEADLINE = (Finish, Abort, Quiet, Detach)
"""Ends are carried out however late they come; all else is not done after its deadline."""


class Refused(Exception):
    """The request as a whole is not carried out; becomes the reply's status and text."""

    def __init__(self, status: Status, text: str) -> None:
        super().__init__(text)
        self.status = status


class Answers:
    """`answer` is the whole face. `now` is time.monotonic() in seconds."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._does: dict[type[Any], Callable[[Session, Any, float], ReplyBody]] = {
            Lookup: self._lookup,
            BeginLoad: self._begin_load,
            BeginStore: self._begin_store,
            Finish: self._finish,
            Abort: self._abort,
            Quiet: self._quiet,
            Flush: self._flush,
            Detach: self._detach,
        }

    def answer(self, routing: bytes, request: Request, now: float) -> Reply:
        """Carry `request` out, that came from the peer `routing`."""
        self._state.counters.requests += 1
        gen = self._state.server_gen
        try:
            body = self._carry_out(routing, request, now)
        except Refused as refusal:
            return Reply(request.rid, gen, refusal.status, str(refusal))
        except UsageError as error:
            return Reply(request.rid, gen, Status.BAD, str(error)[:500])
        return Reply(request.rid, gen, Status.OK, "", body)

    def _carry_out(self, routing: bytes, request: Request, now: float) -> ReplyBody:
        body = request.body
        if isinstance(body, Stats):
            return StatsReply(self.stats(now))
        if request.server_gen != self._state.server_gen:
            raise Refused(
                Status.GONE,
                f"server_gen {request.server_gen}: this is {self._state.server_gen}; attach again",
            )
        session = self._state.sessions.get(request.sid)
        if session is None:
            raise Refused(Status.GONE, "unknown session: attach again")
        if isinstance(body, Hello):
            session.routing = routing
            return HelloReply(self._state.pool.cache.complete(session.sid))
        if session.routing != routing:
            raise Refused(Status.BAD, "this socket has not said hello for that session")
        if request.expires and now * 1e9 > request.expires and not isinstance(body, _KEPT_PAST_DEADLINE):
            raise Refused(Status.EXPIRED, "the request came after its deadline: nothing was done")
        return self._does[type(body)](session, body, now)

    def _lookup(self, session: Session, body: Lookup, now: float) -> ReplyBody:
        found = self._state.pool.cache.lookup(body.ns, body.keys)
        return LookupReply(found.ready, found.pending, found.epoch)

    def _begin_load(self, session: Session, body: BeginLoad, now: float) -> ReplyBody:
        pool, grants = self._state.pool, []
        begin, gens = pool.cache.begin_load, pool.tables.gens
        for chain in body.chains:
            number = chain.number
            try:
                grant = begin(session.sid, number, chain.ns, chain.keys, chain.first, chain.at_least, now)
            except UsageError as error:
                grants.append(LoadGrant(number, Status.BAD, text=str(error)[:500]))
                continue
            status, given, epoch, ready, reason, text = grant
            if given:
                # A load claims no frame, so the generations are those after the writes too.
                frames = np.frombuffer(given, np.int32)
                grants.append(LoadGrant(number, status, epoch, ready, frames, gens(frames), reason, text))
            else:
                grants.append(LoadGrant(number, status, epoch, ready, NO_FRAMES, NO_GENS, reason, text))
        pool.write()
        return LoadReply(tuple(grants))

    def _begin_store(self, session: Session, body: BeginStore, now: float) -> ReplyBody:
        pool, grants = self._state.pool, []
        for chain in body.chains:
            try:
                grant = pool.cache.begin_store(
                    session.sid, chain.number, chain.ns, chain.keys, chain.epoch, now
                )
            except UsageError as error:
                grants.append(StoreGrant(chain.number, Status.BAD, text=str(error)[:500]))
                continue
            grants.append(
                StoreGrant(
                    chain.number,
                    grant.status,
                    grant.epoch,
                    grant.start,
                    grant.taken,
                    grant.pending,
                    _frames(grant.frames),
                    grant.reason,
                    grant.text,
                )
            )
        pool.write()
        return StoreReply(tuple(grants))

    def _finish(self, session: Session, body: Finish, now: float) -> ReplyBody:
        return self._end(session, body, self._state.pool.cache.finish, now)

    def _abort(self, session: Session, body: Abort, now: float) -> ReplyBody:
        return self._end(session, body, self._state.pool.cache.abort, now)

    def _end(
        self,
        session: Session,
        body: Finish | Abort,
        end: Callable[[int, int, frozenset[int], float], CoreEnded],
        now: float,
    ) -> ReplyBody:
        ended = []
        for one in body.ends:
            try:
                result = end(session.sid, one.number, frozenset(one.quiet), now)
            except UsageError as error:
                ended.append(Ended(one.number, Status.BAD, text=str(error)[:500]))
            else:
                ended.append(
                    Ended(
                        one.number,
                        result.status,
                        result.visible,
                        result.dropped,
                        result.superseded,
                        result.text,
                    )
                )
        self._state.pool.write()
        return EndReply(Op(body.op), tuple(ended))

    def _quiet(self, session: Session, body: Quiet, now: float) -> ReplyBody:
        pool, ended = self._state.pool, []
        for number in body.numbers:
            try:
                result = pool.cache.quiet(session.sid, body.planner_sid, number, now)
            except UsageError as error:
                ended.append(Ended(number, Status.BAD, text=str(error)[:500]))
            else:
                ended.append(Ended(number, result.status))
        pool.write()
        return EndReply(Op.QUIET, tuple(ended))

    def _flush(self, session: Session, body: Flush, now: float) -> ReplyBody:
        flushed = self._state.flush(body.ns or None, now)
        return FlushReply(flushed.freed, flushed.doomed, flushed.epoch)

    def _detach(self, session: Session, body: Detach, now: float) -> ReplyBody:
        self._state.leave(session, body.quiet, now)
        return DetachReply()

    def stats(self, now: float) -> dict[str, int | str]:
        """Numbers for people and for `kvtier stats --json`. Needs no pool.

        Always the same names: what only a pool has is 0 (or "") before the first attach.
        """
        state, counters = self._state, self._state.counters
        values: dict[str, int | str] = {
            "version": __version__,
            "server_gen": state.server_gen,
            "uptime_s": int(now - state.started),
            "sessions_attached": len(state.sessions),
            "sessions_doubted": len(state.sessions.doubted()),
            "draining": int(state.draining),
            "pool_bytes": state.pool_bytes,
            "pool_id": "",
            "page_tokens": 0,
            "page_bytes": 0,
            "frames_total": 0,
            "reserved_bytes": 0,
            "reserving": 0,
            "reserve_error": "",
        }
        values |= {name: getattr(counters, name) for name in counters.__slots__}
        values |= _NO_POOL
        pool = state.formatted
        if pool is not None:
            values |= {
                "pool_id": pool.pool_id.hex(),
                "page_tokens": pool.shape.geometry[0],
                "page_bytes": pool.shape.page_bytes,
                "frames_total": pool.shape.frames,
                "frames_usable": pool.memory.frames,
                "reserved_bytes": pool.memory.reserved_bytes,
                "reserving": int(not pool.memory.finished),
                "reserve_error": pool.memory.error or "",
            }
            values |= pool.cache.stats()
        return values


def _frames(frames: array[int]) -> Frames:
    """The core's frames as the wire wants them; the same memory."""
    return np.frombuffer(frames, np.int32) if frames else NO_FRAMES
