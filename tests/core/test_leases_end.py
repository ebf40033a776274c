"""How leases end, who may still touch their frames, and flushes (R9 to R11, R13, R18)."""

from __future__ import annotations

import pytest

from kvtier.core.checks import BrokenInvariantError
from kvtier.core.host_cache import SLICE_PAGES, HostCache
from kvtier.core.writes import EpochRecord, Free, LeaseEnd, NamespaceEnd, Quarantine
from kvtier.errors import Status, UsageError
from tests.core.chains import NS, OTHER, Engine, keys, make, ready


def test_r9_frames_come_back_when_every_mover_is_quiet():
    cache = make()
    engine = Engine(cache, ranks=3)
    grant = engine.store("abc")
    cache.take_writes()
    engine.abort(quiet={0})
    assert next(type(write) for write in cache.take_writes()) is Quarantine
    assert cache.stats()["frames_quarantined"] == 3
    assert cache.quiet(engine.movers[1], engine.sid, engine.number, 0.0).status == Status.OK
    assert cache.stats()["frames_free"] == 29
    cache.take_writes()
    assert cache.quiet(engine.movers[2], engine.sid, engine.number, 0.0).status == Status.OK
    free, end = cache.take_writes()
    assert isinstance(free, Free)
    assert sorted(free.frames) == sorted(grant.frames)
    assert isinstance(end, LeaseEnd)
    assert cache.stats()["frames_free"] == 32


def test_r9_a_load_keeps_its_pin_until_the_movers_are_quiet():
    cache = make(8)
    engine = Engine(cache, ranks=2)
    engine.fill("abcd")
    engine.load("abcd")
    number = engine.number
    assert engine.finish(number, quiet={1}).status == Status.OK
    assert cache.stats()["frames_held"] == 4
    assert engine.finish(number, quiet={0}).status == Status.DONE
    assert cache.stats()["frames_held"] == 0


def test_r9_a_dead_mover_is_as_good_as_quiet():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("ab")
    engine.abort(quiet={0})
    cache.died(engine.movers[1], 0.0)
    assert cache.stats()["frames_free"] == 32


def test_r9_what_a_mover_said_before_the_end_counts_at_the_end():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("ab")
    cache.quiet(engine.movers[1], engine.sid, engine.number, 0.0)
    engine.abort(quiet={0})
    assert cache.stats()["frames_free"] == 32


def test_ready_means_whole_a_finish_without_all_movers_drops_the_pages():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("abc")
    assert engine.finish(quiet={0}) == (Status.OK, 0, 3, 0, "")
    assert ready(cache, "abc") == 0
    assert cache.stats()["frames_quarantined"] == 3


def test_ready_means_whole_also_when_a_mover_has_died():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("abc")
    cache.died(engine.movers[1], 0.0)
    assert engine.finish(quiet={0}).dropped == 3
    assert cache.stats()["frames_free"] == 32


def test_r10_ends_are_idempotent():
    cache = make()
    engine = Engine(cache)
    engine.store("ab")
    assert engine.finish().status == Status.OK
    assert engine.finish().status == Status.DONE
    assert engine.abort().status == Status.DONE
    assert cache.quiet(engine.movers[0], engine.sid, engine.number, 0.0).status == Status.DONE
    assert ready(cache, "ab") == 2


def test_r10_numbers_rise():
    cache = make()
    engine = Engine(cache)
    assert cache.begin_store(engine.sid, 5, NS, keys("ab"), 1, 0.0).status == Status.OK
    for number in (5, 4, 0, -1, 1 << 63):
        assert cache.begin_store(engine.sid, number, NS, keys("x"), 1, 0.0).status == Status.BAD
        assert cache.begin_load(engine.sid, number, NS, keys("ab"), 0, 1, 0.0).status == Status.BAD
    assert cache.begin_load(engine.sid, (1 << 63) - 1, NS, keys("ab"), 0, 1, 0.0).status == Status.MISS


def test_r10_an_abort_that_overtakes_its_begin_undoes_it():
    cache = make()
    engine = Engine(cache)
    assert cache.abort(engine.sid, 7, (), 0.0).status == Status.DONE
    assert cache.begin_store(engine.sid, 7, NS, keys("ab"), 1, 0.0).status == Status.BAD
    assert cache.stats()["frames_free"] == 32
    assert cache.begin_store(engine.sid, 8, NS, keys("ab"), 1, 0.0).status == Status.OK
    assert cache.abort(engine.sid, 1 << 63, (), 0.0).status == Status.BAD


def test_r10_a_finish_of_a_lease_that_never_was_raises():
    cache = make()
    engine = Engine(cache)
    with pytest.raises(UsageError, match="begun none after 0"):
        cache.finish(engine.sid, 1, (0,), 0.0)
    engine.store("ab")
    with pytest.raises(UsageError, match="ranks 0 to 0"):
        engine.finish(quiet={1})
    with pytest.raises(UsageError, match="ranks 0 to 0"):
        engine.finish(quiet={-1})
    assert cache.stats()["frames_writing"] == 2


def test_a_missed_begin_uses_up_its_number():
    cache = make()
    engine = Engine(cache)
    assert engine.load("ab").status == Status.MISS
    assert engine.finish().status == Status.DONE


def test_r11_detach_when_quiet_gives_everything_back():
    cache = make()
    engine = Engine(cache)
    engine.fill("ab")
    engine.load("ab")
    engine.store("abcd")
    assert cache.detach(engine.sid, True, 0.0) == Status.OK
    stats = cache.stats()
    assert (stats["frames_held"], stats["frames_ready"], stats["leases"], stats["sessions"]) == (0, 2, 0, 1)


def test_r11_detach_without_quiet_frees_nothing_before_the_proof_of_death():
    cache = make()
    engine = Engine(cache)
    engine.store("ab")
    assert cache.detach(engine.sid, False, 0.0) == Status.OK
    assert cache.detach(engine.movers[0], False, 0.0) == Status.OK
    assert cache.stats()["frames_writing"] == 2
    assert engine.store("x").status == engine.load("x").status == Status.GONE
    cache.died(engine.sid, 0.0)
    assert cache.stats()["frames_quarantined"] == 2
    cache.died(engine.movers[0], 0.0)
    assert cache.stats()["frames_free"] == 32
    assert cache.stats()["sessions"] == 0


def test_a_dead_planner_lingers_until_its_last_frame_has_left():
    cache = make()
    engine = Engine(cache)
    engine.store("ab")
    number = engine.number
    cache.died(engine.sid, 0.0)
    assert cache.stats()["sessions"] == 2
    assert cache.finish(engine.sid, number, (0,), 0.0).status == Status.GONE
    assert cache.attach(999, "g", "planner", 0, 1, 0.0).status == Status.BUSY
    assert cache.quiet(engine.movers[0], engine.sid, number, 0.0).status == Status.OK
    assert cache.stats()["sessions"] == 1
    assert cache.died(engine.sid, 0.0) == Status.GONE


def test_quiet_is_for_movers_of_the_same_group():
    cache = make()
    engine, other = Engine(cache), Engine(cache, "other", sid=200)
    engine.store("ab")
    assert cache.quiet(other.movers[0], engine.sid, engine.number, 0.0).status == Status.BAD
    assert cache.quiet(engine.sid, engine.sid, engine.number, 0.0).status == Status.BAD
    assert cache.quiet(12345, engine.sid, engine.number, 0.0).status == Status.GONE
    assert cache.quiet(engine.movers[0], 12345, 1, 0.0).status == Status.DONE


def test_movers_have_no_leases():
    cache = make()
    engine = Engine(cache)
    assert cache.begin_load(engine.movers[0], 1, NS, b"", 0, 1, 0.0).status == Status.BAD
    assert cache.begin_store(engine.movers[0], 1, NS, b"", 1, 0.0).status == Status.BAD
    assert cache.abort(engine.movers[0], 1, (), 0.0).status == Status.BAD


def test_r13_a_flush_makes_pages_unfindable_and_counts_them():
    cache = make()
    engine = Engine(cache)
    engine.fill("abc")
    engine.fill("xy", ns=OTHER)
    before = cache.epoch(NS)
    assert cache.flush(NS, 0.0) == (3, 0, before + 1)
    assert cache.lookup(NS, keys("abc")) == (Status.OK, 0, 0, before + 1)
    assert (ready(cache, "xy", OTHER), cache.epoch(OTHER)) == (2, before)
    assert cache.stats()["frames_clearing"] == 3
    assert cache.sweep(100) == 0
    assert cache.stats()["frames_free"] == 30


def test_r13_a_flush_of_all_reaches_every_namespace():
    cache = make()
    engine = Engine(cache)
    engine.fill("abc")
    engine.fill("xy", ns=OTHER)
    freed, doomed, epoch = cache.flush(None, 0.0)
    assert (freed, doomed) == (5, 0)
    assert cache.epoch(NS) == cache.epoch(OTHER) == epoch


def test_r13_a_flush_of_all_counts_what_hangs_under_writers_too():
    cache = make()
    engine = Engine(cache)
    for ns in (NS, OTHER):
        for name in "ab":
            engine.store(name, ns=ns)
            engine.store([name, 1], ns=ns)
            engine.finish()  # READY, but not visible
        engine.fill("c", ns=ns)
    assert cache.flush(None, 0.0)[:2] == (2 * (2 + 1), 2 * 2)
    cache.check()


def test_r13_pages_being_read_are_doomed_and_go_with_the_last_pin():
    cache = make()
    engine = Engine(cache)
    engine.fill("abcd")
    engine.load("ab")
    engine.load("abc")
    assert cache.flush(NS, 0.0)[:2] == (1, 3)
    assert ready(cache, "abc") == 0
    engine.finish(engine.number)
    cache.check()
    cache.sweep(10)
    assert cache.stats()["frames_free"] == 30
    engine.finish(engine.number - 1)
    assert cache.stats()["frames_free"] == 32
    assert cache.stats()["frames_doomed"] == 0


def test_r13_pages_are_freed_after_those_below_them_even_when_read():
    cache = make()
    engine = Engine(cache)
    frames = engine.fill("abcd")
    engine.load("ab")
    cache.flush(NS, 0.0)
    engine.finish()  # nobody reads "ab" any more, but "cd" still hang below it
    assert cache.stats()["frames_free"] == 28
    cache.take_writes()
    assert cache.sweep(1) == 0
    freed = [frame for write in cache.take_writes() if isinstance(write, Free) for frame in write.frames]
    assert freed == frames[::-1]


def test_r13_what_is_being_written_is_doomed_and_its_finish_says_so():
    cache = make()
    engine = Engine(cache)
    engine.fill("ab")
    engine.store("abcd")
    number = engine.number
    assert cache.flush(None, 0.0)[:2] == (2, 2)
    assert engine.finish(number) == (Status.OK, 0, 2, 0, "")
    cache.sweep(10)
    assert cache.stats()["frames_free"] == 32


def test_r13_a_store_of_an_older_epoch_is_refused():
    cache = make()
    engine = Engine(cache)
    epoch = cache.lookup(NS, keys("ab")).epoch
    cache.flush(NS, 0.0)
    grant = engine.store("ab", epoch=epoch)
    assert (grant.status, grant.taken, grant.reason, grant.epoch) == (Status.MISS, 0, "flushed", epoch + 1)
    assert engine.store("ab", epoch=grant.epoch).taken == 2


def test_r13_a_flushed_namespace_starts_anew_at_once():
    cache = make()
    engine = Engine(cache)
    engine.fill("ab")
    cache.flush(NS, 0.0)
    engine.fill("ab")
    assert ready(cache, "ab") == 2
    cache.check()


def test_r13_two_flushes_under_one_reader():
    cache = make()
    engine = Engine(cache)
    engine.fill("abc")
    engine.load("ab")
    cache.flush(NS, 0.0)
    assert cache.flush(NS, 0.0)[:2] == (0, 0)
    engine.finish()
    cache.sweep(100)
    assert cache.stats()["frames_free"] == 32


def freed_by(cache: HostCache) -> list[int]:
    return [frame for write in cache.take_writes() if isinstance(write, Free) for frame in write.frames]


def test_r13_branches_are_swept_tails_first_and_one_node_at_a_time():
    cache = make()
    engine = Engine(cache)
    trunk = engine.fill("ab")
    left = engine.fill("abcd")[:2]
    right = engine.fill("abXY")
    deeper = engine.fill("abXYZ")
    other = engine.fill("abXYQ")
    cache.flush(NS, 0.0)
    cache.take_writes()
    assert cache.sweep(0) == 8
    order = []
    while cache.stats()["frames_clearing"]:
        cache.sweep(1)
        order += freed_by(cache)
        cache.check()
    for below, above in ((deeper, right), (other, right), (right, trunk), (left, trunk)):
        assert order.index(below[0]) < order.index(above[-1])
    for chain in (trunk, left, right):
        assert order.index(chain[1]) < order.index(chain[0])


def test_r13_a_sweep_stops_in_time_below_a_page_that_is_read():
    cache = make()
    engine = Engine(cache)
    for tail in "bcd":
        engine.fill("a" + tail)
    engine.load("a")
    assert cache.flush(NS, 0.0)[:2] == (3, 1)
    assert cache.sweep(1) == 2
    assert cache.sweep(1) == 1
    engine.finish()
    assert cache.stats()["frames_clearing"] == 2
    assert cache.sweep(1) == 0
    assert cache.stats()["frames_free"] == 32


def test_r13_readers_of_one_page_and_of_pages_above_one_another():
    cache = make()
    engine = Engine(cache)
    frames = engine.fill("abcd")
    for path in ("ab", "abcd", "ab", "abc"):
        engine.load(path)
    assert cache.flush(NS, 0.0)[:2] == (0, 4)
    cache.take_writes()
    order = []
    for back in (0, 2, 3, 1):
        cache.check()
        engine.finish(engine.number - back)
        order.append(freed_by(cache))
    assert order == [[], [frames[3], frames[2]], [], [frames[1], frames[0]]]
    cache.check()


def test_what_is_known_to_be_quiet_stays_known_when_the_planner_dies():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("ab")
    engine.abort(quiet={0})
    cache.died(engine.sid, 0.0)
    assert cache.stats()["frames_quarantined"] == 2
    cache.quiet(engine.movers[1], engine.sid, engine.number, 0.0)
    assert cache.stats()["frames_free"] == 32


def test_a_planner_that_detaches_when_quiet_settles_what_had_ended():
    cache = make()
    engine = Engine(cache, ranks=2)
    engine.store("ab")
    engine.abort(quiet={0})
    engine.load("x")
    cache.detach(engine.sid, True, 0.0)
    assert cache.stats()["frames_free"] == 32
    assert cache.stats()["sessions"] == 2


def test_r18_a_flush_frees_in_slices():
    cache = make(64)
    engine = Engine(cache)
    for name in range(8):
        engine.fill([name, 1])
    cache.flush(None, 0.0)
    cache.take_writes()
    left = [cache.sweep(4) for _ in range(5)]
    assert left == [12, 8, 4, 0, 0]
    cache.check()


def test_a_store_that_is_short_of_frames_takes_what_a_flush_left():
    cache = make(8)
    engine = Engine(cache)
    for name in "abcd":
        engine.fill([name, 1])
    cache.flush(None, 0.0)
    assert engine.store("wxyz").taken == 4
    assert cache.stats()["evicted"] == 0
    cache.check()


def test_a_store_that_is_one_frame_short_takes_that_from_what_a_flush_left():
    cache = make(5)
    engine = Engine(cache)
    engine.fill("ab")
    engine.fill("cd")
    cache.flush(None, 0.0)
    assert engine.store("wx").taken == 2
    assert (cache.stats()["evicted"], cache.stats()["frames_clearing"]) == (0, 2)
    cache.check()


def test_r14_a_namespaces_number_is_used_again_only_when_nothing_of_it_is_left():
    cache = make(namespaces=1)
    engine = Engine(cache)
    engine.fill("ab")
    engine.load("ab")
    assert engine.store("x", ns=OTHER).reason == "namespaces"
    cache.flush(NS, 0.0)
    assert engine.store("x", ns=OTHER).reason == "namespaces"
    engine.finish(engine.number - 2)
    assert engine.store("x", ns=OTHER).taken == 1
    cache.check()


def test_a_store_in_a_new_namespace_sweeps_for_its_number():
    cache = make(namespaces=1)
    engine = Engine(cache)
    engine.fill("ab")
    cache.flush(NS, 0.0)
    assert engine.store("x", ns=OTHER).taken == 1


def test_a_number_that_sweeping_gives_back_costs_no_other_namespace():
    cache = make(namespaces=2)
    engine = Engine(cache)
    engine.fill("ab")
    engine.fill("cd", ns=OTHER)
    cache.flush(NS, 0.0)
    assert engine.store("x", ns=b"t" * 16).taken == 1
    assert cache.lookup(OTHER, keys("cd")).ready == 2
    cache.check()


def test_an_empty_namespace_gives_its_number_up():
    cache = make(4, namespaces=2)
    engine = Engine(cache)
    engine.fill("a")
    engine.fill("b", ns=OTHER)
    third = b"t" * 16
    engine.load("b", ns=OTHER)
    engine.load("a")
    assert engine.store("xy", ns=third).reason == "namespaces"
    engine.finish(engine.number - 1)
    engine.finish(engine.number - 2)
    for name in "pqrs":
        engine.fill(name)  # the other namespace's only page is evicted
    cache.take_writes()
    assert engine.store("xy", ns=third).taken == 2
    assert any(isinstance(write, NamespaceEnd) for write in cache.take_writes())
    assert cache.lookup(OTHER, keys("b"))[1:] == (0, 0, cache.epoch(OTHER))
    cache.check()


def test_r14_a_full_table_of_namespaces_gives_up_the_one_used_longest_ago():
    """Else a host with more tenants than entries would never store anything of a new one again."""
    cache = make(namespaces=3)
    engine = Engine(cache)
    names = [bytes([name]) * 16 for name in range(5)]
    for name in names[:3]:
        engine.fill("abc", ns=name)
    engine.load("a", ns=names[0])
    engine.finish()
    epoch = cache.epoch(names[1])
    cache.take_writes()
    assert engine.store("xy", ns=names[3]).taken == 2
    writes = cache.take_writes()
    ended = next(at for at, write in enumerate(writes) if isinstance(write, NamespaceEnd))
    freed = next(at for at, write in enumerate(writes) if isinstance(write, Free))
    begun = next(at for at, write in enumerate(writes) if isinstance(write, EpochRecord))
    assert ended < freed < begun  # never reachable under another's name
    assert writes[begun].ns_index == writes[ended].ns_index == 1
    assert [cache.lookup(name, keys("abc")).ready for name in names] == [3, 0, 3, 0, 0]
    assert cache.stats()["evicted"] == 3
    assert cache.epoch(names[1]) == epoch
    cache.check()
    # One that is being read or written is never given up.
    engine.load("a", ns=names[2])
    assert engine.store("ab", ns=names[4]).taken == 2
    assert [cache.lookup(name, keys("abc")).ready for name in names] == [0, 0, 3, 0, 0]
    assert cache.stats()["evicted"] == 6
    engine.load("a", ns=names[2])
    assert engine.store("ab", ns=b"z" * 16).reason == "namespaces"
    cache.check()


def test_r14_a_namespace_that_is_given_up_is_swept_by_slices():
    cache = make(4 * SLICE_PAGES, namespaces=1)
    engine = Engine(cache)
    for name in range(SLICE_PAGES + 10):
        engine.fill([name])
    assert engine.store("a", ns=OTHER).reason == "namespaces"
    assert cache.stats()["frames_clearing"] == 10
    assert engine.store("a", ns=OTHER).taken == 1
    assert cache.stats()["evicted"] == SLICE_PAGES + 10


def test_a_flushed_page_that_two_branches_were_read_below_goes_with_the_last_of_them():
    cache = make(8)
    engine = Engine(cache)
    engine.fill("ab")
    engine.fill("ac")
    engine.load("ab")
    engine.load("ac")
    assert cache.flush(NS, 0.0).doomed == 3
    engine.finish(engine.number - 1)
    cache.check()
    engine.finish(engine.number)
    cache.check()
    assert cache.stats()["frames_free"] == 8


def test_hits_count_at_the_finish_of_a_load():
    cache = make()
    engine = Engine(cache)
    engine.fill("abcd")
    engine.load("abcdXY", first=1)
    assert cache.stats()["hits"] == 0
    engine.finish()
    engine.load("abcd")
    engine.abort()
    engine.load("zz")
    stats = cache.stats()
    assert (stats["asked"], stats["hits"], stats["missed_absent"], stats["unused"]) == (7, 3, 4, 4)


def test_check_notices_a_lost_frame():
    cache = make()
    Engine(cache).fill("ab")
    cache.check()
    cache._book.free.take(1)
    with pytest.raises(BrokenInvariantError, match="32 frames exist, 31 are somewhere"):
        cache.check(budget=1)


def test_check_in_slices_finds_a_broken_node():
    cache = make()
    engine = Engine(cache)
    for name in "abcdef":
        engine.fill([name, 1])
    cache.check(budget=3)
    victim = next(iter(next(iter(cache._book.tree.roots)).children.values()))
    victim.state = 0
    with pytest.raises(BrokenInvariantError, match="state 0"):
        for _ in range(4):
            cache.check(budget=3)
