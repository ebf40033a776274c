"""`check()` notices each kind of damage: one thing is broken at a time, in a cache that has some of all."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from kvtier.core.checks import BrokenInvariantError
from kvtier.core.host_cache import HostCache
from kvtier.core.leases import Lease
from kvtier.core.ledger import Ledger
from kvtier.core.node import Node
from kvtier.core.spaces import Space
from kvtier.core.writes import DOOMED, LOAD, READY, STORE, WRITING
from tests.core.chains import NS, OTHER, Engine, keys, make

THIRD = b"t" * 16


def scene() -> HostCache:
    """READY, read, WRITING, superseded, quarantined, kept, waiting and untouched pages, all at once."""
    cache = make(80)
    one, two = Engine(cache, "one", ranks=2), Engine(cache, "two", sid=200)
    one.fill("abcd")
    one.load("ab")
    one.store("wxyz", now=0.0)
    two.store("wxQ", now=50.0)
    one.store("mno")
    one.abort(quiet={0})
    one.fill("abcdef", ns=OTHER)
    one.fill("abX", ns=OTHER)
    two.load("abc", ns=OTHER)
    cache.flush(OTHER, 0.0)
    one.fill("abcdef", ns=THIRD)
    one.fill("abX", ns=THIRD)
    one.fill("abYZ", ns=THIRD)
    one.load("abX", ns=THIRD)
    cache.flush(THIRD, 0.0)
    one.finish()
    dying = Engine(cache, "dying", sid=300)
    dying.store("pq")
    cache.died(dying.sid, 0.0)
    one.fill("k", ns=OTHER)
    cache.check()
    return cache


def lease(book: Ledger, kind: int, fits: Callable[[Lease], bool] = lambda lease: True) -> Lease:
    return next(lease for lease in book.leases if lease.kind == kind and fits(lease))


def node(book: Ledger, state: int) -> Node:
    return next(node for root in book.tree.roots for node in book.tree.walk(root) if node.state == state)


def kept_node(book: Ledger) -> Node:
    found = lease(book, LOAD, lambda lease: lease.node is not None and lease.node.state == DOOMED).node
    assert found is not None
    return found


BREAKS: dict[str, tuple[str, Callable[[Ledger], object]]] = {}


def breaks(words: str) -> Callable[[Callable[[Ledger], object]], None]:
    def register(act: Callable[[Ledger], object]) -> None:
        BREAKS[act.__name__] = words, act

    return register


@breaks("WRITING pages are held")
def writing_below_zero(book: Ledger) -> None:
    book.writing = -1


@breaks("WRITING pages are held")
def more_writing_than_held(book: Ledger) -> None:
    book.writing = book.tree.held + 1


@breaks(r"\d+ held pages counted, \d+ there")
def more_held_than_there_are(book: Ledger) -> None:
    book.tree.held = book.tree.pages


@breaks("WRITING pages are held")
def more_held_than_pages(book: Ledger) -> None:
    book.tree.held = book.tree.pages + 1


@breaks(r"-?\d+ WRITING pages counted, \d+ there")
def writing_miscounted(book: Ledger) -> None:
    book.writing -= 1


@breaks(r"80 frames exist, \d+ are somewhere")
def a_frame_is_lost(book: Ledger) -> None:
    book.free.take(1)


@breaks(r"80 frames exist, \d+ are somewhere")
def a_frame_is_lost_but_counted(book: Ledger) -> None:
    kept_node(book).values = kept_node(book).values[:-4]


@breaks(r"80 frames exist, \d+ are somewhere")
def doomed_off_by_one(book: Ledger) -> None:
    book.doomed += 1


@breaks(r"\d+ DOOMED frames counted, \d+ there")
def doomed_for_quarantined(book: Ledger) -> None:
    book.doomed += 1
    book.quarantined -= 1


@breaks(r"\d+ quarantined counted, \d+ there")
def quarantined_for_free(book: Ledger) -> None:
    book.free.take(1)
    book.quarantined += 1


@breaks("pages left to sweep")
def clearing_for_kept(book: Ledger) -> None:
    book.clearing.pages += 1
    book.clearing.kept -= 1


@breaks("pages kept for readers")
def kept_for_free(book: Ledger) -> None:
    book.free.take(1)
    book.clearing.kept += 1


@breaks("a frame is in two places")
def a_frame_twice(book: Ledger) -> None:
    frames = book.free.take(2)
    book.free.give(array("i", [frames[0], frames[0]]))


@breaks("a frame does not exist")
def a_frame_below_zero(book: Ledger) -> None:
    book.free.take(1)
    book.free.give(array("i", [-1]))


@breaks("a frame does not exist")
def a_frame_beyond_the_pool(book: Ledger) -> None:
    book.free.take(1)
    book.free.give(array("i", [80]))


@breaks("a WRITING node has no lease")
def writing_without_lease(book: Ledger) -> None:
    node(book, WRITING).owner = None


@breaks("a WRITING node is not held")
def writing_without_pin(book: Ledger) -> None:
    found = next(lease.node for lease in book.leases if lease.kind == STORE and lease.node is not None)
    book.tree.unpin(found)


@breaks("a kept node has a pin without lease")
def pin_above_what_is_kept(book: Ledger) -> None:
    above = kept_node(book).parent
    assert above is not None
    assert above.parent is not None
    above.pins += 1


@breaks("a page is kept that nobody reads")
def reading_without_lease(book: Ledger) -> None:
    found = kept_node(book)
    reader = lease(book, LOAD, lambda lease: lease.node is found)
    reader.node = above = found.parent
    assert above is not None
    found.pins -= 1
    above.pins += 1


@breaks("a WRITING node is not on its lease's path")
def writing_for_another(book: Ledger) -> None:
    node(book, WRITING).owner = lease(book, STORE, lambda lease: lease.node is None)


@breaks("a WRITING node's lease has ended")
def writing_for_an_ended_lease(book: Ledger) -> None:
    owner = node(book, WRITING).owner
    assert isinstance(owner, Lease)
    owner.ended = True


@breaks("node of state 3, owner None")
def doomed_in_the_tree(book: Ledger) -> None:
    node(book, READY).state = DOOMED


@breaks("node of state 2, owner .*")
def ready_with_an_owner(book: Ledger) -> None:
    node(book, READY).owner = lease(book, STORE)


@breaks("a lease without session")
def session_unknown(book: Ledger) -> None:
    found = lease(book, LOAD).session
    book.sessions.by_sid[999] = book.sessions.by_sid.pop(found.sid)


@breaks("a session does not know its lease")
def lease_unknown_to_session(book: Ledger) -> None:
    found = lease(book, LOAD)
    del found.session.leases[found.number]


@breaks("a namespace does not know its lease")
def lease_unknown_to_space(book: Ledger) -> None:
    found = lease(book, LOAD)
    found.space.leases.discard(found)


@breaks("an ended lease that nobody can touch any more")
def ended_and_settled(book: Ledger) -> None:
    found = lease(book, STORE, lambda lease: lease.quarantined)
    found.quiet = found.session.group.everyone


@breaks("quarantined frames of a running lease")
def quarantined_but_running(book: Ledger) -> None:
    lease(book, STORE, lambda lease: lease.quarantined).ended = False


@breaks("a load lease without pin")
def load_without_pin(book: Ledger) -> None:
    lease(book, LOAD).node = None


@breaks("a load lease without pin")
def load_with_frames(book: Ledger) -> None:
    lease(book, LOAD).out = array("i", [1])


@breaks("a node has 2 pins, 1 leases pin it")
def two_pins_of_one_lease(book: Ledger) -> None:
    found = lease(book, LOAD, lambda lease: lease.node is not None and lease.node.state == READY).node
    assert found is not None
    book.tree.pin(found)


@breaks("a pin without lease")
def pin_without_lease(book: Ledger) -> None:
    idle = next(iter(book.tree.policy))
    book.tree.pin(idle)


@breaks("a kept node is not DOOMED")
def kept_but_ready(book: Ledger) -> None:
    # The pages above the deepest kept node were split from it by another load's end.
    found = kept_node(book)
    above = found.parent
    assert above is not None
    above.state = READY


@breaks("two sessions share a slot")
def slots_shared(book: Ledger) -> None:
    sessions = list(book.sessions.by_sid.values())
    sessions[0].slot = sessions[1].slot


@breaks(r"session charged \d+, its leases \d+")
def charge_off_by_one(book: Ledger) -> None:
    next(iter(book.sessions.by_sid.values())).charge += 1


@breaks("a dead session lingers without a lease")
def dead_without_lease(book: Ledger) -> None:
    next(session for session in book.sessions.by_sid.values() if not session.leases).dead = True


@breaks("a session without group")
def group_unknown(book: Ledger) -> None:
    book.sessions.groups.pop("two")


@breaks("a namespace under another's name")
def namespace_under_another_name(book: Ledger) -> None:
    book.spaces.by_ns[THIRD] = book.spaces.by_ns.pop(NS)


@breaks("a namespace under another's name")
def an_ended_namespace_in_use(book: Ledger) -> None:
    book.spaces.ended.add(book.spaces.by_ns[NS])


@breaks("a namespace without tree")
def namespace_without_tree(book: Ledger) -> None:
    space = book.spaces.by_ns[NS]
    space.root = book.clearing._stack[0][1].root


@breaks("a tree without namespace")
def tree_without_namespace(book: Ledger) -> None:
    book.tree.new_root()


@breaks("two namespaces share a number")
def numbers_shared(book: Ledger) -> None:
    first, second = book.spaces.by_ns.values()
    first.index = second.index


@breaks("two namespaces share a number")
def number_shared_with_an_ended_one(book: Ledger) -> None:
    next(iter(book.spaces.by_ns.values())).index = next(iter(book.spaces.ended)).index


@breaks("an ended namespace keeps its number for nothing")
def ended_but_kept(book: Ledger) -> None:
    root = book.tree.new_root()
    book.tree.roots.discard(root)
    book.spaces.ended.add(Space(99, b"e" * 16, 1, root))


@pytest.mark.parametrize("name", BREAKS)
def test_check_notices(name: str):
    words, act = BREAKS[name]
    cache = scene()
    act(cache._book)
    with pytest.raises(BrokenInvariantError, match=f"^broken invariant: {words}$"):
        cache.check()


def test_a_cache_with_some_of_everything_is_in_order():
    cache = scene()
    stats = cache.stats()
    for name in ("ready", "writing", "doomed", "quarantined", "clearing"):
        assert stats[f"frames_{name}"] > 0, name
    assert cache._book.clearing.waiting()
    assert cache._book.clearing.untouched()


def test_counts_are_checked_in_every_slice():
    cache = scene()
    cache._book.free.take(1)
    with pytest.raises(BrokenInvariantError, match="80 frames exist, 79 are somewhere"):
        cache.check(budget=0)


def test_slices_skip_what_has_gone_since():
    cache = make(16)
    engine = Engine(cache)
    for name in "abcd":
        engine.fill([name, 1])
    cache.check(budget=1)
    cache.flush(None, 0.0)
    cache.check(budget=10)
    for name in "abcd":
        engine.fill([name, 1])
    cache.check(budget=1)
    for name in range(8):
        engine.fill([name, 1])
    cache.check(budget=100)
    cache.check()


def test_slices_go_on_after_what_has_gone():
    cache = make(8)
    engine = Engine(cache)
    for name in "abcd":
        engine.fill([name, 1])
    cache.check(budget=1)  # of "d"
    for name in "abd":
        engine.load([name, 1])
        engine.finish()
    engine.fill("xy")  # evicts "c"
    node_of_a = cache._book.tree.match(next(iter(cache._book.tree.roots)), keys(["a", 1])).node
    node_of_a.state = 0
    with pytest.raises(BrokenInvariantError, match="state 0"):
        cache.check(budget=10)


def test_slices_pass_over_merged_nodes():
    cache = make(16)
    engine = Engine(cache)
    engine.fill("z")
    engine.fill("abcd")
    engine.load("ab")
    engine.fill("xy")
    cache.check(budget=1)  # of "xy"; that of "ab" is next
    engine.finish(engine.number - 1)
    root = next(iter(cache._book.tree.roots))
    cache._book.tree.match(root, keys("z")).node.state = 0
    with pytest.raises(BrokenInvariantError, match="state 0"):
        cache.check(budget=10)


def test_slices_come_round_again():
    cache = make(16)
    engine = Engine(cache)
    for name in "abc":
        engine.fill([name, 1])
    for _ in range(3):
        cache.check(budget=2)
    node(cache._book, READY).state = 0
    with pytest.raises(BrokenInvariantError, match="state 0"):
        for _ in range(3):
            cache.check(budget=2)
