"""PrefixTree against a dict of pages: any calls in any order."""

from __future__ import annotations

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.prefix_tree import Node, PrefixTree
from tests.core.chains import keys, machine_settings

WIDTH = 12

Path = tuple[int, ...]
paths = st.tuples(st.integers(0, 5), st.integers(0, 2), st.integers(0, 4)).map(
    lambda drawn: (0,) * drawn[0] + (drawn[1],) * drawn[2] or (1,)
)
roots = st.integers(0, 1)
picks = st.integers(0, 1 << 20)


def packed(path: Path) -> bytes:
    """Keys of `WIDTH` bytes; a path's keys are a prefix of those of any longer one."""
    return b"".join(keys(path)[32 * at : 32 * at + WIDTH] for at in range(len(path)))


class PrefixTreeMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = PrefixTree(WIDTH)
        self.roots = [self.tree.new_root(), self.tree.new_root()]
        self.pages: dict[tuple[int, Path], int] = {}
        self.states: dict[tuple[int, Path], int] = {}
        self.pins: list[tuple[int, Path, Node]] = []
        self.next_value = 0

    # -- the model -----------------------------------------------------------------------------------

    def matched(self, root: int, path: Path, state: int | None = None) -> int:
        for count in range(len(path)):
            at = root, path[: count + 1]
            if at not in self.pages or (state is not None and self.states[at] != state):
                return count
        return len(path)

    def held(self, root: int, path: Path) -> bool:
        return any(r == root and pinned[: len(path)] == path for r, pinned, _ in self.pins)

    def below(self, root: int, path: Path) -> list[tuple[int, Path]]:
        return [at for at in self.pages if at[0] == root and at[1][: len(path)] == path]

    def drop(self, values: list[int]) -> None:
        """Pages that went, in this order: nobody held them, and each was the end of its chain."""
        places = {value: at for at, value in self.pages.items()}
        for value in values:
            at = places[value]
            assert not self.held(*at)
            assert self.below(*at) == [at], "a page went before one below it"
            del self.pages[at], self.states[at]

    def leaf(self, pick: int) -> Node | None:
        leaves = list(self.tree.policy)
        return leaves[pick % len(leaves)] if leaves else None

    # -- calls ---------------------------------------------------------------------------------------

    @rule(root=roots, path=paths, state=st.sampled_from([0, 0, 0, 1]), pinned=st.booleans())
    def add(self, root: int, path: Path, state: int, pinned: bool) -> None:
        tree = self.tree
        match = tree.match(self.roots[root], packed(path))
        assert match.pages == self.matched(root, path)
        if match.pages == len(path):
            return
        parent = tree.split(match.node, match.offset) if match.pages else self.roots[root]
        values = array("i", range(self.next_value, self.next_value + len(path) - match.pages))
        self.next_value += len(values)
        node = tree.insert(
            parent, packed(path)[match.pages * WIDTH :], values.tobytes(), state, pinned=pinned
        )
        for count, value in enumerate(values, match.pages + 1):
            self.pages[root, path[:count]] = value
            self.states[root, path[:count]] = state
        if pinned:
            self.pins.append((root, path, node))

    @rule(root=roots, path=paths, state=st.sampled_from([None, 0, 1]))
    def match(self, root: int, path: Path, state: int | None) -> None:
        match = self.tree.match(self.roots[root], packed(path) + b"part of a key"[: WIDTH - 1], state)
        assert match.pages == self.matched(root, path, state)
        values = [self.pages[root, path[: count + 1]] for count in range(match.pages)]
        for first in (0, 1, match.pages):
            assert list(self.tree.values(match.node, match.offset, first)) == values[first:]
        assert match.pages == self.tree.depth(match.node) - match.node.count + match.offset
        unheld = sum(not self.held(root, path[: count + 1]) for count in range(match.pages))
        assert self.tree.unheld(match.node, match.offset) == unheld

    @rule(root=roots, path=paths)
    def pin(self, root: int, path: Path) -> None:
        match = self.tree.match(self.roots[root], packed(path))
        if match.pages:
            node = self.tree.split(match.node, match.offset)
            self.tree.pin(node)
            self.pins.append((root, path[: match.pages], node))

    @precondition(lambda self: self.pins)
    @rule(pick=picks, merge=st.booleans())
    def unpin(self, pick: int, merge: bool) -> None:
        _, _, node = self.pins.pop(pick % len(self.pins))
        self.tree.unpin(node)
        if merge:
            self.tree.merge(node)

    @rule(root=roots, path=paths)
    def merge(self, root: int, path: Path) -> None:
        match = self.tree.match(self.roots[root], packed(path))
        node = self.tree.merge(match.node)
        assert not match.pages or self.pages[root, path[: match.pages]] in node.pages()

    @rule(root=roots, path=paths)
    def touch(self, root: int, path: Path) -> None:
        self.tree.touch(self.tree.match(self.roots[root], packed(path)).node)

    @rule(need=st.integers(0, 12))
    def evict(self, need: int) -> None:
        idle = self.tree.idle
        values = list(self.tree.evict(need))
        assert len(values) == min(need, idle)
        self.drop(values)

    @rule(pick=picks)
    def remove(self, pick: int) -> None:
        node = self.leaf(pick)
        if node is not None:
            values = list(node.pages())
            self.tree.remove(node)
            self.drop(values[::-1])

    @rule(pick=picks, keep=st.integers(1, 6))
    def truncate(self, pick: int, keep: int) -> None:
        node = self.leaf(pick)
        if node is not None:
            keep = min(keep, node.count)
            values = list(node.pages())
            assert list(self.tree.truncate(node, keep)) == values[keep:]
            self.drop(values[keep:][::-1])

    @rule(root=roots, path=paths)
    def cut(self, root: int, path: Path) -> None:
        match = self.tree.match(self.roots[root], packed(path))
        if not match.pages:
            return
        top = match.node
        first = match.pages - match.offset + 1
        below = self.below(root, path[:first])
        nodes = self.tree.cut(top)
        assert nodes[0] is top
        assert sorted(value for node in nodes for value in node.pages()) == sorted(
            self.pages[at] for at in below
        )
        self.pins = [pin for pin in self.pins if pin[2] not in nodes]
        for at in below:
            del self.pages[at], self.states[at]

    @rule(root=roots, path=paths)
    def refill(self, root: int, path: Path) -> None:
        match = self.tree.match(self.roots[root], packed(path))
        if match.pages:
            node = self.tree.split(match.node, match.offset)
            values = array("i", range(self.next_value, self.next_value + node.count))
            self.next_value += node.count
            self.tree.refill(node, values.tobytes())
            for back, value in enumerate(reversed(values)):
                self.pages[root, path[: match.pages - back]] = value

    # -- after every call ----------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        self.tree.check()
        assert self.tree.pages == len(self.pages)
        assert self.tree.held == sum(self.held(*at) for at in self.pages)
        assert self.tree.idle == self.tree.pages - self.tree.held
        for root, top in enumerate(self.roots):
            found = {}
            for node in self.tree.walk(top):
                for depth, value in enumerate(node.pages(), self.tree.depth(node) - node.count + 1):
                    found[value] = (depth, node.state)
            wanted = {
                value: (len(path), self.states[r, path])
                for (r, path), value in self.pages.items()
                if r == root
            }
            assert found == wanted
        for root, path, node in self.pins:
            assert node.pages()[-1] == self.pages[root, path], "a pin ends at its page"


TestPrefixTreeMachine = PrefixTreeMachine.TestCase
TestPrefixTreeMachine.settings = machine_settings(60, 40)
