"""Leases: who may read or fill which pages, until when it is given back. Standard library only.

Always true: every pin of the host's tree and every WRITING, DOOMED or quarantined frame belongs to one
of these, and each of these to a session. Time ends none of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from kvtier.core.prefix_tree import Node
from kvtier.core.sessions import Session
from kvtier.core.spaces import Space
from kvtier.core.writes import LeaseRecord
from kvtier.errors import UsageError


class Lease:
    """One load or store lease.

    `node`: where its pin ends, None when it has none any more. A store's own pages in the tree are the
    nodes from `node` upwards that it owns. `out`: frames of its own that have left the tree (DOOMED, or
    QUARANTINED once `ended`). `quiet`: bits of movers known to be done. `charge`: pages that count against
    the session's cap. `asked`, `hit` and `reason` of a load are counted when it is finished. `since`: when a
    store began. Whoever makes a lease sets `node`, and what its kind has.
    """

    __slots__ = (
        "asked",
        "charge",
        "dropped",
        "ended",
        "hit",
        "index",
        "kind",
        "node",
        "number",
        "out",
        "quarantined",
        "quiet",
        "reason",
        "session",
        "since",
        "space",
        "superseded",
    )

    node: Node | None
    since: float
    asked: int
    hit: int
    reason: str

    def __init__(self, index: int, session: Session, number: int, kind: int, space: Space) -> None:
        self.index = index
        self.session = session
        self.number = number
        self.kind = kind
        self.space = space
        self.out: array[int] = array("i")
        self.quiet = 0
        self.ended = False
        self.quarantined = False
        self.dropped = 0
        self.superseded = 0
        self.charge = 0

    @property
    def settled(self) -> bool:
        """Every mover of the group is quiet or gone (R9)."""
        group = self.session.group
        return (self.quiet | group.gone) == group.everyone

    def own(self) -> list[Node]:
        """The nodes that a store is filling, deepest first."""
        nodes: list[Node] = []
        node = self.node
        while node is not None and node.owner is self:
            nodes.append(node)
            node = node.parent
        return nodes

    def record(self, pages: int) -> LeaseRecord:
        """Its record for the table; `pages` is the length of the chain that it pins."""
        deepest = -1
        if self.node is not None:
            deepest = self.node.last()
        return LeaseRecord(
            self.index, self.session.sid, self.number, self.kind, deepest, pages, self.space.epoch, self.quiet
        )


class LeaseTable:
    """Numbers the records of running leases, 0 to `size - 1`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._leases: dict[int, Lease] = {}
        self._free: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    @property
    def full(self) -> bool:
        return len(self._leases) == self.size

    def add(self, session: Session, number: int, kind: int, space: Space) -> Lease:
        """A new lease of `session`; the table must not be full."""
        if self._free:
            index = self._free.pop()
        else:
            index = self._next
            self._next += 1
        lease = Lease(index, session, number, kind, space)
        self._leases[index] = lease
        session.leases[number] = lease
        session.group.used = True
        space.leases.add(lease)
        return lease

    def remove(self, lease: Lease) -> None:
        """Forget a lease whose last frame has left it."""
        del self._leases[lease.index]
        del lease.session.leases[lease.number]
        lease.space.leases.discard(lease)
        self._free.append(lease.index)


def quiet_mask(ranks: int, quiet: Iterable[int]) -> int:
    """The bits of the movers in `quiet`; UsageError for a rank that the group does not have."""
    mask = 0
    for rank in quiet:
        if not 0 <= rank < ranks:
            raise UsageError(f"mover {rank} is quiet: the group has ranks 0 to {ranks - 1}")
        mask |= 1 << rank
    return mask
