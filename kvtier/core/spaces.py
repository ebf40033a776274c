"""Namespaces and their epochs (R3, R13). Standard library only.

Epochs count pool-wide. A namespace has an entry while it has pages; one without an entry is in the epoch
`absent`. A flush ends the entry, which makes all that hung under it unreachable, also for a
rebuild, and the namespace's next store begins a new one. Always true: an entry's number is used
again only when no page and no lease of it is left.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvtier.core.prefix_tree import PrefixTree, Root
from kvtier.core.writes import EpochRecord, NamespaceEnd, PoolEpoch, Write

if TYPE_CHECKING:
    from kvtier.core.leases import Lease


class Space:
    """One entry: a namespace in one epoch, with the root of its tree."""

    __slots__ = ("epoch", "index", "leases", "ns", "root")

    def __init__(self, index: int, ns: bytes, epoch: int, root: Root) -> None:
        self.index = index
        self.ns = ns
        self.epoch = epoch
        self.root = root
        self.leases: set[Lease] = set()

    @property
    def empty(self) -> bool:
        """No page and no lease is left."""
        return not self.root.total and not self.leases


class Spaces:
    """All entries; `by_ns`: the one used last at the end. The counter of epochs starts at 1."""

    def __init__(self, size: int, tree: PrefixTree, writes: list[Write]) -> None:
        self.size = size
        self.by_ns: OrderedDict[bytes, Space] = OrderedDict()
        self.ended: set[Space] = set()
        self.counter = 1
        self.absent = 1
        self._tree = tree
        self._writes = writes
        self._free: list[int] = []
        self._next = 0

    def epoch(self, ns: bytes) -> int:
        """The epoch of `ns` now, whether it has an entry or not."""
        space = self.by_ns.get(ns)
        return self.absent if space is None else space.epoch

    def get_or_add(self, ns: bytes) -> Space | None:
        """The entry of `ns`, made if there is none; None when the table is full of namespaces in use."""
        space = self.by_ns.get(ns)
        if space is not None:
            return space
        index = self._index()
        if index is None:
            return None
        space = Space(index, ns, self.absent, self._tree.new_root())
        self.by_ns[ns] = space
        self._writes.append(EpochRecord(index, ns, space.epoch))
        return space

    def _index(self) -> int | None:
        if not self._free and self._next == self.size:
            for space in [space for space in self.by_ns.values() if space.empty]:
                self._retire(space)
                self.absent = max(self.absent, space.epoch)
                self._tree.roots.discard(space.root)
                self._free.append(space.index)
            self._writes.append(PoolEpoch(self.counter, self.absent))
        if self._free:
            return self._free.pop()
        if self._next == self.size:
            return None
        self._next += 1
        return self._next - 1

    def use(self, space: Space) -> None:
        """A lease was given in `space`."""
        self.by_ns.move_to_end(space.ns)

    def give_up(self) -> Space | None:
        """End the entry that was used longest ago, of those without leases; None when all have some.

        Its pages are the caller's to drop; then `release` lets its number be used again.
        """
        space = next((space for space in self.by_ns.values() if not space.leases), None)
        if space is not None:
            self._retire(space)
            self.absent = max(self.absent, space.epoch)
            self._writes.append(PoolEpoch(self.counter, self.absent))
            self.ended.add(space)
        return space

    def _retire(self, space: Space) -> None:
        del self.by_ns[space.ns]
        self._writes.append(NamespaceEnd(space.index))

    def flush(self, ns: bytes | None) -> list[Space]:
        """Raise the epoch of one namespace, or of all, and return the entries that this ended."""
        self.counter += 1
        self.absent = self.counter
        spaces = list(self.by_ns.values()) if ns is None else [self.by_ns[ns]] if ns in self.by_ns else []
        self._writes.append(PoolEpoch(self.counter, self.absent))
        for space in spaces:
            self._retire(space)
            self.ended.add(space)
        return spaces

    def release(self, space: Space) -> None:
        """Let the number of an ended entry be used again if nothing of it is left."""
        if space in self.ended and space.empty:
            self.ended.remove(space)
            self._free.append(space.index)
