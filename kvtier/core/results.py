"""What `HostCache` answers: plain values. Standard library only.

`reason` says in one word why less was given than asked, `""` when all was; the words are `Reason`'s.
`text` is for people. Frames are `array('i')` and the receiver's to keep.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvtier.errors import Status


class Reason:
    """Why pages were not given; each has a counter (`kvtier.core.counters`)."""

    ABSENT = "absent"
    """Not in the cache."""
    PENDING = "pending"
    """There, but not visible yet: they, or an ancestor, are being written."""
    UNMAPPED = "unmapped"
    """Beyond what the group's movers have mapped so far (R28)."""
    CAP = "cap"
    """The session's cap on pinned frames (R12)."""
    TOO_FEW = "too_few"
    """A hit shorter than the caller wanted."""
    FULL = "full"
    """No frame is free and nothing more can be evicted."""
    FLUSHED = "flushed"
    """Begun in an epoch that a flush has ended (R13)."""
    INCOMPLETE = "incomplete"
    """Not all movers of the group are attached (R2), or one of them has died."""
    SUSPECT = "suspect"
    """A session of the group may be dying: no new leases (R20)."""
    DRAINING = "draining"
    """The operator is emptying the sidecar: no new leases."""
    NAMESPACES = "namespaces"
    """The table of namespaces is full."""
    LEASES = "leases"
    """The table of leases is full."""


NO_FRAMES: array[int] = array("i")
"""Shared and empty; do not append to it."""


class Attached(NamedTuple):
    """Answer to `attach`. `slot` is the session's index (also its byte in the lock file), -1 if refused."""

    status: Status
    slot: int = -1
    complete: bool = False
    """All of the group's sessions are attached: leases are granted from now on."""
    text: str = ""


class Found(NamedTuple):
    """Answer to `lookup`: of the keys, `ready` leading pages are visible, `pending` more are on their way."""

    status: Status
    ready: int
    pending: int
    epoch: int


class LoadGrant(NamedTuple):
    """Answer to `begin_load`. With OK, `frames` holds the pages from `first` on; else no lease was made.

    `ready`: visible pages from page 0 on, granted or not.
    """

    status: Status
    frames: array[int]
    epoch: int
    ready: int
    reason: str = ""
    text: str = ""

    @staticmethod
    def none(status: Status, epoch: int, ready: int = 0, reason: str = "", text: str = "") -> LoadGrant:
        """No lease."""
        return LoadGrant(status, NO_FRAMES, epoch, ready, reason, text)


class StoreGrant(NamedTuple):
    """Answer to `begin_store`. Write page `start + i` into `frames[i]`; `taken == 0` means no lease was made.

    All pages before `start` are stored or being written by others. `pending`: pages of the request that
    others are writing. OK with `taken == 0`: nothing is left to write.
    """

    status: Status
    start: int
    frames: array[int]
    taken: int
    pending: int
    epoch: int
    reason: str = ""
    text: str = ""

    @staticmethod
    def none(
        status: Status, epoch: int, reason: str = "", start: int = 0, pending: int = 0, text: str = ""
    ) -> StoreGrant:
        """No lease."""
        return StoreGrant(status, start, NO_FRAMES, 0, pending, epoch, reason, text)


class Ended(NamedTuple):
    """Answer to `finish`, `abort` and `quiet`: OK the first time, DONE for what has ended already (R10).

    Of a store's own pages, `visible` can be found now, `dropped` were lost to an abort, a flush or a doomed
    ancestor, `superseded` were taken over by another writer (R8). The rest is READY under ancestors
    that are still being written.
    """

    status: Status
    visible: int = 0
    dropped: int = 0
    superseded: int = 0
    text: str = ""


class Flushed(NamedTuple):
    """Answer to `flush`: pages gone, pages that go when their leases end, and the epoch from now on."""

    freed: int
    doomed: int
    epoch: int


class Holding(NamedTuple):
    """What one session holds. `dead`: its process is proven dead, and its frames wait for its group's movers.

    `pages` counts a page once for each of the session's leases that holds it; `mapped`: frames below it are
    mapped.
    """

    sid: int
    group: str
    role: str
    rank: int
    ranks: int
    dead: bool
    leases: int
    pages: int
    mapped: int
