"""Who has which frame: all that `HostCache` knows, and the acts that every transition is made of.

Standard library only. The transitions are in `host_cache`, `stores` and `ends`; `audit` checks what must be
true of a ledger between any two of them.
"""

from __future__ import annotations

from array import array

from kvtier.core.clearing import Clearing
from kvtier.core.counters import Counters
from kvtier.core.frames import FreeFrames
from kvtier.core.leases import Lease, LeaseTable
from kvtier.core.policy import Policy
from kvtier.core.prefix_tree import Node, PrefixTree
from kvtier.core.results import NO_FRAMES
from kvtier.core.sessions import Session, Sessions
from kvtier.core.spaces import Spaces
from kvtier.core.writes import Free, LeaseRecord, SessionEnd, Write
from kvtier.keys import KEY_BYTES


class Ledger:
    """Frames, trees, leases, sessions, namespaces, the writes to come, and counts.

    `writing` pages are in the tree, `doomed` and `quarantined` frames are out of it, under leases.
    """

    def __init__(
        self, frames: int, sessions: int, leases: int, namespaces: int, policy: Policy[Node] | None
    ) -> None:
        self.writes: list[Write] = []
        self.free = FreeFrames(frames)
        self.tree = PrefixTree(KEY_BYTES, policy)
        self.clearing = Clearing(self.tree)
        self.sessions = Sessions(sessions)
        self.leases = LeaseTable(leases)
        self.spaces = Spaces(namespaces, self.tree, self.writes)
        self.writing = self.doomed = self.quarantined = 0
        self.counts = Counters()
        self.unused = self.store_asked = self.store_taken = 0
        self.stored = self.evicted = self.dropped = self.superseded = 0

    @property
    def held(self) -> int:
        """Frames that are pinned, being written, doomed or quarantined."""
        return self.tree.held + self.doomed + self.quarantined + self.clearing.kept

    @property
    def cap(self) -> int:
        """Pages that one session may hold: half of the pool, less when several engines are attached (R12)."""
        return max(self.free.limit // (1 + max(self.sessions.engines, 1)), 1)

    def room(self, session: Session, pinned: int, newly: int) -> int:
        """Pages that the session may hold beside `pinned` ones, of which `newly` are not held by anybody yet.

        Pages that several leases share are counted once where that can be known: a session holds no
        more than its leases' sum, and no more than all hold together.
        """
        cap = self.cap
        return max(cap - session.charge - pinned, cap - self.held - newly)

    def charge(self, lease: Lease, pages: int) -> None:
        """`lease` holds `pages` pages from now on."""
        lease.session.charge += pages - lease.charge
        lease.charge = pages

    def record(self, lease: Lease) -> LeaseRecord:
        """The record of `lease` as it is now. O(nodes) of its path."""
        return lease.record(self.tree.depth(lease.node) if lease.node is not None else 0)

    def give(self, frames: array[int]) -> None:
        """These frames are free: tails before heads."""
        if frames:
            self.writes.append(Free(frames))
            self.free.give(frames)

    def obtain(self, count: int, mark: int) -> array[int]:
        """`count` frames: free, then swept, then evicted ones; fewer when some are not below `mark`."""
        free = self.free
        short = count - len(free)
        if short > 0:
            self.sweep(short)
            short = count - len(free)
        evicted = NO_FRAMES
        if short > 0:
            evicted = self.tree.evict(short)
            self.evicted += len(evicted)
            self.writes.append(Free(evicted))
        if mark < free.limit:
            free.give(evicted)
            return free.take_below(count, mark)
        if not evicted:
            return free.take(count)
        frames = evicted[::-1]
        frames.extend(free.take(len(free)))
        return frames

    def sweep(self, pages: int) -> int:
        """Free up to about `pages` of the pages that flushes have left behind; how many are left (R18)."""
        self.give(self.clearing.sweep(pages))
        for space in list(self.spaces.ended):
            self.spaces.release(space)
        return self.clearing.pages

    def give_up_namespace(self) -> None:
        """The table of namespaces is full: the one used longest ago is evicted whole, to be swept (R14)."""
        space = self.spaces.give_up()
        if space is not None:
            self.evicted += space.root.total
            self.clearing.drop(space.root, [])
            self.spaces.release(space)

    def bury(self, session: Session) -> None:
        """Forget a dead session when its last lease has left it."""
        if session.dead and not session.leases:
            self.sessions.remove(session)
            self.writes.append(SessionEnd(session.slot))
