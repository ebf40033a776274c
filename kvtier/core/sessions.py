"""Sessions and groups: who is attached, and to whom leases may be granted (R1, R2, R20). Standard library
only.

Always true: a session id and a slot belong to one session; a group that has had a lease never gains a
member once it was whole.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvtier.core.results import Attached, Reason
from kvtier.core.writes import MOVER, PLANNER
from kvtier.errors import Status, UsageError

if TYPE_CHECKING:
    from kvtier.core.leases import Lease

MAX_RANKS = 64
"""Movers of a group: the quiet ones are a 64-bit mask in the lease table."""

ROLES = {"planner": PLANNER, "mover": MOVER}


class Session:
    """One attach. `mapped`: it maps the frames below it; -1: it never said. `charge`: pages that it holds."""

    __slots__ = (
        "charge",
        "closed",
        "dead",
        "group",
        "last",
        "leases",
        "mapped",
        "rank",
        "role",
        "sid",
        "slot",
        "suspect",
    )

    def __init__(self, sid: int, slot: int, group: Group, role: int, rank: int) -> None:
        self.sid = sid
        self.slot = slot
        self.group = group
        self.role = role
        self.rank = rank
        self.mapped = -1
        self.suspect = False
        self.closed = False  # has detached without being quiet: only its death frees anything (R11)
        self.dead = False  # lingers until its last lease has left
        self.last = 0
        self.leases: dict[int, Lease] = {}
        self.charge = 0


class Group:
    """One start of one engine. `gone`: bits of movers that are dead or have detached when quiet. `used`:
    it has had a lease.
    """

    __slots__ = ("closed", "gone", "hash", "movers", "name", "planner", "ranks", "used")

    def __init__(self, name: str, ranks: int) -> None:
        self.name = name
        self.hash = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.ranks = ranks
        self.planner: Session | None = None
        self.movers: dict[int, Session] = {}
        self.gone = 0
        self.closed = False
        self.used = False

    @property
    def everyone(self) -> int:
        """The mask with a bit for each mover."""
        return (1 << self.ranks) - 1

    @property
    def mark(self) -> int:
        """Frames below it are mapped by all movers, and by the planner if it maps any (R28)."""
        marks = [mover.mapped for mover in self.movers.values()]
        if self.planner is not None and self.planner.mapped >= 0:
            marks.append(self.planner.mapped)
        return max(min(marks, default=0), 0)

    def refusal(self) -> str:
        """Why the group gets no lease now; empty when it does."""
        if not self.closed or len(self.movers) < self.ranks:
            return Reason.INCOMPLETE
        for mover in self.movers.values():
            if mover.suspect or mover.closed:
                return Reason.SUSPECT
        return ""


class Sessions:
    """All sessions by id, all groups by name."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.by_sid: dict[int, Session] = {}
        self.groups: dict[str, Group] = {}
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def engines(self) -> int:
        """Groups that may hold leases."""
        count = 0
        for group in self.groups.values():
            count += group.closed
        return count

    def attach(self, sid: int, name: str, role: str, rank: int, ranks: int) -> Attached:
        """Add a session, and its group when it is the first; the group closes when it is whole (R2)."""
        if role not in ROLES:
            raise UsageError(f"role={role!r}: expected planner or mover")
        if not 0 < sid < 1 << 64:
            raise UsageError(f"sid={sid}: expected 64 random bits, not 0")
        if sid in self.by_sid:
            raise UsageError(f"session {sid:#x} is attached already")
        if not 0 < ranks <= MAX_RANKS or not 0 <= rank < ranks:
            return Attached(
                Status.BAD, text=f"rank {rank} of {ranks}: expected 0 <= rank < ranks <= {MAX_RANKS}"
            )
        group = self.groups.get(name)
        if group is not None:
            if group.closed:
                return Attached(
                    Status.BUSY,
                    text=f"group {name!r} is complete: a restarted engine is a new group; an id is free "
                    "again when all its sessions are dead",
                )
            if group.ranks != ranks:
                return Attached(
                    Status.BAD, text=f"group {name!r} has {group.ranks} ranks, this session says {ranks}"
                )
            if (group.planner is not None) if role == "planner" else (rank in group.movers):
                return Attached(Status.BAD, text=f"group {name!r} has its {role} of rank {rank} already")
        if not self._free_slots:
            return Attached(Status.BUSY, text=f"all {self.slots} sessions are taken")
        if group is None:
            group = self.groups[name] = Group(name, ranks)
        session = Session(sid, self._free_slots.pop(), group, ROLES[role], rank)
        self.by_sid[sid] = session
        if session.role == PLANNER:
            group.planner = session
        else:
            group.movers[rank] = session
        group.closed = group.planner is not None and len(group.movers) == ranks
        return Attached(Status.OK, session.slot, group.closed)

    def remove(self, session: Session) -> None:
        """Forget a session that holds nothing. A mover of a closed group leaves its bit in `gone`; a group
        that never had a lease is open again.
        """
        del self.by_sid[session.sid]
        self._free_slots.append(session.slot)
        group = session.group
        group.closed = group.closed and group.used
        if session.role == PLANNER:
            group.planner = None
        else:
            del group.movers[session.rank]
            if group.closed:
                group.gone |= 1 << session.rank
        if group.planner is None and not group.movers:
            del self.groups[group.name]
