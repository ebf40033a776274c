"""PrefixTree and its policy by example: splits, merges, eviction order, and mistakes."""

from __future__ import annotations

from array import array

import pytest

from kvtier.core import prefix_tree
from kvtier.core.checks import BrokenInvariantError
from kvtier.core.counters import Counters
from kvtier.core.frames import FreeFrames
from kvtier.core.policy import LeafLRU
from kvtier.core.prefix_tree import Node, PrefixTree, Root
from kvtier.errors import UsageError


def words(*values: int) -> bytes:
    return array("i", values).tobytes()


def tree_of(*chains: tuple[bytes, int]) -> tuple[PrefixTree, Root]:
    """One-byte keys; each chain's values count up from a number."""
    tree = PrefixTree(1)
    root = tree.new_root("tag")
    for keys, first in chains:
        match = tree.match(root, keys)
        parent = tree.split(match.node, match.offset) if match.pages else root
        count = len(keys) - match.pages
        tree.insert(
            parent, keys[match.pages :], words(*range(first + match.pages, first + match.pages + count))
        )
    return tree, root


def find(tree: PrefixTree, root: Root, keys: bytes) -> Node:
    match = tree.match(root, keys)
    assert match.pages == len(keys)
    return tree.split(match.node, match.offset)


def test_part_of_a_key_is_no_match():
    tree = PrefixTree(2)
    root = tree.new_root()
    tree.insert(root, b"aabbcc", words(0, 1, 2))
    assert tree.match(root, b"aab").pages == 1
    assert tree.match(root, b"aabbc").pages == 2
    assert tree.match(root, b"a").pages == 0


def test_a_pin_would_hold_every_page_above_that_nobody_holds():
    tree, root = tree_of((b"aX", 0), (b"abX", 0), (b"abcX", 0), (b"abcd", 0))
    deepest = tree.match(root, b"abcd").node
    assert tree.depth(deepest) == tree.unheld(deepest) == 4
    tree.pin(find(tree, root, b"a"))
    assert (tree.unheld(deepest), tree.unheld(find(tree, root, b"abc"), 1)) == (3, 2)


def test_a_child_is_younger_than_its_parents_last_use():
    tree, root = tree_of((b"ab", 0))
    for _ in range(5):
        tree.touch(tree.match(root, b"ab").node)
    tree.insert(tree.match(root, b"ab").node, b"X", words(12))
    tree.insert(root, b"cd", words(30, 31))
    assert list(tree.evict(4)) == [12, 1, 0, 31]


def test_an_empty_tree_matches_nothing():
    tree, root = tree_of()
    assert tree.match(root, b"abc") == (root, 0, 0)
    assert list(tree.values(root)) == []
    assert root.tag == "tag"
    assert list(tree.evict(5)) == []


def test_a_match_ends_anywhere_in_a_node():
    tree, root = tree_of((bytes(range(100)), 0))
    for count in range(101):
        match = tree.match(root, bytes(range(count)) + b"\xff" * 3)
        assert (match.pages, match.offset) == (count, count)
        assert list(tree.values(match.node, match.offset)) == list(range(count))


def test_the_upper_half_of_a_split_is_the_new_object():
    tree, root = tree_of((b"abcd", 0))
    node = tree.match(root, b"abcd").node
    tree.pin(node)
    upper = tree.split(node, 1)
    assert upper is not node
    assert (upper.edge, node.edge, node.parent, upper.holds, upper.pins, node.pins) == (
        b"a",
        b"bcd",
        upper,
        1,
        0,
        1,
    )
    assert tree.split(node, 3) is node
    assert tree.split(node, 2).edge == b"bc"
    tree.check()


def test_the_lower_object_survives_a_merge():
    tree, root = tree_of((b"abcd", 0))
    node = tree.match(root, b"abcd").node
    upper = tree.split(node, 2)
    assert tree.merge(upper) is node
    assert (node.edge, upper.parent, tree.nodes) == (b"abcd", None, 1)
    assert tree.merge(root) is root


@pytest.mark.parametrize("how", ["pin", "sibling", "state", "owner of upper", "owner of lower", "size"])
def test_nodes_that_something_keeps_apart_do_not_merge(how: str, monkeypatch: pytest.MonkeyPatch):
    tree, root = tree_of((b"abcd", 0))
    upper = find(tree, root, b"ab")
    lower = tree.match(root, b"abcd").node
    if how == "pin":
        tree.pin(upper)
    elif how == "sibling":
        tree.insert(upper, b"x", words(9))
    elif how == "state":
        upper.state = 1
    elif how == "owner of upper":
        upper.owner = tree
    elif how == "owner of lower":
        lower.owner = tree
    else:
        monkeypatch.setattr(prefix_tree, "MAX_MERGED_PAGES", 3)
    nodes = tree.nodes
    assert tree.merge(lower) is lower
    assert tree.merge(upper) is upper
    assert tree.nodes == nodes


def test_merged_nodes_have_a_largest_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prefix_tree, "MAX_MERGED_PAGES", 4)
    tree, root = tree_of(*[(bytes(range(count)), 0) for count in range(1, 10)])
    tree.merge(tree.match(root, bytes(range(9))).node)
    assert sorted(node.count for node in tree.walk(root)) == [1, 4, 4]
    assert list(tree.values(tree.match(root, bytes(range(9))).node)) == list(range(9))


def test_merging_heals_the_whole_path_up_to_the_root():
    tree, root = tree_of((b"a", 0), (b"ab", 0), (b"abc", 0), (b"abcX", 10), (b"abcY", 20))
    tree.merge(tree.match(root, b"abcX").node)
    assert sorted(node.edge for node in tree.walk(root)) == [b"X", b"Y", b"abc"]


def test_eviction_takes_tails_of_the_least_recently_used_leaf_first():
    tree, root = tree_of((b"abcd", 0), (b"wxyz", 10))
    assert list(tree.evict(1)) == [3]
    assert list(tree.evict(1)) == [2]
    assert list(tree.evict(3)) == [1, 0, 13]
    assert tree.match(root, b"wxyz").pages == 3


def test_a_use_makes_a_chain_young():
    tree, root = tree_of((b"ab", 0), (b"cd", 10), (b"ef", 20))
    tree.touch(tree.match(root, b"ab").node)
    node = tree.match(root, b"cd").node
    tree.pin(node)
    tree.unpin(node)
    assert list(tree.evict(6)) == [21, 20, 1, 0, 11, 10]


def test_touching_what_is_pinned_or_inner_does_not_list_it():
    tree, root = tree_of((b"abcd", 0))
    upper = find(tree, root, b"ab")
    tree.touch(upper)
    tree.pin(tree.match(root, b"abcd").node)
    tree.touch(tree.match(root, b"abcd").node)
    assert len(tree.policy) == 0
    tree.check()


def test_a_parent_goes_right_after_its_last_child():
    tree, _root = tree_of((b"ab", 0), (b"abX", 10), (b"abY", 20), (b"cd", 30))
    assert list(tree.evict(5)) == [12, 22, 1, 0, 31]


def test_a_parent_that_was_used_itself_since_counts_as_young():
    tree, root = tree_of((b"abX", 10), (b"cd", 30))
    parent = find(tree, root, b"ab")
    tree.pin(parent)
    tree.unpin(parent)
    assert list(tree.evict(5)) == [12, 31, 30, 11, 10]


def test_a_removed_childs_parent_is_listed_by_the_same_rule():
    tree, root = tree_of((b"abX", 10), (b"cd", 30))
    parent = find(tree, root, b"ab")
    tree.remove(tree.match(root, b"abX").node)
    assert list(tree.policy) == [parent, tree.match(root, b"cd").node]
    tree, root = tree_of((b"abX", 10), (b"cd", 30))
    parent = find(tree, root, b"ab")
    tree.touch(parent)
    tree.remove(tree.match(root, b"abX").node)
    assert list(tree.policy)[-1] is parent


def test_after_a_cut_the_parent_is_young_if_the_cut_freed_it():
    tree, root = tree_of((b"abX", 10), (b"cd", 30))
    parent = find(tree, root, b"ab")
    top = tree.match(root, b"abX").node
    tree.pin(top)
    tree.cut(top)
    assert list(tree.policy)[-1] is parent
    tree, root = tree_of((b"abX", 10), (b"cd", 30))
    parent = find(tree, root, b"ab")
    tree.cut(tree.match(root, b"abX").node)
    assert next(iter(tree.policy)) is parent


def test_a_pin_on_the_deepest_page_holds_the_whole_match():
    tree, root = tree_of((b"abcdef", 0))
    node = find(tree, root, b"abcd")
    assert tree.unheld(node) == 4
    tree.pin(node)
    assert (tree.held, tree.idle, tree.unheld(node)) == (4, 2, 0)
    assert list(tree.evict(10)) == [5, 4]
    tree.unpin(node)
    assert list(tree.evict(10)) == [3, 2, 1, 0]


def test_values_start_where_they_are_asked_from():
    tree, root = tree_of((b"abcdef", 0), (b"abcXYZ", 10))
    match = tree.match(root, b"abcXYQ")
    assert list(tree.values(match.node, match.offset, 2)) == [2, 13, 14]
    assert list(tree.values(match.node, match.offset)) == [0, 1, 2, 13, 14]
    assert tree.values(match.node).typecode == tree.evict(1).typecode == match.node.pages().typecode == "i"
    assert tree.depth(match.node) == 6


def test_a_match_may_be_limited_to_a_state():
    tree, root = tree_of((b"ab", 0), (b"abcd", 0))
    tree.match(root, b"abcd").node.state = 1
    assert tree.match(root, b"abcd", 0).pages == 2
    assert tree.match(root, b"abcd", 1).pages == 0
    assert tree.match(root, b"abcd").pages == 4


def test_mistakes_raise_and_change_nothing():
    tree, root = tree_of((b"abcd", 0))
    node = tree.match(root, b"abcd").node
    with pytest.raises(UsageError, match="expected 1 or more bytes"):
        PrefixTree(0)
    for keys, values in ((b"", b""), (b"x", b""), (b"x", words(1, 2)), (b"xy", words(1)), (b"x", b"12345")):
        with pytest.raises(UsageError, match="expected 1 and 4 a page"):
            tree.insert(root, keys, values)
    with pytest.raises(UsageError, match="begins with key 61 already"):
        tree.insert(root, b"ax", words(1, 2))
    for at in (0, -1, 5):
        with pytest.raises(UsageError, match=f"a node of 4 pages at {at}"):
            tree.split(node, at)
    with pytest.raises(UsageError, match=r"^a root cannot be pinned$"):
        tree.pin(root)
    with pytest.raises(UsageError, match=r"^this node has no pin to give back$"):
        tree.unpin(node)
    with pytest.raises(UsageError, match=r"^a root cannot be cut off$"):
        tree.cut(root)
    with pytest.raises(UsageError, match="expected 16"):
        tree.refill(node, words(1))
    for keep in (0, 5):
        with pytest.raises(UsageError, match=f"cannot keep {keep} of 4"):
            tree.truncate(node, keep)
    with pytest.raises(UsageError, match=r"^only a leaf without pins can be removed$"):
        tree.remove(root)
    tree.pin(node)
    with pytest.raises(UsageError, match=r"^only a leaf without pins can be removed$"):
        tree.remove(node)
    with pytest.raises(UsageError, match="expected a leaf without pins"):
        tree.truncate(node, 2)
    upper = tree.split(node, 2)
    tree.unpin(node)
    with pytest.raises(UsageError, match=r"^only a leaf without pins can be removed$"):
        tree.remove(upper)
    with pytest.raises(UsageError, match="expected a leaf without pins"):
        tree.truncate(upper, 1)
    tree.check()
    assert list(tree.values(node)) == [0, 1, 2, 3]


def break_count(tree: PrefixTree, root: Root, node: Node) -> None:
    tree.pages += 1


def break_held(tree: PrefixTree, root: Root, node: Node) -> None:
    tree.held += 1


def break_nodes(tree: PrefixTree, root: Root, node: Node) -> None:
    tree.nodes -= 1


def break_policy(tree: PrefixTree, root: Root, node: Node) -> None:
    tree.policy.remove(node)


def break_edge(tree: PrefixTree, root: Root, node: Node) -> None:
    node.edge += b"x"


def break_values(tree: PrefixTree, root: Root, node: Node) -> None:
    node.values += words(1)


def break_key(tree: PrefixTree, root: Root, node: Node) -> None:
    node.key = b"q"


def break_link(tree: PrefixTree, root: Root, node: Node) -> None:
    node.parent = root


def break_root(tree: PrefixTree, root: Root, node: Node) -> None:
    node.root = tree.new_root()


def break_holds(tree: PrefixTree, root: Root, node: Node) -> None:
    node.holds += 1


def break_total(tree: PrefixTree, root: Root, node: Node) -> None:
    root.total -= 1


def break_root_holds(tree: PrefixTree, root: Root, node: Node) -> None:
    root.holds += 1


def break_listed(tree: PrefixTree, root: Root, node: Node) -> None:
    tree.policy.add(root)


def break_empty(tree: PrefixTree, root: Root, node: Node) -> None:
    node.count = 0


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (break_count, r"5 pages counted, 4 there"),
        (break_held, r"1 held pages counted, 0 there"),
        (break_nodes, r"2 nodes counted, 3 there"),
        (break_policy, r"an idle leaf is not in the policy"),
        (break_edge, r"edge and count differ"),
        (break_values, r"values and count differ"),
        (break_key, r"key is not the edge's first"),
        (break_link, r"parent does not have the node"),
        (break_root, r"root differs from the parent's"),
        (break_holds, r"holds"),
        (break_total, r"root counts 3 pages, has 4"),
        (break_root_holds, r"holds of a root"),
        (break_listed, r"3 leaves in the policy, 2 idle"),
        (break_empty, r"a node is empty"),
    ],
)
def test_check_notices(breaks, words: str):
    tree, root = tree_of((b"abX", 0), (b"abY", 10))
    tree.check()
    breaks(tree, root, tree.match(root, b"abX").node)
    with pytest.raises(BrokenInvariantError, match=f"^broken invariant: {words}$"):
        tree.check()


def test_loose_nodes_and_leaves_are_counted_in():
    tree, _ = tree_of((b"abX", 0), (b"abY", 10))
    tree.nodes += 2
    with pytest.raises(BrokenInvariantError, match="5 nodes counted, 3 there"):
        tree.check()
    tree.check(loose_nodes=2)
    with pytest.raises(BrokenInvariantError, match="2 leaves in the policy, 3 idle"):
        tree.check(loose_nodes=2, loose_leaves=1)


def test_merging_heals_every_chain_on_the_way_up():
    names = (b"a", b"ab", b"abP", b"abc", b"abcd", b"abcdX", b"abcdY")
    tree, root = tree_of(*[(name, 0) for name in names])
    tree.merge(tree.match(root, b"abcdX").node)
    assert sorted(node.edge for node in tree.walk(root)) == [b"P", b"X", b"Y", b"ab", b"cd"]
    tree.check()


def test_merging_any_of_a_chain_returns_the_one_that_is_left():
    for at in range(4):
        tree, root = tree_of((b"a", 0), (b"ab", 0), (b"abc", 0), (b"abcd", 0))
        tree.touch(tree.match(root, b"ab").node)
        chain = tree.path(tree.match(root, b"abcd").node)
        assert len(chain) == 4
        # From one of them its only child joins, and all above; the rest joins from further down.
        left = tree.merge(chain[at])
        assert left is chain[min(at + 1, 3)]
        assert all(node.parent is None for node in chain[: min(at + 1, 3)])
        assert left.stamp == (tree.tick if at else chain[1].stamp)
        tree.check()


def test_halves_of_a_split_are_equally_old():
    tree, root = tree_of((b"abcd", 0), (b"wx", 10))
    find(tree, root, b"ab")
    assert list(tree.evict(5)) == [3, 2, 1, 0, 11]


def test_what_was_taken_out_is_linked_to_nothing():
    tree, root = tree_of((b"abX", 0), (b"abY", 10), (b"cd", 20))
    leaf = tree.match(root, b"cd").node
    assert tree.truncate(leaf, 1).typecode == "i"
    tree.remove(leaf)
    nodes = tree.cut(find(tree, root, b"ab"))
    assert [(node.parent, node.children) for node in [leaf, *nodes]] == [(None, None)] * 4


def test_the_lru_is_in_order_of_use():
    policy: LeafLRU[str] = LeafLRU()
    for name in "abc":
        policy.add(name)
    policy.touch("a")
    policy.add_reopened("old", used_since=False)
    policy.add_reopened("new", used_since=True)
    policy.remove("c")
    assert list(policy) == ["old", "b", "a", "new"]
    assert len(policy) == 4
    assert "b" in policy
    assert "c" not in policy
    assert [policy.pop() for _ in range(4)] == ["old", "b", "a", "new"]
    with pytest.raises(KeyError):
        policy.pop()


def test_every_missed_unit_has_a_reason():
    counters = Counters()
    counters.add(10, 4, "absent")
    counters.add(3, 3, "")
    counters.add(5, 0, "pending")
    counters.add(1, 0, "absent")
    assert counters.as_dict("load_") == {
        "load_asked": 19,
        "load_hits": 7,
        "load_missed_absent": 7,
        "load_missed_pending": 5,
    }
    assert counters.as_dict()["asked"] == counters.hit + sum(counters.missed.values())


def test_free_frames_are_a_stack_with_low_frames_on_top():
    free = FreeFrames(10)
    free.grow(4)
    assert list(free.take(2)) == [0, 1]
    free.grow(6)
    assert (list(free.take(0)), list(free.take(-1)), len(free)) == ([], [], 4)
    free.give(array("i", [1]))
    assert list(free.take(2)) == [1, 2]
    assert list(free.take_below(0, 9)) == list(free.take_below(-1, 9)) == []
    assert list(free.take_below(5, 5)) == [4, 3]
    assert list(free.frames()) == [5]
    free.grow(6)
    assert list(free.take_below(1, 6)) == [5]
    free.give(array("i", [5]))
    assert list(free.take(9)) == [5]
    assert len(free) == 0
    for frames in (free.take(0), free.take(1), free.take_below(1, 9), free.frames()):
        assert frames.typecode == "i"


def test_a_pool_has_at_least_one_frame():
    assert FreeFrames(1).total == 1
    for total in (0, -1):
        with pytest.raises(UsageError, match=f"^frames={total}: expected 1 or more$"):
            FreeFrames(total)
