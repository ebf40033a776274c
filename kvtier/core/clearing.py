"""What a flush leaves behind: trees that nobody can find any more, freed bit by bit (R13, R18).

`drop` takes a whole tree out of the index at once, whatever its size. What load leases still read is
kept, DOOMED, and goes with its last pin; the rest waits here for `sweep`. Standard library only.

Always true: each page of a dropped tree is either in `kept`, held by a pin, or in `pages`, held by nothing.
"""

from __future__ import annotations

from array import array

from kvtier.core.prefix_tree import Node, PrefixTree, Root
from kvtier.core.writes import DOOMED


class Clearing:
    """Dropped trees. `pages` can be swept, `kept` are still being read."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._stack: list[dict[bytes, Node]] = []
        self.pages = 0
        self.kept = 0

    def drop(self, root: Root, ends: list[Node]) -> array[int]:
        """Take the tree of `root` out. `ends`: the pinned nodes in it; returns the values that stay for them.

        Costs the nodes between those and the root, not the tree; values come tails before heads.
        """
        tree = self._tree
        chains: list[list[Node]] = []
        for end in ends:
            chain: list[Node] = []
            node = end
            while node.parent is not None and node.state != DOOMED:
                node.state = DOOMED
                chain.append(node)
                node = node.parent
            chains.append(chain)
        chains.reverse()  # a later chain ends at an earlier one, so it is deeper
        kept = [node for chain in chains for node in chain]
        for node in [*kept, root]:
            if node.children:
                self._stack.append(node.children)
                node.children = None
        pages = sum([node.count for node in kept])
        tree.roots.discard(root)
        tree.pages -= root.total
        tree.held -= pages
        self.kept += pages
        self.pages += root.total - pages
        return _tails_first(kept)

    def release(self, node: Node) -> array[int]:
        """Give back the pin on `node` of a dropped tree; returns the values that it was the last to keep."""
        freed: list[Node] = []
        node.pins -= 1
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.holds -= 1
            if not at.holds:
                freed.append(at)
            at = at.parent
        pages = sum([item.count for item in freed])
        self.kept -= pages
        node.root.total -= pages
        self._tree.nodes -= len(freed)
        return _tails_first(freed)

    def sweep(self, pages: int) -> array[int]:
        """Values of at least `pages` pages, or of all that is left; stops between nodes.

        Their namespace's entry has ended, so no rebuild reaches them and their order does not matter.
        """
        stack = self._stack
        policy = self._tree.policy
        swept: list[bytes] = []
        got = 0
        while got < pages and stack:
            children = stack[-1]
            if not children:
                stack.pop()
                continue
            node = children.popitem()[1]
            if node.state == DOOMED:
                continue
            if node.children:
                stack.append(node.children)
            else:
                policy.remove(node)
            got += node.count
            node.root.total -= node.count
            node.parent = None
            node.children = None
            self._tree.nodes -= 1
            swept.append(node.values)
        self.pages -= got
        return array("i", b"".join(swept))

    def unswept(self) -> list[Node]:
        """All nodes that wait for `sweep`. O(nodes): for checks."""
        tops = [node for children in self._stack for node in children.values() if node.state != DOOMED]
        return [node for top in tops for node in self._tree.walk(top)]


def _tails_first(nodes: list[Node]) -> array[int]:
    """Values of `nodes`, which come deepest first, tails before heads."""
    values = array("i", b"".join([node.values for node in reversed(nodes)]))
    values.reverse()
    return values
