"""HostCache: free frames, trees, leases and sessions as one state machine.

Events go in, with the time as an argument; results come out, and writes for the shared tables
(`take_writes`), which must be applied before the answer is sent. It touches no page, clock, socket or
log. Not thread-safe: the server's loop owns it. Standard library only.

Always true, and checked by `check()`:

1. A frame is in exactly one place: free, WRITING (one store lease), READY (one node), DOOMED or
   quarantined under a lease, or left behind by a flush until it is swept up.
2. The trees are prefix-closed, and only tails of idle leaves go, so a chain never loses its head.
3. A decision changes everything or nothing; what it may take is counted before anything is touched.
4. An existing page wins: storing a READY page costs nothing.
5. Every pin, and every frame being stored, belongs to a lease, every lease to a session. No timer
   frees anything: only an end, or the proven death of every process that could still touch it.
6. READY means whole. A page is visible when it and all its ancestors are READY.

A caller's mistake (unknown lease, wrong length) raises UsageError before anything has changed: on the
wire that is a `bad` reply. An unknown session is the result GONE.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvtier.core import loads, stores
from kvtier.core.audit import check_all, check_counts, check_slice
from kvtier.core.ends import doom, end, settle
from kvtier.core.leases import quiet_mask
from kvtier.core.ledger import Ledger
from kvtier.core.policy import Policy
from kvtier.core.prefix_tree import Node
from kvtier.core.results import Attached, Ended, Flushed, Found, Holding, LoadGrant, Reason, StoreGrant
from kvtier.core.sessions import Session
from kvtier.core.writes import (
    PLANNER,
    READY,
    STORE,
    Doom,
    SessionEnd,
    SessionNumber,
    SessionRecord,
    Write,
)
from kvtier.errors import Status, UsageError
from kvtier.keys import KEY_BYTES, NS_BYTES

SLICE_PAGES = 4096
"""Pages swept at most within one decision for other things than their frames (R18)."""


class HostCache:
    """The decisions of one pool of `frames` frames, of which those below `grow`'s limit exist by now.

    `patience_s`: how long another lease may hold pages WRITING before a store takes them over (R8).
    """

    def __init__(
        self,
        frames: int,
        *,
        sessions: int = 256,
        leases: int = 65536,
        namespaces: int = 4096,
        patience_s: float = 10.0,
        policy: Policy[Node] | None = None,
    ) -> None:
        self.patience_s = patience_s
        self.draining = False  # no new leases; those that run go on
        self._book = Ledger(frames, sessions, leases, namespaces, policy)
        self._slices: Iterator[None] | None = None

    # -- the pool, sessions and groups ---------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Frames that exist by now."""
        return self._book.free.limit

    def grow(self, limit: int) -> None:
        """Frames below `limit` exist from now on (chunks are reserved one after the other); it only rises."""
        self._book.free.grow(limit)

    def attach(self, sid: int, group: str, role: str, rank: int, ranks: int, now: float) -> Attached:
        """A new session, in `role` "planner" or "mover" of `group` (R1, R2). BUSY or BAD say why not."""
        attached = self._book.sessions.attach(sid, group, role, rank, ranks)
        if attached.status == Status.OK:
            session = self._book.sessions.by_sid[sid]
            self._book.writes.append(
                SessionRecord(session.slot, sid, session.role, rank, ranks, session.group.hash, session.last)
            )
        return attached

    def complete(self, sid: int) -> bool:
        """Whether all of the session's group are attached, so that it gets leases (R2)."""
        session = self._book.sessions.by_sid.get(sid)
        return session is not None and not session.group.refusal()

    def unused(self, sid: int) -> bool:
        """Whether the session's group never had a lease: then there is nothing that it could touch."""
        session = self._book.sessions.by_sid.get(sid)
        return session is not None and not session.group.used

    def mapped(self, sid: int, limit: int) -> Status:
        """This session maps the frames below `limit`; leases give only what all of the group map (R28)."""
        session = self._book.sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        session.mapped = max(session.mapped, limit)
        return Status.OK

    def suspect(self, sid: int, suspect: bool = True) -> Status:
        """The session may be dying: no new leases for its group, nothing freed (R20). False takes it back."""
        session = self._book.sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        session.suspect = suspect
        return Status.OK

    def died(self, sid: int, now: float) -> Status:
        """The session's process is proven dead (R20); what only it could still touch is freed."""
        session = self._book.sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        self._leave(session, 0)
        return Status.OK

    def detach(self, sid: int, quiet: bool, now: float) -> Status:
        """The session leaves. With `quiet` its last event has fired, so this is as good as its death (R11).

        A quiet planner speaks for its movers. Without `quiet` all its frames wait for the proof of death.
        """
        session = self._book.sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        if quiet:
            self._leave(session, session.group.everyone)
        else:
            session.closed = True
        return Status.OK

    def _leave(self, session: Session, quiet: int) -> None:
        group = session.group
        if session.role == PLANNER:
            session.dead = True
            if not session.leases:
                self._book.bury(session)
            for lease in list(session.leases.values()):
                end(self._book, lease, quiet, whole=False)  # the last one to leave buries the session
            return
        planner = group.planner
        self._book.sessions.remove(session)
        self._book.writes.append(SessionEnd(session.slot))
        for lease in list(planner.leases.values()) if planner is not None else []:
            if lease.ended:
                settle(self._book, lease)

    # -- loads ---------------------------------------------------------------------------------------

    def lookup(self, ns: bytes, keys: bytes) -> Found:
        """How many leading pages of `keys` could be loaded now. Changes nothing."""
        _check_keys(ns, keys)
        space = self._book.spaces.by_ns.get(ns)
        if space is None:
            return Found(Status.OK, 0, 0, self._book.spaces.absent)
        match = self._book.tree.match(space.root, keys, READY)
        return Found(Status.OK, match.pages, loads.pending(self._book, space, match, keys), space.epoch)

    def begin_load(
        self, sid: int, number: int, ns: bytes, keys: bytes, first: int, at_least: int, now: float
    ) -> LoadGrant:
        """A lease to read the visible pages of `keys` from page `first` on, at least `at_least` of them.

        `keys` begin at page 0. The lease pins the whole match until its end. MISS or BUSY make no
        lease, but the number is used.
        """
        _check_keys(ns, keys)
        total = len(keys) // KEY_BYTES
        if not 0 <= first <= total or at_least < 0:
            raise UsageError(
                f"first={first}, at_least={at_least} of {total} pages: expected 0 <= first <= pages"
            )
        epoch = self._book.spaces.epoch(ns)
        session = self._book.sessions.by_sid.get(sid)
        if session is None or session.closed or session.dead:
            return LoadGrant.none(Status.GONE, epoch)
        bad = self._begin(session, number)
        if bad:
            return LoadGrant.none(Status.BAD, epoch, text=bad)
        reason = self._refusal(session)
        space = self._book.spaces.by_ns.get(ns)
        if not reason and self._book.leases.full:
            reason = Reason.LEASES
        if reason:
            self._book.counts.add(total - first, 0, reason)
            return LoadGrant.none(Status.BUSY, epoch, reason=reason)
        if space is None:
            self._book.counts.add(total - first, 0, Reason.ABSENT)
            return LoadGrant.none(Status.MISS, epoch, reason=Reason.ABSENT)

        return loads.begin(self._book, session, number, space, keys, first, at_least)

    # -- stores --------------------------------------------------------------------------------------

    def begin_store(
        self,
        sid: int,
        number: int,
        ns: bytes,
        keys: bytes,
        epoch: int,
        now: float,
        patience_s: float | None = None,
    ) -> StoreGrant:
        """A lease to fill frames for the pages of `keys` (from page 0) that nobody has stored or is storing.

        `epoch` is that of the look-up or load which the caller's KV goes back to (R13). It takes the longest
        prefix that fits (R6) and pins what it matches (R5). Pages that another lease has been writing for
        longer than `patience_s` are taken over (R8): then the grant covers these, and ends before
        pages that others are still writing in time.
        """
        _check_keys(ns, keys)
        current = self._book.spaces.epoch(ns)
        session = self._book.sessions.by_sid.get(sid)
        if session is None or session.closed or session.dead:
            return StoreGrant.none(Status.GONE, current)
        bad = self._begin(session, number)
        if bad:
            return StoreGrant.none(Status.BAD, current, text=bad)
        reason = self._refusal(session)
        if not reason and self._book.leases.full:
            reason = Reason.LEASES
        if reason:
            return StoreGrant.none(Status.BUSY, current, reason)
        if epoch != current:
            return StoreGrant.none(Status.MISS, current, Reason.FLUSHED)
        if not keys:
            return StoreGrant.none(Status.OK, current)
        space = self._book.spaces.get_or_add(ns)
        if space is None and self._book.clearing.pages:
            self._book.sweep(SLICE_PAGES)  # a swept namespace gives its entry back
            space = self._book.spaces.get_or_add(ns)
        if space is None and not self._book.clearing.pages:
            self._book.give_up_namespace()
            self._book.sweep(SLICE_PAGES)
            space = self._book.spaces.get_or_add(ns)
        if space is None:
            return StoreGrant.none(Status.BUSY, current, Reason.NAMESPACES)
        patience = self.patience_s if patience_s is None else patience_s
        return stores.begin(self._book, session, number, space, keys, now, patience)

    # -- ends ----------------------------------------------------------------------------------------

    def finish(self, sid: int, number: int, quiet: Iterable[int], now: float) -> Ended:
        """End a lease whose copies are done; `quiet` names the movers whose last event has fired.

        READY means whole: a store whose movers are not all quiet has not been written by all ranks, so its
        pages are dropped as by `abort`. Frames come back when every mover is quiet or dead (R9).
        """
        return self._end_by_number(sid, number, quiet, whole=True)

    def abort(self, sid: int, number: int, quiet: Iterable[int], now: float) -> Ended:
        """End a lease without a result; a number not used yet is used up: a late begin is refused (R10)."""
        return self._end_by_number(sid, number, quiet, whole=False)

    def _end_by_number(self, sid: int, number: int, quiet: Iterable[int], whole: bool) -> Ended:
        session = self._book.sessions.by_sid.get(sid)
        if session is None or session.dead:
            return Ended(Status.GONE)
        mask = quiet_mask(session.group.ranks, quiet)
        if number > session.last:
            if whole:
                raise UsageError(f"lease {number}: this session has begun none after {session.last}")
            bad = self._begin(session, number)
            return Ended(Status.BAD, text=bad) if bad else Ended(Status.DONE)
        lease = session.leases.get(number)
        if lease is None:
            return Ended(Status.DONE)
        return end(self._book, lease, mask, whole)

    def quiet(self, mover_sid: int, planner_sid: int, number: int, now: float) -> Ended:
        """A mover says itself that its last event for a lease has fired (R9)."""
        mover = self._book.sessions.by_sid.get(mover_sid)
        if mover is None:
            return Ended(Status.GONE)
        planner = self._book.sessions.by_sid.get(planner_sid)
        if mover.role == PLANNER or (planner is not None and planner.group is not mover.group):
            return Ended(Status.BAD, text="quiet is said by a mover of the planner's group")
        lease = planner.leases.get(number) if planner is not None else None
        if lease is None:
            return Ended(Status.DONE)
        lease.quiet |= 1 << mover.rank
        if lease.ended:
            settle(self._book, lease)
        else:
            self._book.writes.append(self._book.record(lease))
        return Ended(Status.OK)

    # -- flush ---------------------------------------------------------------------------------------

    def flush(self, ns: bytes | None, now: float) -> Flushed:
        """Forget the pages of one namespace, or of all: a new epoch (R13).

        None of them is found again. READY pages that nobody reads are counted as freed (their frames come
        back by `sweep`, or when a store needs them); what is being written or read is doomed, and freed
        with its lease.
        """
        if ns is not None:
            _check_keys(ns, b"")
        freed = doomed = 0
        for space in self._book.spaces.flush(ns):
            before = self._book.doomed
            for lease in [lease for lease in space.leases if lease.kind == STORE]:
                if lease.node is not None:  # not yet doomed together with another one
                    freed += doom(self._book, lease.own()[-1])
            doomed += self._book.doomed - before
            ends = [lease.node for lease in space.leases if lease.node is not None]
            kept = self._book.clearing.drop(space.root, ends)
            if kept:
                self._book.writes.append(Doom(kept))
            doomed += len(kept)
            freed += space.root.total - len(kept)
            self._book.spaces.release(space)
        return Flushed(freed, doomed, self._book.spaces.counter)

    def sweep(self, pages: int) -> int:
        """Free up to about `pages` of the pages that flushes have left behind; how many are left (R18)."""
        return self._book.sweep(pages)

    def epoch(self, ns: bytes) -> int:
        """The epoch that `ns` is in."""
        return self._book.spaces.epoch(ns)

    # -- what the shells see -------------------------------------------------------------------------

    def take_writes(self) -> list[Write]:
        """The table writes since the last call, in the order in which they must be applied (R15)."""
        writes = self._book.writes[:]
        self._book.writes.clear()
        return writes

    def stats(self) -> dict[str, int]:
        """Counts for people and metrics; pages unless the name says otherwise.

        `hits` are pages of loads that were finished, `unused` of loads given back by `abort`; `asked`
        is `hits` and all `missed_<reason>`.
        """
        tree = self._book.tree
        return {
            "frames": self._book.free.total,
            "frames_usable": self.limit,
            "frames_free": len(self._book.free),
            "frames_ready": tree.pages - self._book.writing,
            "frames_writing": self._book.writing,
            "frames_doomed": self._book.doomed + self._book.clearing.kept,
            "frames_quarantined": self._book.quarantined,
            "frames_clearing": self._book.clearing.pages,
            "frames_held": self._book.held,
            "nodes": tree.nodes,
            "sessions": len(self._book.sessions.by_sid),
            "engines": self._book.sessions.engines,
            "leases": len(self._book.leases),
            "namespaces": len(self._book.spaces.by_ns),
            "epoch": self._book.spaces.counter,
            **self._book.counts.as_dict(),
            "unused": self._book.unused,
            "store_asked": self._book.store_asked,
            "store_taken": self._book.store_taken,
            "stored": self._book.stored,
            "evicted": self._book.evicted,
            "dropped": self._book.dropped,
            "superseded": self._book.superseded,
        }

    def check(self, budget: int | None = None) -> None:
        """Raise BrokenInvariantError if something that must be true is not.

        Without a budget all is checked, in O(pages). With one, the counts are, and the next `budget` nodes:
        called again and again when idle, it goes round the trees (R18).
        """
        check_counts(self._book)
        if budget is None:
            check_all(self._book)
            return
        for _ in range(budget):
            if self._slices is None:
                self._slices = check_slice(self._book)
            if next(self._slices, self) is self:
                self._slices = None
                return

    def holdings(self) -> list[Holding]:
        """What each session holds. O(sessions)."""
        return [
            Holding(
                session.sid,
                session.group.name,
                "planner" if session.role == PLANNER else "mover",
                session.rank,
                session.group.ranks,
                session.dead,
                len(session.leases),
                session.charge,
                max(session.mapped, 0),
            )
            for session in self._book.sessions.by_sid.values()
        ]

    def namespaces(self) -> list[tuple[bytes, int, int]]:
        """Each namespace that has an entry: its digest, the pages in its tree, its epoch. O(namespaces)."""
        return [(space.ns, space.root.total, space.epoch) for space in self._book.spaces.by_ns.values()]

    # -- helpers -------------------------------------------------------------------------------------

    def _refusal(self, session: Session) -> str:
        """Why the session gets no lease now; empty when it does."""
        if self.draining:
            return Reason.DRAINING
        return session.group.refusal() or (Reason.SUSPECT if session.suspect else "")

    def _begin(self, session: Session, number: int) -> str:
        """Use up a lease number; the text says why it cannot be (R10)."""
        if session.role != PLANNER:
            return "a mover has no leases of its own"
        if not session.last < number < 1 << 63:
            return f"lease {number}: numbers rise within a session, the last was {session.last}"
        session.last = number
        self._book.writes.append(SessionNumber(session.slot, number))
        return ""


def _check_keys(ns: bytes, keys: bytes) -> None:
    if len(ns) != NS_BYTES:
        raise UsageError(f"ns of {len(ns)} bytes: expected {NS_BYTES}")
    if len(keys) % KEY_BYTES:
        raise UsageError(f"{len(keys)} bytes of keys: expected {KEY_BYTES} for each page")
