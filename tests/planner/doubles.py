"""Doubles for a planner's two neighbours: a sidecar with its client in one object, and movers.

`FakeClient` speaks the bodies of `wire.messages` in process. Requests wait in `inbox` until `serve()`; the
test says when that is, and what goes wrong (`down`, `refuse`, `late`, `drop_session`). It keeps frames and
leases by the protocol's rules in the plainest way there is, raises `Violation` when the planner breaks one,
and `check()` says whether anything leaked. `FakeMovers` finish the first copy of any lane when they are told,
let it fail, or find it cancelled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtier.errors import Status
from kvtier.keys import KEY_BYTES, PageChain
from kvtier.layout import KVLayout, Plane
from kvtier.wire.messages import (
    Abort,
    BeginLoad,
    BeginStore,
    Ended,
    EndReply,
    Finish,
    LoadGrant,
    LoadReply,
    Lookup,
    LookupReply,
    Reply,
    StoreGrant,
    StoreReply,
)
from kvtier.wire.plan import Cancel, Copy, Kind, Progress, Reason, decode, pool_tag

LAYOUT = KVLayout(page_tokens=8, shards=((Plane("0.kv", 16, 1),),), format="test")


def chain_of(tokens, namespace=None, layout=LAYOUT) -> PageChain:
    """A chain over `tokens` (a count: 0, 1, 2, ...; or the ids themselves)."""
    chain = PageChain(namespace or layout.namespace("model"), layout.page_tokens)
    chain.extend(list(range(tokens)) if isinstance(tokens, int) else list(tokens))
    return chain


class Violation(AssertionError):
    """The planner broke a rule of the protocol."""


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakePool:
    """What a planner sees of the mapped pool."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self.shape = self


@dataclass
class Page:
    frame: int
    key: bytes
    parent: bytes
    state: str  # "writing", "ready", "doomed"
    lease: int = 0
    pins: int = 0


@dataclass
class Lease:
    number: int
    kind: Kind
    pages: list[Page] = field(default_factory=list)
    pinned: list[Page] = field(default_factory=list)


class FakeClient:
    """One session at a time with a sidecar of `frames` pages. See the module."""

    def __init__(self, frames: int = 64, clock: Clock | None = None, layout: KVLayout = LAYOUT) -> None:
        self.layout = layout
        self.clock = clock or Clock()
        self.frames = frames
        self.attachment_no = 1
        self.pool_id = b"p1"
        self.complete = True
        self.pool = FakePool(frames)
        self.down = False
        """Nobody is there: nothing can be posted."""
        self.refuse: Status | None = None
        """Every begin is answered with this status."""
        self.distort: Callable[[Any], Any] = lambda grant: grant
        """What becomes of each grant on its way."""
        self.auto = False
        """Serve what was posted whenever the planner waits."""
        self.posted: list[object] = []
        self.epoch = 1
        self._number = 0
        self._rid = 0
        self._last = 0
        self.inbox: list[tuple[int, object]] = []
        self._replies: list[Reply] = []
        self._reset()

    def _reset(self) -> None:
        self.pages: dict[bytes, Page] = {}
        self.free = list(range(self.frames))
        self.gens = [1] * self.frames
        self.leases: dict[int, Lease] = {}
        self._last = 0

    # --- the client's face ---

    @property
    def attached(self) -> bool:
        return not self.down

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def post(self, body, timeout_s=None):
        if self.down:
            return None
        self._rid += 1
        self.posted.append(body)
        self.inbox.append((self._rid, body))
        return self._rid

    def poll(self) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def wait(self, timeout_s, fd=None) -> bool:
        assert timeout_s >= 0
        if self.auto:
            self.serve()
        if not self._replies:
            self.clock.now += timeout_s
        return bool(self._replies)

    # --- what a test may do ---

    def serve(self, count: int | None = None) -> None:
        """Answer the first `count` requests (all by default), in order."""
        taken = self.inbox[:count]
        del self.inbox[: len(taken)]
        for rid, body in taken:
            self._replies.append(Reply(rid, 1, Status.OK, body=self._answer(body)))

    def late(self) -> None:
        """The deadline of every unanswered begin passes: AWAY, and the client undoes it (R10)."""
        for rid, body in list(self.inbox):
            if isinstance(body, BeginLoad | BeginStore | Lookup):
                self._replies.append(Reply(rid, 1, Status.AWAY, "no answer in time"))
                self.inbox.remove((rid, body))
            if isinstance(body, BeginLoad | BeginStore):
                # Executed late, then aborted: as if never.
                self._last = max(self._last, max(chain.number for chain in body.chains))

    def drop_session(self, back: bool = True) -> None:
        """The server has gone, with all it had; `back`: another one has been attached to."""
        self._replies += [Reply(rid, 1, Status.AWAY, "the server has gone") for rid, _ in self.inbox]
        self.inbox.clear()
        self._reset()
        self.down = True
        if back:
            self.come_back()

    def come_back(self) -> None:
        """A new, empty server."""
        self.down = False
        self.attachment_no += 1
        self.pool_id = b"p%d" % self.attachment_no
        self.epoch += 1

    def store(self, chain: PageChain, pages: int | None = None) -> None:
        """Pages of `chain` that are there already."""
        parent = chain.namespace
        for page in range(chain.pages if pages is None else pages):
            key = chain.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            if key not in self.pages:
                self.pages[key] = Page(self._take_frame(), key, parent, "ready")
            parent = key

    def visible(self, chain: PageChain) -> int:
        """Pages of `chain` that can be found."""
        return len(self._ready(chain.namespace, chain.keys))

    def check(self) -> None:
        """Every frame is in one place; pins belong to leases."""
        owned = [page.frame for page in self.pages.values()]
        owned += [
            page.frame for lease in self.leases.values() for page in lease.pages if page.state == "doomed"
        ]
        assert sorted(owned + self.free) == list(range(self.frames)), "a frame is lost or in two places"
        pins: dict[int, int] = {}
        for lease in self.leases.values():
            for page in lease.pinned:
                if self.pages.get(page.key) is page:  # a writer's page may have been aborted under its reader
                    pins[page.frame] = pins.get(page.frame, 0) + 1
        assert {page.frame: page.pins for page in self.pages.values() if page.pins} == pins

    # --- the sidecar ---

    def _answer(self, body):
        if isinstance(body, BeginLoad):
            return LoadReply(tuple(self.distort(self._begin_load(chain)) for chain in body.chains))
        if isinstance(body, Lookup):
            return LookupReply(len(self._ready(body.ns, body.keys)), 0, self.epoch)
        if isinstance(body, BeginStore):
            return StoreReply(tuple(self.distort(self._begin_store(chain)) for chain in body.chains))
        if isinstance(body, Finish | Abort):
            ends = tuple(self._end(end, isinstance(body, Finish)) for end in body.ends)
            return EndReply(body.op, ends)
        raise Violation(f"the planner posted {body}")

    def _new_number(self, number: int) -> None:
        if number <= self._last:
            raise Violation(f"number {number} is not above {self._last} (R10)")
        self._last = number

    def _ready(self, ns: bytes, keys: bytes) -> list[Page]:
        pages = []
        for at in range(0, len(keys), KEY_BYTES):
            page = self.pages.get(keys[at : at + KEY_BYTES])
            if page is None or page.state != "ready":
                break
            pages.append(page)
        return pages

    def _begin_load(self, chain) -> LoadGrant:
        self._new_number(chain.number)
        if chain.at_least < 1 or chain.first + chain.at_least > len(chain.keys) // KEY_BYTES:
            raise Violation(f"a load that cannot be: {chain}")
        if self.refuse is not None:
            return LoadGrant(chain.number, self.refuse, self.epoch)
        ready = self._ready(chain.ns, chain.keys)
        if len(ready) - chain.first < chain.at_least:
            return LoadGrant(chain.number, Status.MISS, self.epoch, len(ready))
        lease = self.leases[chain.number] = Lease(chain.number, Kind.LOAD, pinned=list(ready))
        for page in ready:
            page.pins += 1
        frames = [page.frame for page in ready[chain.first :]]
        return LoadGrant(
            lease.number,
            Status.OK,
            self.epoch,
            len(ready),
            np.array(frames, np.int32),
            np.array([self.gens[frame] for frame in frames], np.uint32),
        )

    def _begin_store(self, chain) -> StoreGrant:
        self._new_number(chain.number)
        if self.refuse is not None:
            return StoreGrant(chain.number, self.refuse, self.epoch)
        if chain.epoch and chain.epoch != self.epoch:
            return StoreGrant(chain.number, Status.MISS, self.epoch, reason="flushed")
        lease = Lease(chain.number, Kind.OFFLOAD)
        parent, start, pending = chain.ns, 0, 0
        total = len(chain.keys) // KEY_BYTES
        for page in range(total):
            key = chain.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            found = self.pages.get(key)
            if found is None:
                break
            found.pins += 1  # R5: not evicted while this store looks for room
            lease.pinned.append(found)
            pending += found.state == "writing"
            parent, start = key, page + 1
        if start == total:
            self._unpin(lease)
            return StoreGrant(chain.number, Status.DONE, self.epoch, start, 0, pending)
        for page in range(start, total):
            if not self.free and not self._evict():
                break
            key = chain.keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            made = self.pages[key] = Page(self._take_frame(), key, parent, "writing", lease.number)
            lease.pages.append(made)
            parent = key
        if not lease.pages:
            self._unpin(lease)
            return StoreGrant(chain.number, Status.FULL, self.epoch, start, 0, pending, reason="full")
        self.leases[lease.number] = lease
        taken = len(lease.pages)
        frames = np.array([page.frame for page in lease.pages], np.int32)
        reason = "full" if start + taken < total else ""
        return StoreGrant(lease.number, Status.OK, self.epoch, start, taken, pending, frames, reason)

    def _end(self, end, finish: bool) -> Ended:
        lease = self.leases.pop(end.number, None)
        self._last = max(self._last, end.number)
        if lease is None:
            return Ended(end.number, Status.DONE)
        self._unpin(lease)
        dropped = sum(page.state == "doomed" for page in lease.pages)
        for page in lease.pages:
            if page.state == "doomed":
                self._free_frame(page)
            elif finish:
                page.state = "ready"
        if not finish:
            for page in lease.pages:
                if self.pages.get(page.key) is page:
                    self._doom_below(page, lease.number)
                    del self.pages[page.key]
                    self._free_frame(page)
        return Ended(end.number, Status.OK, visible=len(lease.pages) - dropped, dropped=dropped)

    def _doom_below(self, page: Page, ending: int) -> None:
        for child in [child for child in self.pages.values() if child.parent == page.key]:
            if child.lease == ending:
                continue  # of the same store: its own turn comes
            self._doom_below(child, ending)
            del self.pages[child.key]
            if child.state == "writing":
                child.state = "doomed"
            else:
                self._free_frame(child)

    def _unpin(self, lease: Lease) -> None:
        for page in lease.pinned:
            page.pins -= 1

    def _evict(self) -> bool:
        parents = {page.parent for page in self.pages.values()}
        for key, page in self.pages.items():
            if page.state == "ready" and not page.pins and key not in parents:
                del self.pages[key]
                self._free_frame(page)
                return True
        return False

    def _take_frame(self) -> int:
        if not self.free:
            raise Violation("no frame is free")
        frame = self.free.pop(0)
        self.gens[frame] += 1
        return frame

    def _free_frame(self, page: Page) -> None:
        self.free.append(page.frame)


class FakeMovers:
    """The movers of one engine: one queue a lane on each rank, moved on by the test."""

    def __init__(self, client: FakeClient, ranks: int = 1) -> None:
        self.client = client
        self.progress = [Progress() for _ in range(ranks)]
        self.queues: list[dict[int, list[Copy]]] = [{} for _ in range(ranks)]
        self.cancelled: list[set[int]] = [set() for _ in range(ranks)]
        self.begun: list[set[int]] = [set() for _ in range(ranks)]
        self.copies: list[Copy] = []

    def apply(self, plan) -> None:
        pool, commands = decode(plan)
        for command in commands:
            for rank, queues in enumerate(self.queues):
                if isinstance(command, Cancel):
                    self.cancelled[rank].add(command.task)
                    continue
                if pool != pool_tag(self.client.pool_id):
                    raise Violation("a plan for another pool")
                queue = queues.setdefault(int(command.lane), [])
                if queue and queue[-1].seq >= command.seq:
                    raise Violation("sequence numbers of a lane must rise")
                queue.append(command)
        self.copies += [command for command in commands if isinstance(command, Copy)]

    def lanes(self, rank: int = 0) -> list[int]:
        """Lanes in which something waits."""
        return [lane for lane, queue in self.queues[rank].items() if queue]

    def begin(self, rank: int, lane: int) -> None:
        """The first copy of `lane` begins: a cancel comes too late for it."""
        self.begun[rank].add(self.queues[rank][lane][0].task)

    def finish(self, rank: int = 0, lane: int | None = None, failure: Reason | None = None) -> Copy:
        """The first copy of `lane` (or of any) has finished on `rank`."""
        lane = self.lanes(rank)[0] if lane is None else lane
        copy = self.queues[rank][lane].pop(0)
        if copy.task in self.cancelled[rank] and copy.task not in self.begun[rank]:
            failure = Reason.CANCELLED
        if failure is not None:
            self.progress[rank].fail(copy.task, failure)
        self.progress[rank].finish(copy.lane, copy.seq)
        return copy

    def finish_all(self) -> None:
        """Everything that was applied has finished on every rank."""
        for rank in range(len(self.queues)):
            while self.lanes(rank):
                self.finish(rank)
