"""The nodes of a `PrefixTree`, and what a match is. Standard library only."""

from __future__ import annotations

from array import array
from sys import byteorder
from typing import Any, NamedTuple

VALUE_BYTES = 4
"""A value is a native int32."""


class Node:
    """A run of pages. Read all of it; change only `state` and `owner` (they are the caller's).

    `edge`: the keys, packed. `values`: native int32, packed. `count`: pages. `key`: the first page's key.
    `children`: by their first key, None when there never was one. `stamp`: the tick of the last use
    that ended here.
    """

    __slots__ = (
        "children",
        "count",
        "edge",
        "holds",
        "key",
        "owner",
        "parent",
        "pins",
        "root",
        "stamp",
        "state",
        "values",
    )

    edge: bytes
    values: bytes
    count: int
    key: bytes
    parent: Node | None
    root: Root
    children: dict[bytes, Node] | None
    pins: int
    holds: int
    state: int
    owner: Any
    stamp: int

    def pages(self) -> array[int]:
        """A copy of this node's values."""
        return array("i", self.values)

    def last(self) -> int:
        """The last page's value."""
        return int.from_bytes(self.values[-VALUE_BYTES:], byteorder, signed=True)


class Root(Node):
    """The empty top of one namespace's tree. `total` counts the pages below; `tag` is the caller's."""

    __slots__ = ("tag", "total")

    tag: Any
    total: int


class Match(NamedTuple):
    """`pages` leading pages are in the tree; the last of them is page `offset - 1` of `node`.

    Without a match `node` is the root and `offset` 0.
    """

    node: Node
    offset: int
    pages: int


def fill(
    node: Node,
    root: Node,
    edge: bytes,
    values: bytes,
    key: bytes,
    parent: Node | None,
    state: int,
    owner: Any,
    stamp: int,
) -> None:
    """Set every field of a new node."""
    node.root = root  # type: ignore[assignment]
    node.edge = edge
    node.values = values
    node.count = len(values) // VALUE_BYTES
    node.key = key
    node.parent = parent
    node.children = None
    node.pins = 0
    node.holds = 0
    node.state = state
    node.owner = owner
    node.stamp = stamp
