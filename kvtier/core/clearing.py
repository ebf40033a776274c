"""What a flush leaves behind: trees that nobody can find any more, freed bit by bit (R13, R18).

`drop` takes a whole tree out of the index at once, whatever its size. What load leases still read is
kept, DOOMED, until its last pin is given back; the rest waits here for `sweep`. Standard library only.

Always true: each page of a dropped tree is either in `kept`, held by a pin, or in `pages`. No page is freed
before all below it are: else a flushed page could come to life again, in a rebuild, under a page
that was stored anew in its parent's old frame.
"""

from __future__ import annotations

from array import array

from kvtier.core.prefix_tree import Node, PrefixTree, Root
from kvtier.core.writes import DOOMED


class Clearing:
    """Dropped trees. `pages` can be swept, `kept` are still being read."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        # What is left of a node's children, and the node, which can go when they have.
        self._stack: list[tuple[dict[bytes, Node], Node]] = []
        # Nodes that were being read when their tree was dropped: on how many others below each waits.
        self._waits: dict[Node, int] = {}
        self._done: list[Node] = []
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
        self._waits.update(dict.fromkeys(kept, 0))
        for node in kept:
            parent: Node = node.parent  # type: ignore[assignment]  # no root is pinned
            del parent.children[node.key]  # type: ignore[union-attr]  # it has this one
            if parent in self._waits:
                self._waits[parent] += 1
        for node in [*kept, root]:
            if node.children:
                self._stack.append((node.children, node))
                if node in self._waits:
                    self._waits[node] += 1
        pages = sum([node.count for node in kept])
        tree.roots.discard(root)
        tree.pages -= root.total
        tree.held -= pages
        self.kept += pages
        self.pages += root.total - pages
        return _tails_first(kept)

    def release(self, node: Node) -> array[int]:
        """Give back the pin on `node` of a dropped tree; returns the values that can be freed by this now.

        What nobody holds any more, but has pages below it to be swept, is left to `sweep`.
        """
        node.pins -= 1
        at = node
        while at.parent is not None:
            at.holds -= 1
            if not at.holds:
                self.kept -= at.count
                self.pages += at.count
            at = at.parent
        self._free_up(node)
        return self._take_done()

    def sweep(self, pages: int) -> array[int]:
        """Values of at least `pages` pages, or of all that is left, tails before heads; whole nodes."""
        stack = self._stack
        goal = self.pages - pages
        while stack:
            children, node = stack[-1]
            if self.pages <= goal and (children or node not in self._waits):
                break  # what has nothing below it any more is not made to wait
            if children:
                child = children.popitem()[1]
                if child.children:
                    stack.append((child.children, child))
                else:
                    self._tree.policy.remove(child)
                    self._free(child)
                continue
            stack.pop()
            if node in self._waits:
                self._waits[node] -= 1
                self._free_up(node)
            elif node.parent is not None:
                self._free(node)
        return self._take_done()

    def _free_up(self, node: Node) -> None:
        """Free `node`, and then its parents, as far as nothing holds them and they wait for nothing more."""
        at: Node | None = node
        while at in self._waits and not at.holds and not self._waits[at]:
            del self._waits[at]
            self._free(at)
            at = at.parent
            if at in self._waits:
                self._waits[at] -= 1

    def _free(self, node: Node) -> None:
        self.pages -= node.count
        node.root.total -= node.count
        self._tree.nodes -= 1
        self._done.append(node)

    def _take_done(self) -> array[int]:
        done, self._done = self._done, []
        return _tails_first(done)

    def untouched(self) -> list[Node]:
        """Nodes that `sweep` has yet to come to. O(nodes): for checks."""
        tops = [top for children, _ in self._stack for top in children.values()]
        return [node for top in tops for node in self._tree.walk(top)]

    def waiting(self) -> list[Node]:
        """Nodes that go when all below them has gone. O(nodes): for checks."""
        opened = [node for _, node in self._stack if node not in self._waits and node.parent is not None]
        return [*opened, *(node for node in self._waits if not node.holds)]

    def reading(self) -> list[Node]:
        """Nodes that are kept for their readers. O(nodes): for checks."""
        return [node for node in self._waits if node.holds]


def _tails_first(nodes: list[Node]) -> array[int]:
    """Values of `nodes`, which come deepest first, tails before heads."""
    values = array("i", b"".join([node.values for node in reversed(nodes)]))
    values.reverse()
    return values
