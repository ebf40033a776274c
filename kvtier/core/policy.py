"""Which idle leaf goes first.

A policy is told by `PrefixTree` which leaves are idle (no pin, no child) and hands out the one to go
next. It sees leaves only, so no decision ever scans pages or pinned nodes. Standard library only.

Always true: exactly the idle leaves of the tree are in its policy, each once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)


class Policy(Protocol[T]):
    """What `PrefixTree` asks of a policy; every call is O(1) or close to it."""

    def add(self, leaf: T) -> None:
        """`leaf` has become idle by use: its pin was released, or it was just filled."""

    def add_reopened(self, leaf: T, used_since: bool) -> None:
        """`leaf` has become childless because its last child was evicted.

        `used_since`: it was itself the end of a use after that child's last.
        """

    def remove(self, leaf: T) -> None:
        """`leaf` is idle no longer: pinned, got a child, was merged or removed."""

    def touch(self, leaf: T) -> None:
        """The idle `leaf` was used."""

    def pop(self) -> T:
        """Remove and return the leaf to go next; KeyError when there is none."""

    def __len__(self) -> int:
        """How many leaves are idle."""

    def __contains__(self, leaf: object) -> bool:
        """Whether `leaf` is idle."""

    def __iter__(self) -> Iterator[T]:
        """The idle leaves, next to go first."""


class LeafLRU(Generic[T]):
    """Least recently used leaf first.

    Order is the order of last use. A node that eviction has left childless is as old as the child
    that just went, unless it was used itself since: then it counts as used now.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[T, None] = OrderedDict()

    def add(self, leaf: T) -> None:
        self._order[leaf] = None

    def add_reopened(self, leaf: T, used_since: bool) -> None:
        self._order[leaf] = None
        if not used_since:
            self._order.move_to_end(leaf, last=False)

    def remove(self, leaf: T) -> None:
        del self._order[leaf]

    def touch(self, leaf: T) -> None:
        self._order.move_to_end(leaf)

    def pop(self) -> T:
        return self._order.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._order

    def __iter__(self) -> Iterator[T]:
        return iter(self._order)
