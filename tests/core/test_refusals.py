"""What `HostCache` answers when it gives nothing, whole and field by field; and the limits with numbers."""

from __future__ import annotations

import pytest

from kvtier.core.host_cache import SLICE_PAGES, HostCache
from kvtier.core.policy import LeafLRU
from kvtier.core.prefix_tree import Node
from kvtier.core.results import NO_FRAMES, Attached, Ended, Found, LoadGrant, StoreGrant
from kvtier.errors import Status, UsageError
from tests.core.chains import NS, OTHER, Engine, keys, make, ready


def flushed(**options: int) -> tuple[HostCache, Engine]:
    """A cache with "abcd" stored in epoch 2; other namespaces are in epoch 3."""
    cache = make(**options)
    engine = Engine(cache)
    cache.flush(None, 0.0)
    engine.fill("abcd")
    cache.flush(OTHER, 0.0)  # raises the epoch of all namespaces that have no pages
    return cache, engine


@pytest.mark.parametrize(("ns", "epoch"), [(NS, 2), (OTHER, 3)])
def test_a_load_by_nobody_is_gone(ns: bytes, epoch: int):
    cache, engine = flushed()
    gone = LoadGrant(Status.GONE, NO_FRAMES, epoch, 0, "", "")
    assert cache.begin_load(7, 1, ns, keys("ab"), 0, 1, 0.0) == gone
    engine.store("xy", ns=OTHER)
    cache.died(engine.sid, 0.0)  # it lingers, for its store
    assert cache.begin_load(engine.sid, 99, ns, keys("ab"), 0, 1, 0.0) == gone


@pytest.mark.parametrize(("ns", "epoch"), [(NS, 2), (OTHER, 3)])
def test_a_store_by_nobody_is_gone(ns: bytes, epoch: int):
    cache, engine = flushed()
    gone = StoreGrant(Status.GONE, 0, NO_FRAMES, 0, 0, epoch, "", "")
    assert cache.begin_store(7, 1, ns, keys("ab"), 2, 0.0) == gone
    cache.detach(engine.sid, False, 0.0)
    assert cache.begin_store(engine.sid, 99, ns, keys("ab"), 2, 0.0) == gone


def test_a_number_used_before_is_bad_and_the_text_says_why():
    cache, engine = flushed()
    text = "lease 1: numbers rise within a session, the last was 1"
    assert cache.begin_load(engine.sid, 1, NS, keys("ab"), 0, 1, 0.0) == LoadGrant(
        Status.BAD, NO_FRAMES, 2, 0, "", text
    )
    assert cache.begin_store(engine.sid, 1, NS, keys("ab"), 2, 0.0) == StoreGrant(
        Status.BAD, 0, NO_FRAMES, 0, 0, 2, "", text
    )
    text = "a mover has no leases of its own"
    assert cache.abort(engine.movers[0], 5, (), 0.0) == Ended(Status.BAD, 0, 0, 0, text)


def test_a_suspect_is_busy():
    cache, engine = flushed()
    cache.suspect(engine.sid)
    assert engine.load("abc", first=1) == LoadGrant(Status.BUSY, NO_FRAMES, 2, 0, "suspect", "")
    assert engine.store("ab") == StoreGrant(Status.BUSY, 0, NO_FRAMES, 0, 0, 2, "suspect", "")
    assert cache.stats()["missed_suspect"] == 2


def test_a_mover_that_detached_without_quiet_makes_its_group_suspect():
    cache, engine = flushed()
    cache.detach(engine.movers[0], False, 0.0)
    assert engine.load("ab").reason == engine.store("xy").reason == "suspect"


def test_a_miss_counts_the_pages_from_the_first_wanted():
    cache, engine = flushed()
    assert engine.load("xyz", first=1, ns=OTHER) == LoadGrant(Status.MISS, NO_FRAMES, 3, 0, "absent", "")
    assert cache.stats()["missed_absent"] == 2
    assert engine.load("abXYZ", first=2) == LoadGrant(Status.MISS, NO_FRAMES, 2, 2, "absent", "")
    assert cache.stats()["missed_absent"] == 5
    assert engine.load("abcdX", first=1, at_least=4) == LoadGrant(Status.MISS, NO_FRAMES, 2, 4, "too_few", "")
    assert cache.stats()["missed_too_few"] == 4
    assert cache.stats()["asked"] == 9


def test_a_whole_hit_has_no_reason():
    _, engine = flushed()
    grant = engine.load("abcd", at_least=4)
    assert (grant.status, grant.ready, grant.reason, grant.text, grant.epoch) == (Status.OK, 4, "", "", 2)


def test_a_store_of_nothing_new():
    cache, engine = flushed()
    assert engine.store("abc") == StoreGrant(Status.OK, 3, NO_FRAMES, 0, 0, 2, "", "")
    engine.store("abcdef")
    assert engine.store("abcdef") == StoreGrant(Status.OK, 6, NO_FRAMES, 0, 2, 2, "", "")
    assert engine.store("") == StoreGrant(Status.OK, 0, NO_FRAMES, 0, 0, 2, "", "")
    assert cache.stats()["store_asked"] == 4 + 2


def test_a_store_of_an_older_epoch():
    _, engine = flushed()
    for epoch in (1, 3):
        assert engine.store("xy", epoch=epoch) == StoreGrant(
            Status.MISS, 0, NO_FRAMES, 0, 0, 2, "flushed", ""
        )


def test_a_store_without_room():
    cache = make(8)
    engine = Engine(cache)
    engine.fill("ab")
    engine.load("ab")
    engine.store("mn")
    other = Engine(cache, "other", sid=200)
    other.store("xy")
    assert other.store("abcd") == StoreGrant(Status.BUSY, 2, NO_FRAMES, 0, 0, 1, "cap", "")
    Engine(cache, "third", sid=300).store("pq")
    assert cache.stats()["frames_held"] == 8
    fourth = Engine(cache, "fourth", sid=400)
    assert fourth.store("z") == StoreGrant(Status.FULL, 0, NO_FRAMES, 0, 0, 1, "full", "")
    assert fourth.store("xyz") == StoreGrant(Status.BUSY, 2, NO_FRAMES, 0, 2, 1, "cap", "")


def test_lookups_of_what_is_not_there():
    cache, _ = flushed()
    assert cache.lookup(OTHER, keys("ab")) == Found(Status.OK, 0, 0, 3)
    assert cache.lookup(NS, keys("xy")) == Found(Status.OK, 0, 0, 2)
    assert cache.lookup(NS, b"") == Found(Status.OK, 0, 0, 2)


def test_ends_of_nothing():
    cache, engine = flushed()
    assert cache.finish(7, 1, (), 0.0) == Ended(Status.GONE, 0, 0, 0, "")
    assert cache.quiet(7, engine.sid, 1, 0.0) == Ended(Status.GONE, 0, 0, 0, "")
    assert engine.finish(1) == Ended(Status.DONE, 0, 0, 0, "")
    assert engine.abort(99) == Ended(Status.DONE, 0, 0, 0, "")
    assert cache.quiet(engine.movers[0], engine.sid, 1, 0.0) == Ended(Status.DONE, 0, 0, 0, "")
    assert cache.quiet(engine.sid, engine.sid, 1, 0.0) == Ended(
        Status.BAD, 0, 0, 0, "quiet is said by a mover of the planner's group"
    )


def test_an_attach_says_slot_and_completeness():
    cache = make()
    assert cache.attach(1, "g", "planner", 0, 1, 0.0) == Attached(Status.OK, 0, False, "")
    assert cache.attach(2, "g", "mover", 0, 1, 0.0) == Attached(Status.OK, 1, True, "")


def test_limit_of_sessions_by_default():
    cache = make()
    for sid in range(1, 257):
        assert cache.attach(sid, f"g{sid}", "planner", 0, 1, 0.0).status == Status.OK
    assert cache.attach(999, "h", "planner", 0, 1, 0.0).text == "all 256 sessions are taken"


def test_limit_of_leases_by_default():
    cache = make(4)
    engine = Engine(cache)
    engine.fill("a")
    packed = keys("a")
    for number in range(2, 65538):
        assert cache.begin_load(engine.sid, number, NS, packed, 0, 1, 0.0).status == Status.OK
    assert cache.begin_load(engine.sid, 65538, NS, packed, 0, 1, 0.0).reason == "leases"


def test_limit_of_namespaces_by_default():
    cache = make(20_000)
    engine = Engine(cache)
    for number in range(4096):
        assert engine.store("a", ns=number.to_bytes(16, "big")).taken == 1
    assert engine.store("a", ns=NS) == StoreGrant(Status.BUSY, 0, NO_FRAMES, 0, 0, 1, "namespaces", "")


def test_patience_is_ten_seconds_by_default():
    cache = make()
    one, two = Engine(cache, "one"), Engine(cache, "two", sid=200)
    one.store("a", now=0.0)
    assert two.store("a", now=10.0).taken == 0
    assert two.store("a", now=10.1).taken == 1


def test_the_largest_mask_and_rank():
    cache = make()
    assert cache.attach(1, "g", "mover", 63, 64, 0.0).status == Status.OK
    assert cache.attach(2, "g", "mover", 64, 64, 0.0).status == Status.BAD


def test_another_policy_may_choose_who_goes():
    class YoungestFirst(LeafLRU[Node]):
        def pop(self) -> Node:
            return self._order.popitem(last=True)[0]

    cache = make(4, policy=YoungestFirst())
    engine = Engine(cache)
    engine.fill("ab")
    engine.fill("xy")
    engine.store("m")
    assert (ready(cache, "ab"), ready(cache, "xy")) == (2, 1)


def test_a_store_for_a_new_namespace_sweeps_only_a_slice():
    cache = make(4 * SLICE_PAGES, namespaces=1)
    engine = Engine(cache)
    for name in range(SLICE_PAGES + 10):
        engine.fill([name])
    cache.flush(None, 0.0)
    assert engine.store("a", ns=OTHER).reason == "namespaces"
    assert cache.stats()["frames_clearing"] == 10
    assert engine.store("a", ns=OTHER).taken == 1


def test_all_numbers_in_stats():
    cache = make(40)
    one, two = Engine(cache, "one", ranks=2), Engine(cache, "two", sid=200)
    for name in ("ab", "cd"):
        one.fill(name)
    for _ in range(2):
        one.load("ab")
        one.abort()
        one.load("cdX")
        one.finish()
    for name in ("hij", "klm"):
        one.store(name)
        number = one.number
        two.store(name + "Q", now=99.0)
        two.abort()
        two.store(name + "Q", now=99.0)
        two.finish()
        one.finish(number)
    for name in ("uv", "wx"):
        one.store(name)
        number = one.number
        one.store(name + "yz")
        one.finish()
        one.abort(number)
    cache.flush(None, 0.0)
    cache.sweep(99)
    stats = cache.stats()
    assert all(type(value) is int for value in stats.values())
    assert stats == {
        "frames": 40,
        "frames_usable": 40,
        "frames_free": 40,
        "frames_ready": 0,
        "frames_writing": 0,
        "frames_doomed": 0,
        "frames_quarantined": 0,
        "frames_clearing": 0,
        "frames_held": 0,
        "nodes": 0,
        "sessions": 5,
        "engines": 2,
        "leases": 0,
        "namespaces": 0,
        "epoch": 2,
        "asked": 6,
        "hits": 4,
        "missed_absent": 2,
        "unused": 4,
        "store_asked": 34,
        "store_taken": 34,
        "stored": 16,
        "evicted": 0,
        "dropped": 16,
        "superseded": 6,
    }


def test_a_wrong_first_page_names_all_three_numbers():
    _, engine = flushed()
    with pytest.raises(UsageError, match=r"^first=3, at_least=1 of 2 pages: expected 0 <= first <= pages$"):
        engine.load("ab", first=3)
