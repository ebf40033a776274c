"""PrefixTree: which pages are where, as a radix tree over opaque page keys of fixed width.

The one index of the project: the host cache uses it with 32-byte page keys and frames, the device's
`RadixCache` with each page's own token ids as its key and device pages. A node holds its edge as one packed
`bytes` of many keys and its values as packed int32, so work is per node and memcpy, never
per page. Several roots (one per namespace) share one policy and one set of counts. Standard library only;
not thread-safe: one thread owns a tree.

Always true, and checked by `check()`:

- A page's parent is in the tree; siblings differ in their first key; only roots are empty.
- `node.pins` counts the pins that end at this node, `node.holds` those at it or below it. A pin on
  the deepest page of a match therefore holds the whole match.
- Exactly the nodes without hold and child (roots excepted) are in the policy; `idle` counts the pages
  without hold, and all of them can be evicted: leaf by leaf, tails first.
- On a split the *upper* half is the new object, so that whoever pinned the node keeps it (R4).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvtier.core.checks import require
from kvtier.core.node import VALUE_BYTES, Match, Node, Root, fill
from kvtier.core.policy import LeafLRU, Policy
from kvtier.errors import UsageError

__all__ = ["MAX_MERGED_PAGES", "VALUE_BYTES", "Match", "Node", "PrefixTree", "Root"]

MAX_MERGED_PAGES = 4096
"""Nodes are not merged beyond this, so that a split or an evicted tail copies little."""


class PrefixTree:
    """A forest of radix trees over keys of `width` bytes, with pins and eviction of idle tails."""

    def __init__(self, width: int, policy: Policy[Node] | None = None) -> None:
        if width < 1:
            raise UsageError(f"width={width}: expected 1 or more bytes per key")
        self.width = width
        self.policy: Policy[Node] = LeafLRU() if policy is None else policy
        self.roots: set[Root] = set()
        self.pages = 0
        self.held = 0
        self.nodes = 0
        self.tick = 0

    @property
    def idle(self) -> int:
        """Pages that could be evicted."""
        return self.pages - self.held

    # -- asking: nothing changes ---------------------------------------------------------------------

    def match(self, root: Root, keys: bytes, state: int | None = None) -> Match:
        """The longest prefix of `keys` below `root`; with `state`, only through nodes of that state.

        A trailing part of a key is ignored. O(nodes), plus one memcmp of the keys.
        """
        width = self.width
        end = len(keys) - len(keys) % width
        at = 0
        node: Node = root
        while at < end:
            children = node.children
            child = children.get(keys[at : at + width]) if children else None
            if child is None or (state is not None and child.state != state):
                break
            node = child
            edge = child.edge
            if not keys.startswith(edge, at):
                offset = _common(edge, keys, at, end, width)
                return Match(node, offset, at // width + offset)
            at += len(edge)
        return Match(node, node.count, at // width)

    def path(self, node: Node) -> list[Node]:
        """The nodes from the first below the root down to `node`."""
        nodes = []
        at = node
        while at.parent is not None:
            nodes.append(at)
            at = at.parent
        nodes.reverse()
        return nodes

    def values(self, node: Node, offset: int | None = None, first: int = 0) -> array[int]:
        """Values from page `first` to page `offset - 1` of `node` (default: to its end), as a new array."""
        parts = [item.values for item in self.path(node)]
        if parts and offset is not None:
            parts[-1] = parts[-1][: offset * VALUE_BYTES]
        return array("i", b"".join(parts))[first:]

    def depth(self, node: Node) -> int:
        """Pages from the root to the end of `node`."""
        pages = 0
        at = node
        while at.parent is not None:
            pages += at.count
            at = at.parent
        return pages

    def unheld(self, node: Node, offset: int | None = None) -> int:
        """Pages that a pin at page `offset - 1` of `node` (default: its end) would newly hold."""
        if node.holds:
            return 0
        pages = node.count if offset is None else offset
        at = node.parent
        while at is not None and not at.holds:
            pages += at.count
            at = at.parent
        return pages

    def walk(self, top: Node) -> Iterator[Node]:
        """All nodes from `top` down (a root left out), parents first; do not change the tree meanwhile."""
        stack = [top]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            if node.children:
                stack.extend(node.children.values())

    # -- growing -------------------------------------------------------------------------------------

    def new_root(self, tag: object = None) -> Root:
        """An empty tree of its own; `tag` is kept for the caller."""
        root = Root()
        fill(root, root, b"", b"", b"", None, 0, None, 0)
        root.tag = tag
        root.total = 0
        self.roots.add(root)
        return root

    def insert(
        self,
        parent: Node,
        keys: bytes,
        values: bytes,
        state: int = 0,
        owner: object = None,
        pinned: bool = False,
    ) -> Node:
        """Hang `keys` with `values` (packed int32) under the end of `parent` as one new node.

        With `pinned` the node is born with one pin (which spares `pin`). UsageError when the lengths
        differ, nothing is given, or a child of `parent` begins with the same key: match and split first.
        """
        count = len(values) // VALUE_BYTES
        width = self.width
        if not count or len(keys) != count * width or len(values) != count * VALUE_BYTES:
            raise UsageError(
                f"{len(keys)} bytes of keys, {len(values)} of values: expected {width} and 4 a page"
            )
        key = keys[:width]
        children = parent.children
        if children is None:
            children = parent.children = {}
        elif key in children:
            raise UsageError(f"a child of this node begins with key {key.hex()} already")
        node = Node()
        self.tick += 1
        fill(node, parent.root, keys, values, key, parent, state, owner, self.tick)
        if parent.parent is not None and not parent.holds and not children:
            self.policy.remove(parent)
        children[key] = node
        parent.root.total += count
        self.pages += count
        self.nodes += 1
        if pinned:
            self._hold(node)
        else:
            self.policy.add(node)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` after its first `at` pages; the *upper* part is the new object and is returned.

        `node` becomes the lower part and keeps pins, children, place in the policy. The new
        one has the same state, owner and stamp. With `at == node.count` nothing is cut: `node` is returned.
        """
        if at == node.count:
            return node
        parent = node.parent
        if parent is None or not 0 < at < node.count:
            raise UsageError(f"cannot split a node of {node.count} pages at {at}")
        edge, values, cut = node.edge, node.values, at * self.width
        upper = Node()
        fill(
            upper,
            node.root,
            edge[:cut],
            values[: at * VALUE_BYTES],
            node.key,
            parent,
            node.state,
            node.owner,
            node.stamp,
        )
        upper.holds = node.holds
        node.edge = edge[cut:]
        node.values = values[at * VALUE_BYTES :]
        node.count -= at
        node.key = node.edge[: self.width]
        node.parent = upper
        upper.children = {node.key: node}
        _children(parent)[upper.key] = upper
        self.nodes += 1
        return upper

    # -- pins ----------------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Hold `node` and all above it until `unpin`. Pins count; a root cannot be pinned."""
        if node.parent is None:
            raise UsageError("a root cannot be pinned")
        if not node.holds and not node.children:
            self.policy.remove(node)
        self._hold(node)

    def unpin(self, node: Node) -> None:
        """Give one pin back; `node` counts as used now. Call `merge` afterwards where it may join."""
        if not node.pins:
            raise UsageError("this node has no pin to give back")
        node.pins -= 1
        self.tick += 1
        node.stamp = self.tick
        at: Node | None = node
        while at is not None:
            at.holds -= 1
            if not at.holds:
                self.held -= at.count
            at = at.parent
        if not node.holds and not node.children:
            self.policy.add(node)

    def _hold(self, node: Node) -> None:
        node.pins += 1
        at: Node | None = node
        while at is not None:
            if not at.holds:
                self.held += at.count
            at.holds += 1
            at = at.parent

    def touch(self, node: Node) -> None:
        """`node` was used without a pin."""
        self.tick += 1
        node.stamp = self.tick
        if node in self.policy:
            self.policy.touch(node)

    # -- merging -------------------------------------------------------------------------------------

    def merge(self, node: Node) -> Node:
        """Join what nothing keeps apart on the way from `node`'s only child up to the root.

        Two nodes join when the upper has no other child and no pin of its own, neither has an owner, states
        are equal, and together they stay within `MAX_MERGED_PAGES`. The *lower* object survives; returned is
        the one that holds `node`'s pages now. O(nodes) of the path, and one memcpy of what joins.
        """
        if node.parent is None:
            return node
        low = node
        children = low.children
        if children and len(children) == 1:
            (child,) = children.values()
            if _joins(low, child):
                low = child
        self._join_up(low)
        at = low.parent
        while at is not None and at.parent is not None:
            self._join_up(at)
            at = at.parent
        return low if node.parent is None else node

    def _join_up(self, low: Node) -> None:
        """Join `low`, no root, with the parents that it can absorb; they are left with parent None."""
        run = [low]
        pages = low.count
        above: Node = low.parent  # type: ignore[assignment]  # no root
        while above.parent is not None:
            if len(_children(above)) != 1 or not _joins(above, low):
                break
            if pages + above.count > MAX_MERGED_PAGES:
                break
            pages += above.count
            run.append(above)
            above = above.parent
        if len(run) == 1:
            return
        run.reverse()
        low.edge = b"".join([item.edge for item in run])
        low.values = b"".join([item.values for item in run])
        low.count = pages
        low.key = run[0].key
        low.stamp = max([item.stamp for item in run])
        for item in run[:-1]:
            item.parent = None
        low.parent = above
        _children(above)[low.key] = low
        self.nodes -= len(run) - 1

    # -- shrinking -----------------------------------------------------------------------------------

    def evict(self, need: int) -> array[int]:
        """Remove `need` pages, as the policy says, and return their values: tails before heads.

        Only tails of idle leaves go, and of the last leaf only as much as is needed. Fewer come back when
        `idle` is smaller: ask first; nothing here fails half-way.
        """
        victims: list[bytes] = []
        policy = self.policy
        pop = policy.pop
        left = max(min(need, self.pages - self.held), 0)
        self.pages -= left
        while left:
            node = pop()
            count = node.count
            if count > left:
                keep = count - left
                victims.append(node.values[keep * VALUE_BYTES :])
                self._cut(node, keep)
                policy.add_reopened(node, False)
                break
            left -= count
            victims.append(node.values)
            node.root.total -= count
            self.nodes -= 1
            parent: Node = node.parent  # type: ignore[assignment]  # a leaf is no root
            children: dict[bytes, Node] = parent.children  # type: ignore[assignment]  # it has this one
            del children[node.key]
            if not children and not parent.holds and parent.parent is not None:
                policy.add_reopened(parent, parent.stamp > node.stamp)
        victims.reverse()
        values = array("i", b"".join(victims))
        values.reverse()
        return values

    def _cut(self, node: Node, keep: int) -> None:
        node.root.total -= node.count - keep
        node.edge = node.edge[: keep * self.width]
        node.values = node.values[: keep * VALUE_BYTES]
        node.count = keep

    def remove(self, node: Node) -> None:
        """Take out the idle leaf `node`, whole; else UsageError. Its values are the caller's."""
        parent = node.parent
        if parent is None or node.holds or node.children:
            raise UsageError("only a leaf without pins can be removed")
        self.policy.remove(node)
        children = _children(parent)
        del children[node.key]
        node.parent = None
        node.root.total -= node.count
        self.pages -= node.count
        self.nodes -= 1
        if not children and not parent.holds and parent.parent is not None:
            self.policy.add_reopened(parent, parent.stamp > node.stamp)

    def truncate(self, node: Node, keep: int) -> array[int]:
        """Drop the tail of the idle leaf `node`, from page `keep` >= 1 on; returns the dropped values."""
        if node.holds or node.children or not 0 < keep <= node.count:
            raise UsageError(
                f"cannot keep {keep} of {node.count} pages: expected a leaf without pins, and 1 or more"
            )
        dropped = array("i", node.values[keep * VALUE_BYTES :])
        self.pages -= node.count - keep
        self._cut(node, keep)
        return dropped

    def cut(self, top: Node) -> list[Node]:
        """Take out `top` and all below it, pins and all; returned parents first, no longer linked.

        Whoever pinned one of them must not unpin it any more. O(nodes) of what goes.
        """
        parent = top.parent
        if parent is None:
            raise UsageError("a root cannot be cut off")
        nodes = list(self.walk(top))
        for node in nodes:
            self.pages -= node.count
            if node.holds:
                self.held -= node.count
            elif not node.children:
                self.policy.remove(node)
        for node in nodes:
            node.root.total -= node.count
            node.parent = None
            node.children = None
        self.nodes -= len(nodes)
        children = _children(parent)
        del children[top.key]
        was_held = parent.holds > 0
        at: Node | None = parent
        while at is not None and top.holds:
            at.holds -= top.holds
            if not at.holds:
                self.held -= at.count
            at = at.parent
        if not parent.holds and not children and parent.parent is not None:
            if was_held:
                self.policy.add(parent)
            else:
                self.policy.add_reopened(parent, False)
        return nodes

    def refill(self, node: Node, values: bytes) -> None:
        """Give `node` other values for the same keys; everything else stays (R8)."""
        if len(values) != len(node.values):
            raise UsageError(f"{len(values)} bytes of values: expected {len(node.values)}")
        node.values = values

    # -- self-check ----------------------------------------------------------------------------------

    def check(self, loose_nodes: int = 0, loose_leaves: int = 0) -> None:
        """Raise BrokenInvariantError for the first broken invariant. O(pages); for tests and idle times.

        `loose_nodes` are under no root any more but still counted, `loose_leaves` are still in the policy.
        """
        pages = held = 0
        nodes, idle = loose_nodes, loose_leaves
        for root in self.roots:
            total = 0
            for node in self.walk(root):
                self.check_node(node)
                nodes += 1
                total += node.count
                held += node.count if node.holds else 0
                if not node.holds and not node.children:
                    idle += 1
                    require(node in self.policy, "an idle leaf is not in the policy")
            require(total == root.total, f"root counts {root.total} pages, has {total}")
            require(root.holds == sum(c.holds for c in (root.children or {}).values()), "holds of a root")
            pages += total
        require(pages == self.pages, f"{self.pages} pages counted, {pages} there")
        require(held == self.held, f"{self.held} held pages counted, {held} there")
        require(nodes == self.nodes, f"{self.nodes} nodes counted, {nodes} there")
        require(idle == len(self.policy), f"{len(self.policy)} leaves in the policy, {idle} idle")

    def check_node(self, node: Node) -> None:
        """Raise BrokenInvariantError when `node` by itself, or its tie to its parent, is broken."""
        children = node.children or {}
        require(node.count > 0, "a node is empty")
        require(len(node.edge) == node.count * self.width, "edge and count differ")
        require(len(node.values) == node.count * VALUE_BYTES, "values and count differ")
        require(node.edge[: self.width] == node.key, "key is not the edge's first")
        parent = node.parent
        require(
            parent is not None and _children(parent).get(node.key) is node, "parent does not have the node"
        )
        require(parent is not None and parent.root is node.root, "root differs from the parent's")
        require(node.pins >= 0 and node.holds == node.pins + sum(c.holds for c in children.values()), "holds")


def _children(node: Node) -> dict[bytes, Node]:
    """The children of a node that is known to have some."""
    return node.children if node.children is not None else {}


def _joins(upper: Node, lower: Node) -> bool:
    return not upper.pins and upper.owner is None and lower.owner is None and upper.state == lower.state


def _common(edge: bytes, keys: bytes, at: int, end: int, width: int) -> int:
    """How many leading keys of `edge` stand in `keys` from byte `at` on; the first is known to."""
    low, high = 1, min(len(edge), end - at) // width
    while low < high:
        middle = (low + high + 1) // 2
        if edge.startswith(keys[at + low * width : at + middle * width], low * width):
            low = middle
        else:
            high = middle - 1
    return low
