"""The table of namespaces: numbers, epochs, and the writes for both (R13, R14)."""

from __future__ import annotations

from array import array

from kvtier.core.prefix_tree import PrefixTree
from kvtier.core.spaces import Space, Spaces
from kvtier.core.writes import EpochRecord, NamespaceEnd, PoolEpoch, Write

NAMES = [bytes([letter]) * 16 for letter in b"abcd"]


def table(size: int) -> tuple[Spaces, PrefixTree, list[Write]]:
    writes: list[Write] = []
    tree = PrefixTree(1)
    return Spaces(size, tree, writes), tree, writes


def add(spaces: Spaces, name: bytes) -> Space:
    space = spaces.get_or_add(name)
    assert space is not None
    return space


def put_page(tree: PrefixTree, space: Space) -> None:
    tree.insert(space.root, b"k", array("i", [0]).tobytes())


def test_a_new_entry_is_written_with_the_epoch_of_those_without_one():
    spaces, tree, writes = table(2)
    spaces.flush(None)
    writes.clear()
    space = add(spaces, NAMES[0])
    assert writes == [EpochRecord(0, NAMES[0], 2)]
    assert add(spaces, NAMES[0]) is space
    assert (spaces.epoch(NAMES[0]), spaces.epoch(NAMES[1]), len(writes)) == (2, 2, 1)
    assert tree.roots == {space.root}


def test_empty_entries_stay_while_there_are_numbers_left():
    spaces, _, writes = table(2)
    first, second = add(spaces, NAMES[0]), add(spaces, NAMES[1])
    assert (first.index, second.index) == (0, 1)
    assert [type(write) for write in writes] == [EpochRecord, EpochRecord]


def test_a_full_table_gives_up_its_empty_entries_and_their_epoch_lives_on():
    spaces, tree, writes = table(2)
    spaces.flush(None)
    first, second = add(spaces, NAMES[0]), add(spaces, NAMES[1])
    put_page(tree, second)
    spaces.absent = 1  # as if no flush had been for those without an entry
    writes.clear()
    third = add(spaces, NAMES[2])
    assert writes == [NamespaceEnd(0), PoolEpoch(2, 2), EpochRecord(0, NAMES[2], 2)]
    assert (third.index, spaces.epoch(NAMES[0])) == (0, 2)
    assert tree.roots == {second.root, third.root}
    assert first.root not in tree.roots
    put_page(tree, third)
    assert spaces.get_or_add(NAMES[3]) is None


def test_numbers_given_back_are_used_before_anything_is_given_up():
    spaces, _, writes = table(2)
    add(spaces, NAMES[0])
    (ended,) = spaces.flush(NAMES[0])
    add(spaces, NAMES[1])
    spaces.release(ended)
    writes.clear()
    assert add(spaces, NAMES[2]).index == 0
    assert [type(write) for write in writes] == [EpochRecord]


def test_an_entry_that_is_given_up_has_no_lease_and_was_used_longest_ago():
    spaces, tree, writes = table(3)
    entries = [add(spaces, name) for name in NAMES[:3]]
    for entry in entries:
        put_page(tree, entry)
    spaces.use(entries[0])
    writes.clear()
    assert spaces.give_up() is entries[1]
    assert writes == [NamespaceEnd(1), PoolEpoch(1, 1)]
    assert entries[1] in spaces.ended
