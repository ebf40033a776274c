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

from array import array
from collections.abc import Iterable, Iterator
from typing import cast

from kvtier.core.audit import check_all, check_counts, check_slice
from kvtier.core.clearing import Clearing
from kvtier.core.counters import Counters
from kvtier.core.frames import FreeFrames
from kvtier.core.leases import Lease, LeaseTable, quiet_mask
from kvtier.core.policy import Policy
from kvtier.core.prefix_tree import VALUE_BYTES, Match, Node, PrefixTree
from kvtier.core.results import NO_FRAMES, Attached, Ended, Flushed, Found, LoadGrant, Reason, StoreGrant
from kvtier.core.sessions import Session, Sessions
from kvtier.core.spaces import Space, Spaces
from kvtier.core.writes import (
    DOOMED,
    LOAD,
    PLANNER,
    READY,
    STORE,
    WRITING,
    Claim,
    Doom,
    Free,
    LeaseEnd,
    Quarantine,
    Ready,
    Reparent,
    SessionEnd,
    SessionNumber,
    SessionRecord,
    Write,
)
from kvtier.errors import Status, UsageError
from kvtier.keys import KEY_BYTES, NS_BYTES

TAG_BYTES = 8


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
        self._writes: list[Write] = []
        self._free = FreeFrames(frames)
        self._tree = PrefixTree(KEY_BYTES, policy)
        self._clearing = Clearing(self._tree)
        self._sessions = Sessions(sessions)
        self._leases = LeaseTable(leases)
        self._spaces = Spaces(namespaces, self._tree, self._writes)
        self._writing = 0
        self._doomed = 0
        self._quarantined = 0
        self._counts = Counters()
        self._stored = self._evicted = self._dropped = self._superseded = self._unused = 0
        self._store_asked = self._store_taken = 0
        self._slices: Iterator[None] | None = None

    # -- the pool, sessions and groups ---------------------------------------------------------------

    @property
    def limit(self) -> int:
        """Frames that exist by now."""
        return self._free.limit

    def grow(self, limit: int) -> None:
        """Frames below `limit` exist from now on (chunks are reserved one after the other); it only rises."""
        self._free.grow(limit)

    def attach(self, sid: int, group: str, role: str, rank: int, ranks: int, now: float) -> Attached:
        """A new session, in `role` "planner" or "mover" of `group` (R1, R2). BUSY or BAD say why not."""
        attached = self._sessions.attach(sid, group, role, rank, ranks)
        if attached.status == Status.OK:
            session = self._sessions.by_sid[sid]
            self._writes.append(
                SessionRecord(session.slot, sid, session.role, rank, ranks, session.group.hash, session.last)
            )
        return attached

    def complete(self, sid: int) -> bool:
        """Whether all of the session's group are attached, so that it gets leases (R2)."""
        session = self._sessions.by_sid.get(sid)
        return session is not None and not session.group.refusal()

    def mapped(self, sid: int, limit: int) -> Status:
        """This session maps the frames below `limit`; leases give only what all of the group map (R28)."""
        session = self._sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        session.mapped = max(session.mapped, limit)
        return Status.OK

    def suspect(self, sid: int, suspect: bool = True) -> Status:
        """The session may be dying: no new leases for its group, nothing freed (R20). False takes it back."""
        session = self._sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        session.suspect = suspect
        return Status.OK

    def died(self, sid: int, now: float) -> Status:
        """The session's process is proven dead (R20); what only it could still touch is freed."""
        session = self._sessions.by_sid.get(sid)
        if session is None:
            return Status.GONE
        self._leave(session, 0)
        return Status.OK

    def detach(self, sid: int, quiet: bool, now: float) -> Status:
        """The session leaves. With `quiet` its last event has fired, so this is as good as its death (R11).

        A quiet planner speaks for its movers. Without `quiet` all its frames wait for the proof of death.
        """
        session = self._sessions.by_sid.get(sid)
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
                self._bury(session)
            for lease in list(session.leases.values()):
                self._end(lease, quiet, whole=False)  # the last one to leave buries the session
            return
        planner = group.planner
        self._sessions.remove(session)
        self._writes.append(SessionEnd(session.slot))
        for lease in list(planner.leases.values()) if planner is not None else []:
            if lease.ended:
                self._settle(lease)

    def _bury(self, session: Session) -> None:
        if session.dead and not session.leases:
            self._sessions.remove(session)
            self._writes.append(SessionEnd(session.slot))

    # -- loads ---------------------------------------------------------------------------------------

    def lookup(self, ns: bytes, keys: bytes) -> Found:
        """How many leading pages of `keys` could be loaded now. Changes nothing."""
        _check_keys(ns, keys)
        space = self._spaces.by_ns.get(ns)
        if space is None:
            return Found(Status.OK, 0, 0, self._spaces.absent)
        match = self._tree.match(space.root, keys, READY)
        return Found(Status.OK, match.pages, self._pending(space, match, keys), space.epoch)

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
        epoch = self._spaces.epoch(ns)
        session = self._sessions.by_sid.get(sid)
        if session is None or session.closed or session.dead:
            return LoadGrant(Status.GONE, NO_FRAMES, epoch, 0)
        bad = self._begin(session, number)
        if bad:
            return LoadGrant(Status.BAD, NO_FRAMES, epoch, 0, text=bad)
        reason = session.group.refusal() or (Reason.SUSPECT if session.suspect else "")
        space = self._spaces.by_ns.get(ns)
        if not reason and self._leases.full:
            reason = Reason.LEASES
        if reason:
            self._counts.add(total - first, 0, reason)
            return LoadGrant(Status.BUSY, NO_FRAMES, epoch, 0, reason)
        if space is None:
            self._counts.add(total - first, 0, Reason.ABSENT)
            return LoadGrant(Status.MISS, NO_FRAMES, epoch, 0, Reason.ABSENT)

        tree = self._tree
        match = tree.match(space.root, keys, READY)
        pages = match.pages
        if pages < total:
            reason = Reason.PENDING if self._pending(space, match, keys) else Reason.ABSENT
        held = pages - tree.unheld(match.node, match.offset)
        room = held + self._room(session, held, 0)
        if pages > max(room, 0):
            # Within `held` the second bound of _room proves nothing: others may be what holds it.
            pages = room if room >= held else max(self._cap() - session.charge, 0)
            reason = Reason.CAP
        frames = tree.values(match.node, match.offset)
        mark = session.group.mark
        if mark < self.limit:
            mapped = next((at for at, frame in enumerate(frames[:pages]) if frame >= mark), pages)
            if mapped < pages:
                pages, reason = mapped, Reason.UNMAPPED
        if pages - first < max(at_least, 1):
            status = Status.BUSY if reason == Reason.CAP else Status.MISS
            if pages > first:
                reason = reason if status == Status.BUSY else Reason.TOO_FEW
            self._counts.add(total - first, 0, reason)
            return LoadGrant(status, NO_FRAMES, epoch, match.pages, reason)

        node, offset = _trim(match, pages)
        node = tree.split(node, offset)
        tree.pin(node)
        lease = self._leases.add(session, number, LOAD, space, now)
        lease.node = node
        self._charge(lease, pages)
        self._writes.append(lease.record(pages))
        lease.asked, lease.hit, lease.reason = total - first, pages - first, reason
        return LoadGrant(Status.OK, frames[first:pages], epoch, match.pages, reason)

    def _pending(self, space: Space, match: Match, keys: bytes) -> int:
        """Pages of `keys` that are in the tree beyond the visible ones of `match`."""
        if match.offset < match.node.count or not match.node.children:
            return 0
        return self._tree.match(space.root, keys).pages - match.pages

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
        current = self._spaces.epoch(ns)
        session = self._sessions.by_sid.get(sid)
        if session is None or session.closed or session.dead:
            return StoreGrant(Status.GONE, 0, NO_FRAMES, 0, 0, current)
        bad = self._begin(session, number)
        if bad:
            return StoreGrant(Status.BAD, 0, NO_FRAMES, 0, 0, current, text=bad)
        reason = session.group.refusal() or (Reason.SUSPECT if session.suspect else "")
        if not reason and self._leases.full:
            reason = Reason.LEASES
        if reason:
            return StoreGrant(Status.BUSY, 0, NO_FRAMES, 0, 0, current, reason)
        if epoch != current:
            return StoreGrant(Status.MISS, 0, NO_FRAMES, 0, 0, current, Reason.FLUSHED)
        if not keys:
            return StoreGrant(Status.OK, 0, NO_FRAMES, 0, 0, current)
        space = self._spaces.get_or_add(ns)
        if space is None and self._clearing.pages:
            self.sweep(self._clearing.pages)  # a swept namespace gives its entry back
            space = self._spaces.get_or_add(ns)
        if space is None:
            return StoreGrant(Status.BUSY, 0, NO_FRAMES, 0, 0, current, Reason.NAMESPACES)
        patience = self.patience_s if patience_s is None else patience_s
        return self._store(session, number, space, keys, now, patience)

    def _store(
        self, session: Session, number: int, space: Space, keys: bytes, now: float, patience: float
    ) -> StoreGrant:
        tree = self._tree
        total = len(keys) // KEY_BYTES
        match = tree.match(space.root, keys)
        start, stale, stale_pages, pending = _plan(tree.path(match.node), match, now - patience)
        whole = start + stale_pages == match.pages
        want = total - start if whole else stale_pages
        reason = "" if whole else Reason.PENDING
        if not want:
            return StoreGrant(Status.OK, start, NO_FRAMES, 0, pending, space.epoch)
        self._store_asked += want

        # Count first, touch nothing: what the match pins cannot be evicted for it (R5).
        newly = tree.unheld(match.node, match.offset)
        room = self._room(session, start, newly)
        can = len(self._free) + self._clearing.pages + tree.idle - newly
        taken = min(want, room, can)
        if taken < want:
            reason = Reason.CAP if room <= can else Reason.FULL
        if taken <= 0:
            status = Status.BUSY if reason == Reason.CAP else Status.FULL
            return StoreGrant(status, start, NO_FRAMES, 0, pending, space.epoch, reason)

        anchor = tree.split(match.node, match.offset) if match.pages else None
        if anchor is not None:
            tree.pin(anchor)
            if stale and stale[-1] is match.node:
                stale[-1] = anchor
        frames = self._obtain(taken, session.group.mark)
        if len(frames) < taken:
            taken, reason = len(frames), Reason.UNMAPPED
        if not taken:
            if anchor is not None:
                tree.unpin(anchor)
                tree.merge(anchor)
            return StoreGrant(Status.FULL, start, NO_FRAMES, 0, pending, space.epoch, reason)

        lease = self._leases.add(session, number, STORE, space, now)
        own = keys[start * KEY_BYTES : (start + taken) * KEY_BYTES]
        parent_frame, tag = -1 - space.index, space.ns[:TAG_BYTES]
        if start:
            parent_frame = _last_frame(stale[0].parent if stale else anchor)
            tag = keys[(start - 1) * KEY_BYTES :][:TAG_BYTES]
        self._writes.append(Claim(frames, own, parent_frame, tag, lease.index, tree.tick & 0xFFFFFFFF))
        used = self._take_over(lease, stale, frames) if stale else 0
        if used < taken:
            under = space.root if anchor is None else anchor
            values = frames[used:].tobytes()
            lease.node = tree.insert(under, own[used * KEY_BYTES :], values, WRITING, lease, pinned=True)
        if anchor is not None:
            tree.unpin(anchor)
        self._writing += taken
        self._store_taken += taken
        self._charge(lease, start + taken)
        self._writes.append(lease.record(start + taken))
        return StoreGrant(Status.OK, start, frames, taken, pending, space.epoch, reason)

    def _take_over(self, lease: Lease, stale: list[Node], frames: array[int]) -> int:
        """Put `frames` in the place of those that hung leases hold for `stale`, as far as they reach (R8).

        The nodes stay, so that their children and pins do; the old leases keep their frames, DOOMED.
        """
        tree = self._tree
        taken: list[Node] = []
        used = 0
        for whole in stale:
            if used == len(frames):
                break
            count = min(whole.count, len(frames) - used)
            node = tree.split(whole, count)
            taken.append(node)
            old = cast(Lease, node.owner)
            gone = node.pages()
            gone.reverse()
            self._writes.append(Doom(gone))
            old.out.extend(gone)
            old.superseded += count
            self._writing -= count
            self._doomed += count
            tree.refill(node, frames[used : used + count].tobytes())
            node.owner = lease
            used += count
            if old.node is node:
                old.node = None
                tree.unpin(node)
                self._charge(old, len(old.out))
                self._writes.append(old.record(0))
        for node in taken:
            last = _last_frame(node)
            for child in (node.children or {}).values():
                if child.owner is not lease:
                    self._writes.append(Reparent(child.pages()[0], last))
        if used == len(frames):
            lease.node = taken[-1]
            tree.pin(taken[-1])
        return used

    def _obtain(self, count: int, mark: int) -> array[int]:
        """`count` frames: free, then swept, then evicted ones; fewer when some are not below `mark`."""
        free = self._free
        short = count - len(free)
        if short > 0 and self._clearing.pages:
            self.sweep(short)
            short = count - len(free)
        evicted = NO_FRAMES
        if short > 0:
            evicted = self._tree.evict(short)
            self._evicted += len(evicted)
            self._writes.append(Free(evicted))
        if mark < free.limit:
            free.give(evicted)
            return free.take_below(count, mark)
        if not evicted:
            return free.take(count)
        frames = evicted[::-1]
        if len(free):
            frames.extend(free.take(count - len(frames)))
        return frames

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
        session = self._sessions.by_sid.get(sid)
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
        if lease.ended:
            lease.quiet |= mask
            self._settle(lease)
            return Ended(Status.DONE)
        return self._end(lease, mask, whole)

    def quiet(self, mover_sid: int, planner_sid: int, number: int, now: float) -> Ended:
        """A mover says itself that its last event for a lease has fired (R9)."""
        mover = self._sessions.by_sid.get(mover_sid)
        if mover is None:
            return Ended(Status.GONE)
        planner = self._sessions.by_sid.get(planner_sid)
        if mover.role == PLANNER or (planner is not None and planner.group is not mover.group):
            return Ended(Status.BAD, text="quiet is said by a mover of the planner's group")
        lease = planner.leases.get(number) if planner is not None else None
        if lease is None:
            return Ended(Status.DONE)
        lease.quiet |= 1 << mover.rank
        if lease.ended:
            self._settle(lease)
        else:
            self._writes.append(lease.record(self._tree.depth(lease.node) if lease.node is not None else 0))
        return Ended(Status.OK)

    def _end(self, lease: Lease, quiet: int, whole: bool) -> Ended:
        if lease.ended:
            lease.quiet |= quiet
            self._settle(lease)
            return Ended(Status.DONE)
        lease.ended = True
        lease.quiet |= quiet
        visible = 0
        if lease.kind == LOAD and whole:
            self._counts.add(lease.asked, lease.hit, lease.reason)
        elif lease.kind == LOAD:
            self._unused += lease.hit
        if lease.kind == STORE and lease.node is not None:
            own = lease.own()
            if whole and lease.quiet == lease.session.group.everyone:
                visible = self._complete(lease, own)
            else:
                self._doom(own[-1])
        self._settle(lease)
        return Ended(Status.OK, visible, lease.dropped, lease.superseded)

    def _complete(self, lease: Lease, own: list[Node]) -> int:
        """A store's pages become READY; how many of them are visible (R4, R7)."""
        tree = self._tree
        own.reverse()
        for node in own:
            node.state = READY
            node.owner = None
        frames = array("i", b"".join([node.values for node in own]))
        self._writes.append(Ready(frames))
        self._writing -= len(frames)
        self._stored += len(frames)
        above = own[0].parent
        while above is not None and above.parent is not None and above.state == READY:
            above = above.parent
        node = cast(Node, lease.node)
        lease.node = None
        tree.unpin(node)
        tree.merge(node)
        return len(frames) if above is not None and above.parent is None else 0

    def _doom(self, top: Node) -> int:
        """Take `top`, being written, and all below out of the tree (R7); how many READY pages went."""
        tree = self._tree
        parent = cast(Node, top.parent)
        freed = array("i")
        doomed = array("i")
        touched: dict[Lease, None] = {}
        for node in reversed(tree.cut(top)):
            values = node.pages()
            values.reverse()
            if node.owner is None:
                freed.extend(values)
                continue
            lease = cast(Lease, node.owner)
            lease.out.extend(values)
            lease.dropped += len(values)
            lease.node = None
            touched[lease] = None
            self._writing -= len(values)
            self._doomed += len(values)
            if not lease.ended:
                doomed.extend(values)
        if doomed:
            self._writes.append(Doom(doomed))
        for lease in touched:
            self._charge(lease, len(lease.out))
            if not lease.ended:
                self._writes.append(lease.record(0))
        self._dropped += len(freed)
        self._give(freed)
        tree.merge(parent)
        return len(freed)

    def _settle(self, lease: Lease) -> None:
        """Let an ended lease go if every mover is quiet or gone; else quarantine its frames (R9)."""
        if not lease.settled:
            if lease.out and not lease.quarantined:
                lease.quarantined = True
                self._doomed -= len(lease.out)
                self._quarantined += len(lease.out)
                self._writes.append(Quarantine(lease.out[:]))
            self._writes.append(lease.record(self._tree.depth(lease.node) if lease.node is not None else 0))
            return
        node, lease.node = lease.node, None
        if node is not None:
            if node.state == DOOMED:
                self._give(self._clearing.release(node))
            else:
                self._tree.unpin(node)
                self._tree.merge(node)
        if lease.quarantined:
            self._quarantined -= len(lease.out)
        else:
            self._doomed -= len(lease.out)
        self._dropped += lease.dropped
        self._superseded += lease.superseded
        self._give(lease.out)
        self._charge(lease, 0)
        self._leases.remove(lease)
        self._writes.append(LeaseEnd(lease.index))
        self._spaces.release(lease.space)
        self._bury(lease.session)

    def _give(self, frames: array[int]) -> None:
        if frames:
            self._writes.append(Free(frames))
            self._free.give(frames)

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
        for space in self._spaces.flush(ns):
            stores = [lease for lease in space.leases if lease.kind == STORE and lease.node is not None]
            before = self._doomed
            for lease in stores:
                if lease.node is not None:  # not yet doomed together with another one
                    freed += self._doom(lease.own()[-1])
            doomed += self._doomed - before
            ends = [lease.node for lease in space.leases if lease.node is not None]
            kept = self._clearing.drop(space.root, ends)
            if kept:
                self._writes.append(Doom(kept))
            doomed += len(kept)
            freed += space.root.total - len(kept)
            self._spaces.release(space)
        return Flushed(freed, doomed, self._spaces.counter)

    def sweep(self, pages: int) -> int:
        """Free up to about `pages` of the pages that flushes have left behind; how many are left (R18)."""
        self._give(self._clearing.sweep(pages))
        for space in list(self._spaces.ended):
            self._spaces.release(space)
        return self._clearing.pages

    def epoch(self, ns: bytes) -> int:
        """The epoch that `ns` is in."""
        return self._spaces.epoch(ns)

    # -- what the shells see -------------------------------------------------------------------------

    def take_writes(self) -> list[Write]:
        """The table writes since the last call, in the order in which they must be applied (R15)."""
        writes = self._writes[:]
        self._writes.clear()
        return writes

    def stats(self) -> dict[str, int]:
        """Counts for people and metrics; pages unless the name says otherwise.

        `hits` are pages of loads that were finished, `unused` of loads given back by `abort`; `asked`
        is `hits` and all `missed_<reason>`.
        """
        tree = self._tree
        return {
            "frames": self._free.total,
            "frames_usable": self.limit,
            "frames_free": len(self._free),
            "frames_ready": tree.pages - self._writing,
            "frames_writing": self._writing,
            "frames_doomed": self._doomed + self._clearing.kept,
            "frames_quarantined": self._quarantined,
            "frames_clearing": self._clearing.pages,
            "frames_held": self._held(),
            "nodes": tree.nodes,
            "sessions": len(self._sessions.by_sid),
            "engines": self._sessions.engines,
            "leases": len(self._leases),
            "namespaces": len(self._spaces.by_ns),
            "epoch": self._spaces.counter,
            **self._counts.as_dict(),
            "unused": self._unused,
            "store_asked": self._store_asked,
            "store_taken": self._store_taken,
            "stored": self._stored,
            "evicted": self._evicted,
            "dropped": self._dropped,
            "superseded": self._superseded,
        }

    def check(self, budget: int | None = None) -> None:
        """Raise BrokenInvariantError if something that must be true is not.

        Without a budget all is checked, in O(pages). With one, the counts are, and the next `budget` nodes:
        called again and again when idle, it goes round the trees (R18).
        """
        check_counts(self)
        if budget is None:
            check_all(self)
            return
        for _ in range(budget):
            if self._slices is None:
                self._slices = check_slice(self)
            if next(self._slices, self) is self:
                self._slices = None
                return

    # -- helpers -------------------------------------------------------------------------------------

    def _begin(self, session: Session, number: int) -> str:
        """Use up a lease number; the text says why it cannot be (R10)."""
        if session.role != PLANNER:
            return "a mover has no leases of its own"
        if not session.last < number < 1 << 63:
            return f"lease {number}: numbers rise within a session, the last was {session.last}"
        session.last = number
        self._writes.append(SessionNumber(session.slot, number))
        return ""

    def _charge(self, lease: Lease, pages: int) -> None:
        lease.session.charge += pages - lease.charge
        lease.charge = pages

    def _held(self) -> int:
        """Frames that are pinned, being written, doomed or quarantined."""
        return self._tree.held + self._doomed + self._quarantined + self._clearing.kept

    def _cap(self) -> int:
        """Pages that one session may hold: half of the pool, less when several engines are attached (R12)."""
        return max(self.limit // (1 + max(self._sessions.engines, 1)), 1)

    def _room(self, session: Session, pinned: int, newly: int) -> int:
        """Pages that the session may hold beside `pinned` ones, of which `newly` are not held by anybody yet.

        Pages that several leases share are counted once where that can be known: a session holds no
        more than its leases' sum, and no more than all hold together.
        """
        cap = self._cap()
        return max(cap - session.charge - pinned, cap - self._held() - newly)


def _check_keys(ns: bytes, keys: bytes) -> None:
    if len(ns) != NS_BYTES:
        raise UsageError(f"ns of {len(ns)} bytes: expected {NS_BYTES}")
    if len(keys) % KEY_BYTES:
        raise UsageError(f"{len(keys)} bytes of keys: expected {KEY_BYTES} for each page")


def _last_frame(node: Node | None) -> int:
    if node is None:
        raise UsageError("a root has no frame")
    return array("i", node.values[-VALUE_BYTES:])[0]


def _trim(match: Match, pages: int) -> tuple[Node, int]:
    """The node in which the first `pages` pages of `match` end, and how many of its pages are among them."""
    node, start = match.node, match.pages - match.offset
    while start >= pages:
        node = cast(Node, node.parent)
        start -= node.count
    return node, pages - start


def _plan(path: list[Node], match: Match, deadline: float) -> tuple[int, list[Node], int, int]:
    """Where a store of what `match` found begins.

    Returns the first page to write, the run of nodes from there on whose writers began before `deadline`
    (R8), the pages of that run, and the pages that others are writing in time.
    """
    start, page, pending, run_pages = match.pages, 0, 0, 0
    run: list[Node] = []
    closed = False
    for node in path:
        count = match.offset if node is match.node else node.count
        stale = node.state == WRITING and cast(Lease, node.owner).since < deadline
        if stale and not closed:
            if not run:
                start = page
            run.append(node)
            run_pages += count
        else:
            closed = bool(run)
            if node.state == WRITING:
                pending += count
        page += count
    return start, run, run_pages, pending
