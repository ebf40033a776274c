"""Stores and loads, rule by rule (R4 to R8, R12, R28)."""

from __future__ import annotations

import pytest

from kvtier.core.host_cache import HostCache
from kvtier.core.results import NO_FRAMES
from kvtier.core.stores import _last_frame
from kvtier.core.writes import LOAD, STORE, Claim, Doom, Free, LeaseRecord, Ready, Reparent
from kvtier.errors import Status, UsageError
from tests.core.chains import NS, OTHER, Engine, keys, make, ready


def test_a_stored_page_is_found_once_its_finish_was_answered():
    cache = make()
    engine = Engine(cache)
    grant = engine.store("abc")
    assert (grant.status, grant.start, grant.taken, grant.pending, grant.reason) == (Status.OK, 0, 3, 0, "")
    assert cache.lookup(NS, keys("abc"))[1:3] == (0, 3)
    assert engine.finish() == (Status.OK, 3, 0, 0, "")
    assert cache.lookup(NS, keys("abcd"))[1:3] == (3, 0)
    engine.store("abcd")
    assert cache.lookup(NS, keys("abcde"))[1:3] == (3, 1)


def test_namespaces_share_nothing():
    cache = make()
    Engine(cache).fill("abc")
    assert ready(cache, "abc", OTHER) == 0


def test_an_existing_page_wins_and_costs_nothing():
    cache = make(8)
    engine = Engine(cache)
    frames = engine.fill("ab")
    free = cache.stats()["frames_free"]
    grant = engine.store("ab")
    assert (grant.status, grant.start, grant.taken) == (Status.OK, 2, 0)
    assert cache.stats()["frames_free"] == free
    assert cache.stats()["leases"] == 0
    assert list(engine.load("ab").frames) == frames


def test_r4_a_lease_keeps_its_pages_through_splits_and_merges():
    cache = make()
    engine = Engine(cache)
    frames = engine.fill("abcdef")
    long, long_number = engine.load("abcdef"), engine.number
    short, short_number = engine.load("abX"), engine.number
    engine.fill("abcX")
    assert list(long.frames) == frames
    assert list(short.frames) == frames[:2]
    cache.check()
    engine.finish(short_number)
    engine.finish(long_number)
    cache.check()
    assert list(engine.load("abcdef").frames) == frames


def test_r4_a_chat_of_many_turns_leaves_one_node():
    cache = make(64)
    engine = Engine(cache)
    for turn in range(1, 21):
        engine.fill(range(turn))
    assert cache.stats()["nodes"] == 1
    assert ready(cache, range(20)) == 20


def test_r4_nodes_stay_apart_where_a_pin_ends_and_join_at_its_release():
    cache = make()
    engine = Engine(cache)
    engine.fill("abcd")
    engine.load("ab")
    assert cache.stats()["nodes"] == 2
    engine.finish()
    assert cache.stats()["nodes"] == 1


def test_r4_a_store_hangs_under_a_split_and_siblings_do_not_join():
    cache = make()
    engine = Engine(cache)
    engine.fill("abcd")
    engine.fill("abXY")
    assert cache.stats()["nodes"] == 3
    assert (ready(cache, "abcd"), ready(cache, "abXY")) == (4, 4)


def test_r5_a_store_never_evicts_its_own_prefix():
    cache = make(8)
    engine = Engine(cache)
    engine.fill("ab")  # the oldest
    engine.fill("wx")
    engine.fill("yz")
    grant = engine.store("abcd")
    assert (grant.start, grant.taken) == (2, 2)
    engine.finish()
    assert ready(cache, "abcd") == 4
    engine.store("abefg")
    engine.finish()
    assert ready(cache, "ab") == 2
    assert ready(cache, "wx") < 2


def test_r5_what_a_store_matched_stays_until_its_end():
    cache = make(8)
    engine = Engine(cache)
    engine.fill("ab")
    engine.store("abc")
    stored = engine.number
    for name in range(4):
        engine.fill([name, name])
    assert ready(cache, "ab") == 2
    engine.finish(stored)
    assert ready(cache, "abc") == 3


def test_r6_the_longest_prefix_that_fits_front_first():
    cache = make(8)
    engine = Engine(cache)
    grant = engine.store(range(20))
    assert (grant.status, grant.start, grant.taken, grant.reason) == (Status.OK, 0, 4, "cap")
    assert engine.finish().visible == 4
    assert ready(cache, range(20)) == 4


def test_r6_a_full_pool_says_so_and_changes_nothing():
    cache = make(9)
    one, two = Engine(cache, "one"), Engine(cache, "two", sid=200)
    one.store("abc")
    two.store("def")
    third = Engine(cache, "three", sid=300)
    third.store("gh")  # a cap of 2 pages now
    before = cache.stats()
    cache.take_writes()
    grant = Engine(cache, "four", sid=400).store("jklm")
    assert (grant.taken, grant.reason) == (1, "cap")
    grant = Engine(cache, "five", sid=500).store("nop")
    assert (grant.status, grant.taken, grant.reason) == (Status.FULL, 0, "full")
    after = cache.stats()
    assert after["frames_free"] == 0
    assert after["evicted"] == before["evicted"] == 0
    cache.check()


def test_r6_a_match_inside_a_node_leaves_the_rest_of_it_to_evict():
    cache = make(8)
    one = Engine(cache, "one")
    one.fill("abcd")
    one.store("wxyz")
    assert Engine(cache, "two", sid=200).store("aX").taken == 1


def test_r6_a_store_cannot_count_on_the_pages_that_it_pins():
    cache = make(12)
    one = Engine(cache, "one")
    one.fill("ab")
    assert one.store(range(6)).taken == 6
    two = Engine(cache, "two", sid=200)
    assert two.store("mnop").taken == 4
    three = Engine(cache, "three", sid=300)
    assert three.store("abc")[:7] == (Status.FULL, 2, NO_FRAMES, 0, 0, 1, "full")
    assert cache.stats()["frames_held"] == 10


def test_r6_a_load_of_nothing_is_a_miss_and_makes_no_lease():
    cache = make()
    engine = Engine(cache)
    engine.fill("abc")
    assert (engine.load("xyz").status, engine.load("xyz").reason) == (Status.MISS, "absent")
    grant = engine.load("abcd", first=2, at_least=2)
    assert (grant.status, grant.reason, grant.ready, len(grant.frames)) == (Status.MISS, "too_few", 3, 0)
    assert (engine.load("abc", first=3, at_least=0).status, cache.stats()["leases"]) == (Status.MISS, 0)
    assert engine.load("abcd", first=2, at_least=1).status == Status.OK


def test_a_load_gives_the_frames_from_its_first_page_on():
    cache = make()
    engine = Engine(cache)
    frames = engine.fill("abcdef")
    grant = engine.load("abcdX", first=1)
    assert (list(grant.frames), grant.ready, grant.reason) == (frames[1:4], 4, "absent")


def test_r7_a_page_is_visible_when_all_its_ancestors_are_ready():
    cache = make()
    engine = Engine(cache)
    engine.store("ab")
    first = engine.number
    assert (engine.store("abcd").start, engine.store("abcd").pending) == (2, 4)
    second = engine.number - 1
    assert engine.finish(second).visible == 0
    assert cache.lookup(NS, keys("abcd"))[1:3] == (0, 4)
    assert engine.load("abcd").reason == "pending"
    assert engine.finish(first).visible == 2
    assert ready(cache, "abcd") == 4


def test_r7_what_hangs_under_an_aborted_writer_is_lost():
    cache = make()
    engine = Engine(cache)
    engine.store("ab")
    first = engine.number
    engine.store("abc")
    engine.finish()  # READY under the first, never visible
    engine.store("abcd")
    last = engine.number
    assert engine.abort(first) == (Status.OK, 0, 2, 0, "")
    stats = cache.stats()
    assert (stats["frames_writing"], stats["frames_ready"], stats["frames_doomed"]) == (0, 0, 1)
    cache.check()
    assert engine.finish(last) == (Status.OK, 0, 1, 0, "")
    assert cache.stats()["frames_free"] == 32
    assert ready(cache, "abcd") == 0


def test_r7_a_dead_writer_dooms_what_others_hung_under_it():
    cache = make()
    one, two = Engine(cache, "one"), Engine(cache, "two", sid=200)
    one.store("ab")
    two.store("abcd")
    cache.died(one.sid, 1.0)
    assert ready(cache, "abcd") == 0
    assert cache.stats()["frames_quarantined"] == 2  # its mover may still be writing
    cache.died(one.movers[0], 1.0)
    assert cache.stats()["frames_quarantined"] == 0
    assert two.finish().dropped == 2
    assert cache.stats()["frames_free"] == 32


def test_r8_a_hung_writers_pages_are_taken_over_after_patience():
    cache = make(patience_s=10.0)
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    old = list(hung.store("abc", now=0.0).frames)
    assert (other.store("abc", now=10.0).taken, other.store("abc", now=10.0).pending) == (0, 3)
    grant = other.store("abcd", now=10.1)
    assert (grant.start, grant.taken, grant.pending) == (0, 4, 0)
    assert not set(grant.frames) & set(old)
    assert other.finish().visible == 4
    assert ready(cache, "abcd") == 4
    assert cache.stats()["frames_doomed"] == 3
    assert hung.finish() == (Status.OK, 0, 0, 3, "")
    assert list(other.load("abcd").frames) == list(grant.frames)
    assert cache.stats()["frames_free"] == 28


def test_r8_patience_is_an_argument():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("ab", now=0.0)
    assert other.store("ab", now=2.0).taken == 0
    assert other.store("ab", now=2.0, patience_s=1.0).taken == 2


def test_r8_children_move_under_the_new_pages():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("ab", now=0.0)
    child = other.store("abcd", now=1.0)
    other.finish()
    cache.take_writes()
    grant = other.store("ab", now=20.0)
    writes = cache.take_writes()
    assert [type(write) for write in writes[1:]] == [Claim, Doom, LeaseRecord, Reparent, LeaseRecord]
    assert writes[4] == Reparent(child.frames[0], grant.frames[1])
    assert other.finish().visible == 2
    assert ready(cache, "abcd") == 4
    assert hung.abort().superseded == 2
    assert ready(cache, "abcd") == 4


def test_r8_only_the_pages_that_are_wanted_are_taken_over():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("abcd", now=0.0)
    assert other.store("abX", now=20.0).taken == 3
    assert other.finish().visible == 3
    assert hung.finish() == (Status.OK, 2, 0, 2, "")
    assert ready(cache, "abcd") == 4


def test_r8_a_takeover_ends_before_pages_that_are_written_in_time():
    cache = make()
    hung, other, third = Engine(cache, "a"), Engine(cache, "b", sid=200), Engine(cache, "c", sid=300)
    hung.store("ab", now=0.0)
    other.store("abcd", now=9.0)
    grant = third.store("abcde", now=15.0)
    assert (grant.start, grant.taken, grant.pending, grant.reason) == (0, 2, 2, "pending")
    third.finish()
    other.finish()
    assert ready(cache, "abcd") == 4


def test_r8_several_hung_stores_below_a_ready_prefix_are_taken_over_at_once():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    prefix = hung.fill("ab")
    old = [*hung.store("abcd", now=0.0).frames, *hung.store("abcdef", now=0.0).frames]
    cache.take_writes()
    grant = other.store("abcdefg", now=20.0)
    assert (grant.start, grant.taken, grant.pending, grant.reason, grant.epoch) == (2, 5, 0, "", 1)
    writes = cache.take_writes()
    (claim,) = [write for write in writes if isinstance(write, Claim)]
    assert (claim.parent_frame, claim.parent_tag) == (prefix[1], keys("ab")[32:40])
    doomed = [frame for write in writes if isinstance(write, Doom) for frame in write.frames]
    assert sorted(doomed) == sorted(old)
    assert other.finish().visible == 5
    assert hung.finish(hung.number).superseded == hung.finish(hung.number - 1).superseded == 2
    assert cache.stats()["frames_free"] == 32 - 7
    cache.check()


def test_r8_a_hung_store_that_was_split_counts_all_that_it_lost():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("abcd", now=0.0)
    other.store("abX", now=1.0)
    other.abort()
    assert other.store("abcd", now=20.0).taken == 4
    assert hung.finish().superseded == 4


@pytest.mark.parametrize("room", [1, 2, 3])
def test_r8_a_takeover_may_end_anywhere_in_what_hung(room: int):
    cache = make(24)
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("ab", now=0.0)
    last = hung.store("abcd", now=0.0).frames
    other.store(range(8 - room), now=0.0)
    cache.take_writes()
    grant = other.store("abcd", now=20.0)
    assert (grant.start, grant.taken, grant.reason) == (0, room, "cap")
    moved = [write for write in cache.take_writes() if isinstance(write, Reparent)]
    child = {1: [1], 2: [last[0]], 3: [last[1]]}[room]
    assert [write.frame for write in moved] == child
    assert moved[0].parent_frame == grant.frames[-1]
    cache.check()
    assert other.finish().visible == room
    hung.finish(1)
    hung.finish(2)
    assert ready(cache, "abcd") == 4
    cache.check()


def test_r8_hung_pages_beyond_pages_written_in_time_wait():
    cache = make(64)
    one, two, three = Engine(cache, "a"), Engine(cache, "b", sid=200), Engine(cache, "c", sid=300)
    one.store("ab", now=0.0)
    two.store("abcd", now=9.0)
    one.store("abcdef", now=0.0)
    grant = three.store("abcdefg", now=15.0)
    assert (grant.start, grant.taken, grant.pending, grant.reason) == (0, 2, 4, "pending")
    cache.check()


def test_r8_time_frees_no_frame():
    cache = make()
    hung, other = Engine(cache, "hung"), Engine(cache, "other", sid=200)
    hung.store("abc", now=0.0)
    other.store("abc", now=1e9)
    assert cache.stats()["frames_doomed"] == 3
    cache.check()


def test_r12_a_session_holds_at_most_half_of_the_pool():
    cache = make(16)
    engine = Engine(cache)
    for name in "abc":
        assert engine.store([name, 1]).taken == 2
    assert (engine.store("wxyz").taken, engine.store("v").status) == (2, Status.BUSY)
    engine.finish()  # of nothing
    cache.check()


def test_r12_several_engines_have_less_each():
    cache = make(16)
    one = Engine(cache, "one")
    Engine(cache, "two", sid=200)
    assert one.store(range(10)).taken == 5


def test_r12_pages_that_several_leases_share_count_once():
    cache = make(16)
    engine = Engine(cache)
    engine.fill(range(6))
    for _ in range(10):
        assert engine.load(range(6)).status == Status.OK
    assert engine.store([*range(6), "x", "y", "z"]).taken == 2


def test_r12_what_others_hold_of_a_hit_costs_nothing_more():
    cache = make(16)
    engine = Engine(cache)
    engine.fill(range(8))
    engine.store("xy")
    for _ in range(2):
        assert len(engine.load(range(4)).frames) == 4
    assert len(engine.load(range(6)).frames) == 6


def test_r12_a_hit_is_cut_at_the_larger_of_both_bounds():
    cache = make(16)
    engine = Engine(cache)
    engine.fill(range(8))
    engine.store("xy")
    for _ in range(2):
        engine.load(range(4))
    grant = engine.load(range(8))
    assert (len(grant.frames), grant.reason) == (6, "cap")


def test_r12_what_is_held_already_may_be_read_at_the_cap_and_nothing_more():
    cache = make(16)
    engine = Engine(cache)
    engine.fill("a")
    engine.fill(range(6))
    engine.store("uvxy")
    engine.load(range(4))
    assert cache.stats()["frames_held"] == 8
    grant = engine.load(range(6))
    assert (len(grant.frames), grant.reason) == (4, "cap")
    assert engine.load("a").status == Status.BUSY


def test_r12_when_others_hold_more_than_the_cap_only_the_own_sum_counts():
    cache = make(32)
    one = Engine(cache, "one")
    one.fill(range(12))
    assert len(one.load(range(12)).frames) == 12
    two = Engine(cache, "two", sid=200)  # a cap of 10 pages for each now
    for _ in range(2):
        assert len(two.load(range(4)).frames) == 4
    assert len(two.load(range(12)).frames) == 2
    assert two.load(range(12)).status == Status.BUSY


def test_r12_a_load_beyond_the_cap_brings_less_or_is_busy():
    cache = make(16)
    engine = Engine(cache)
    engine.fill(range(8))
    engine.fill("abcd")
    assert engine.load("abcd").status == Status.OK
    grant = engine.load(range(8))
    assert (grant.status, len(grant.frames), grant.reason) == (Status.OK, 4, "cap")
    grant = engine.load([*range(8), 8], at_least=6)
    assert (grant.status, grant.reason) == (Status.BUSY, "cap")


def test_r12_quarantined_frames_count():
    cache = make(16)
    engine = Engine(cache)
    engine.store(range(8))
    engine.abort(quiet=())
    assert engine.store("ab").status == Status.BUSY
    engine.abort(engine.number - 1)
    assert engine.store("ab").taken == 2


def test_r28_a_hit_ends_where_the_group_has_not_mapped():
    cache = make(16)
    filler = Engine(cache, "filler")
    frames = filler.fill("abcd")
    assert frames == [0, 1, 2, 3]
    cache.attach(200, "late", "planner", 0, 1, 0.0)
    cache.attach(201, "late", "mover", 0, 1, 0.0)
    assert cache.begin_load(200, 1, NS, keys("abcd"), 0, 1, 0.0).reason == "unmapped"
    cache.mapped(201, 3)
    grant = cache.begin_load(200, 2, NS, keys("abcd"), 0, 1, 0.0)
    assert (list(grant.frames), grant.reason) == ([0, 1, 2], "unmapped")
    cache.abort(200, 2, (0,), 0.0)
    grant = cache.begin_load(200, 4, NS, keys("abc"), 0, 1, 0.0)
    assert (list(grant.frames), grant.reason) == ([0, 1, 2], "")
    cache.mapped(200, 2)  # a planner that maps as well
    assert list(cache.begin_load(200, 5, NS, keys("abcd"), 0, 1, 0.0).frames) == [0, 1]


def test_r28_a_store_gets_only_frames_that_the_group_has_mapped():
    cache = make(16)
    cache.attach(200, "late", "planner", 0, 1, 0.0)
    cache.attach(201, "late", "mover", 0, 1, 0.0)
    grant = cache.begin_store(200, 1, NS, keys("ab"), 1, 0.0)
    assert (grant.status, grant.reason, cache.stats()["leases"]) == (Status.FULL, "unmapped", 0)
    cache.mapped(201, 3)
    grant = cache.begin_store(200, 2, NS, keys("abcde"), 1, 0.0)
    assert (sorted(grant.frames), grant.reason) == ([0, 1, 2], "unmapped")
    cache.check()


def test_r28_a_store_that_gets_no_mapped_frame_leaves_everything_as_it_was():
    cache = make(40)
    filler = Engine(cache, "filler")
    filler.fill("abcd")
    filler.store("abcdef")
    cache.attach(200, "late", "planner", 0, 1, 0.0)
    cache.attach(201, "late", "mover", 0, 1, 0.0)
    cache.mapped(201, 4)
    before = cache.stats()
    grant = cache.begin_store(200, 1, NS, keys("abcdefg"), 1, 0.0)
    assert grant[:7] == (Status.FULL, 6, NO_FRAMES, 0, 2, 1, "unmapped")
    grant = cache.begin_store(200, 2, NS, keys("abX"), 1, 0.0)
    assert grant[:7] == (Status.FULL, 2, NO_FRAMES, 0, 0, 1, "unmapped")
    after = cache.stats()
    assert {**before, "store_asked": before["store_asked"] + 2} == after
    cache.check()


def test_a_pool_grows_and_hands_out_low_frames_first():
    cache = HostCache(10)
    cache.grow(4)
    engine = Engine(cache)
    assert sorted(engine.fill("ab")) == [0, 1]
    cache.grow(10)
    for mover in engine.movers:
        cache.mapped(mover, 10)
    assert engine.fill("xyz") == [2, 3, 4]
    with pytest.raises(UsageError, match="expected 10 to 10"):
        cache.grow(9)
    with pytest.raises(UsageError, match="expected 10 to 10"):
        cache.grow(11)


def test_tails_go_before_heads_and_least_recently_used_chains_first():
    cache = make(8)
    engine = Engine(cache)
    old = engine.fill("abcd")
    engine.fill("wxyz")
    engine.load("abcd")
    engine.finish()
    cache.take_writes()
    engine.store("mn")
    freed = [write for write in cache.take_writes() if isinstance(write, Free)]
    assert len(freed) == 1
    assert (ready(cache, "abcd"), ready(cache, "wxyz")) == (4, 2)
    engine.finish()
    engine.load("wx")
    engine.finish()
    cache.take_writes()
    engine.store("opq")
    (freed_again,) = [write for write in cache.take_writes() if isinstance(write, Free)]
    assert list(freed_again.frames) == [old[3], old[2], old[1]]


def test_an_evicted_chain_gives_its_frames_in_order_and_before_free_ones():
    cache = make(7)
    engine = Engine(cache)
    first = engine.fill("abc")
    engine.fill("xyz")
    grant = engine.store("mno")
    assert list(grant.frames) == [first[1], first[2], 6]
    assert cache.stats()["evicted"] == 2
    engine.finish()
    engine.store("pq")
    assert cache.stats()["evicted"] == 4


def test_r16_a_record_says_all_of_its_lease_and_numbers_are_dense():
    cache = make()
    engine = Engine(cache, ranks=2)
    cache.flush(None, 0.0)
    engine.fill("ab")
    cache.take_writes()
    grants = [engine.store("abX"), engine.load("ab"), engine.store("abY")]
    records = [write for write in cache.take_writes() if isinstance(write, LeaseRecord)]
    assert [record.lease for record in records] == [0, 1, 2]
    assert records[0] == LeaseRecord(0, engine.sid, 2, STORE, grants[0].frames[0], 3, 2, 0)
    assert records[1] == LeaseRecord(1, engine.sid, 3, LOAD, grants[1].frames[1], 2, 2, 0)
    engine.finish(3)
    cache.quiet(engine.movers[1], engine.sid, 2, 0.0)
    engine.load("a")
    writes = cache.take_writes()
    assert records[0]._replace(quiet_mask=2) in writes
    assert writes[-1] == LeaseRecord(1, engine.sid, 5, LOAD, 0, 1, 2, 0)


def test_r15_writes_of_a_store_stand_in_order():
    cache = make(4)
    engine = Engine(cache)
    engine.fill("ab")
    engine.fill("xy")
    cache.take_writes()
    grant = engine.store("mn")
    _, free, claim, record = cache.take_writes()
    assert isinstance(free, Free)
    assert sorted(free.frames) == sorted(grant.frames)
    assert isinstance(claim, Claim)
    assert (claim.frames, claim.keys) == (grant.frames, keys("mn"))
    assert (claim.parent_frame, claim.parent_tag) == (-1, NS[:8])
    assert isinstance(record, LeaseRecord)
    assert claim.lease == record.lease == 0
    assert (record.deepest_frame, record.pages, record.number) == (grant.frames[1], 2, engine.number)
    engine.finish()
    writes = cache.take_writes()
    assert writes[0] == Ready(grant.frames)


def test_r14_stamps_rise_and_fit_32_bits():
    cache = make()
    engine = Engine(cache)
    stamps = []
    for name in "abc":
        if name == "c":
            cache._book.tree.tick = (1 << 32) + 7
        engine.fill(name)
        stamps += [write.stamp for write in cache.take_writes() if isinstance(write, Claim)]
    assert 0 <= stamps[0] < stamps[1]
    assert stamps[2] == 7


def test_r15_a_claim_names_the_parent_and_its_key():
    cache = make()
    engine = Engine(cache)
    frames = engine.fill("abc")
    cache.take_writes()
    engine.store("abX")
    (claim,) = [write for write in cache.take_writes() if isinstance(write, Claim)]
    assert (claim.parent_frame, claim.parent_tag) == (frames[1], keys("ab")[32:40])


@pytest.mark.parametrize(
    ("ns", "packed"), [(b"short", b""), (NS, b"x" * 31), (b"x" * 17, b"x" * 32), (NS, b"x" * 65)]
)
def test_wrong_lengths_raise_and_name_what_was_expected(ns: bytes, packed: bytes):
    cache = make()
    engine = Engine(cache)
    cache.take_writes()
    with pytest.raises(UsageError, match=r"expected 16|expected 32 for each page"):
        cache.lookup(ns, packed)
    with pytest.raises(UsageError):
        cache.begin_load(engine.sid, 1, ns, packed, 0, 1, 0.0)
    with pytest.raises(UsageError):
        cache.begin_store(engine.sid, 1, ns, packed, 1, 0.0)
    assert cache.take_writes() == []


@pytest.mark.parametrize(("first", "at_least"), [(-1, 0), (3, 0), (0, -1)])
def test_a_load_from_a_page_that_is_not_there_raises(first: int, at_least: int):
    cache = make()
    engine = Engine(cache)
    with pytest.raises(UsageError, match="expected 0 <= first <= pages"):
        cache.begin_load(engine.sid, 1, NS, keys("ab"), first, at_least, 0.0)


def test_a_store_without_keys_is_nothing():
    cache = make()
    grant = Engine(cache).store("")
    assert (grant.status, grant.taken, cache.stats()["namespaces"]) == (Status.OK, 0, 0)


def test_a_pool_without_frames_gives_none():
    cache = HostCache(5)
    engine = Engine(cache)
    assert engine.store("a").status == Status.FULL
    with pytest.raises(UsageError, match="expected 1 or more"):
        HostCache(0)


def test_r8_a_take_over_begins_where_the_hung_pages_do_below_several_nodes():
    cache = make()
    engine, other = Engine(cache), Engine(cache, "other", sid=200)
    engine.fill("ab")
    engine.fill("ax")  # page a is a node of its own now
    engine.store("abcd", now=0.0)
    grant = other.store("abcd", now=100.0)
    assert (grant.start, grant.taken) == (2, 2)
    cache.check()


def test_a_store_takes_nothing_from_other_namespaces_while_the_table_has_room():
    cache = make(namespaces=4)
    engine = Engine(cache)
    names = [bytes([name]) * 16 for name in range(1, 4)]
    for name in names:
        engine.fill("abc", ns=name)
    engine.fill("abcd", ns=names[0])
    assert [ready(cache, "abcd", name) for name in names] == [4, 3, 3]
    assert cache.stats()["evicted"] == 0


def test_the_frame_of_a_root_is_asked_for_by_mistake_only():
    with pytest.raises(UsageError, match=r"^a root has no frame$"):
        _last_frame(None)
