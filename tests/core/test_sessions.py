"""Who may attach, and who gets leases (R1, R2, R20), and the limits with numbers."""

from __future__ import annotations

import pytest

from kvtier.core.writes import MOVER, PLANNER, SessionEnd, SessionNumber, SessionRecord
from kvtier.errors import Status, UsageError
from tests.core.chains import NS, Engine, keys, make


def test_r2_a_group_is_complete_with_its_planner_and_all_movers():
    cache = make()
    assert cache.attach(1, "g", "mover", 1, 2, 0.0)[:3] == (Status.OK, 0, False)
    assert cache.attach(2, "g", "planner", 0, 2, 0.0)[:3] == (Status.OK, 1, False)
    cache.mapped(1, 32)
    assert not cache.complete(1)
    refused = cache.begin_store(2, 1, NS, keys("ab"), 1, 0.0)
    assert (refused.status, refused.reason) == (Status.BUSY, "incomplete")
    refused = cache.begin_load(2, 2, NS, keys("ab"), 0, 1, 0.0)
    assert (refused.status, refused.reason) == (Status.BUSY, "incomplete")
    assert cache.stats()["missed_incomplete"] == 2
    assert cache.attach(3, "g", "mover", 0, 2, 0.0)[:3] == (Status.OK, 2, True)
    assert cache.complete(1)
    cache.mapped(3, 32)
    assert cache.begin_store(2, 3, NS, keys("ab"), 1, 0.0).taken == 2
    assert not cache.complete(99)


def test_r2_a_complete_group_takes_nobody_in():
    cache = make()
    Engine(cache)
    refused = cache.attach(1, "g", "mover", 0, 1, 0.0)
    assert refused.status == Status.BUSY
    assert refused.slot == -1
    assert refused.text == (
        "group 'g' is complete: a restarted engine is a new group; an id is free again when all its "
        "sessions are dead"
    )


def test_r2_a_fixed_id_is_free_again_when_all_its_sessions_are_gone():
    cache = make()
    engine = Engine(cache)
    engine.store("a")
    cache.died(engine.sid, 0.0)
    assert cache.attach(1, "g", "planner", 0, 1, 0.0).status == Status.BUSY
    cache.died(engine.movers[0], 0.0)
    assert Engine(cache, "g", sid=500).store("ab").taken == 2


@pytest.mark.parametrize("lost", ["planner", "mover"])
def test_r2_a_group_that_never_had_a_lease_is_open_again(lost):
    cache = make()
    engine = Engine(cache, ranks=2)
    cache.attach(1, "other", "mover", 0, 1, 0.0)
    assert cache.stats()["engines"] == 1
    assert (cache.unused(engine.sid), cache.unused(99)) == (True, False)
    assert engine.load("ab").reason == "absent"
    cache.detach(engine.sid if lost == "planner" else engine.movers[0], True, 0.0)
    assert not cache.complete(engine.movers[1])
    assert cache.stats()["engines"] == 0
    assert cache.attach(500, "g", lost, 0, 2, 0.0).complete
    cache.mapped(500, 32)
    planner = 500 if lost == "planner" else engine.sid
    assert cache.begin_store(planner, 5, NS, keys("ab"), 1, 0.0).taken == 2
    assert not cache.unused(engine.movers[1])
    # A mover that was replaced is not one that has gone: its copies are waited for.
    cache.abort(planner, 5, (), 0.0)
    assert cache.stats()["frames_quarantined"] == 2


def test_r2_a_group_that_lost_a_mover_gets_no_more_leases():
    cache = make()
    engine = Engine(cache, ranks=2)
    cache.died(engine.movers[1], 0.0)
    assert engine.store("ab").reason == "incomplete"
    assert not cache.complete(engine.sid)


def test_r2_a_mover_that_died_before_the_group_was_complete_can_be_replaced():
    cache = make()
    cache.attach(1, "g", "mover", 0, 1, 0.0)
    cache.died(1, 0.0)
    cache.attach(2, "g", "mover", 0, 1, 0.0)
    assert cache.attach(3, "g", "planner", 0, 1, 0.0).complete
    cache.mapped(2, 32)
    cache.begin_store(3, 1, NS, keys("ab"), 1, 0.0)
    cache.abort(3, 1, (), 0.0)
    assert cache.stats()["frames_quarantined"] == 2


@pytest.mark.parametrize(
    ("role", "rank", "ranks", "words"),
    [
        ("mover", 0, 2, "has its mover of rank 0 already"),
        ("planner", 0, 2, "has its planner of rank 0 already"),
        ("mover", 1, 3, "has 2 ranks, this session says 3"),
        ("mover", 2, 2, "expected 0 <= rank < ranks <= 64"),
        ("mover", -1, 2, "expected 0 <= rank"),
        ("mover", 0, 65, "ranks <= 64"),
        ("mover", 0, 0, "rank < ranks"),
    ],
)
def test_an_attach_that_does_not_fit_its_group_is_refused(role: str, rank: int, ranks: int, words: str):
    cache = make()
    cache.attach(1, "g", "mover", 0, 2, 0.0)
    cache.attach(2, "g", "planner", 0, 2, 0.0)
    refused = cache.attach(3, "g", role, rank, ranks, 0.0)
    assert refused.status == Status.BAD
    assert words in refused.text
    assert cache.stats()["sessions"] == 2


def test_a_group_may_have_64_ranks():
    cache = make(200)
    engine = Engine(cache, ranks=64)
    engine.store("ab")
    assert engine.finish().visible == 2


def test_ids_are_64_bits_and_never_used_twice_at_once():
    cache = make()
    cache.attach((1 << 64) - 1, "g", "planner", 0, 1, 0.0)
    with pytest.raises(UsageError, match="attached already"):
        cache.attach((1 << 64) - 1, "h", "planner", 0, 1, 0.0)
    for sid in (0, -1, 1 << 64):
        with pytest.raises(UsageError, match="64 random bits"):
            cache.attach(sid, "h", "planner", 0, 1, 0.0)
    with pytest.raises(UsageError, match="expected planner or mover"):
        cache.attach(5, "h", "driver", 0, 1, 0.0)


def test_r20_a_suspect_gets_no_new_leases_and_loses_nothing():
    cache = make()
    engine = Engine(cache)
    engine.fill("ab")
    engine.load("ab")
    for sid in (engine.sid, engine.movers[0]):
        assert cache.suspect(sid) == Status.OK
        assert (engine.load("ab").status, engine.load("ab").reason) == (Status.BUSY, "suspect")
        assert (engine.store("x").status, engine.store("x").reason) == (Status.BUSY, "suspect")
        assert cache.stats()["frames_held"] == 2
        assert cache.suspect(sid, False) == Status.OK
        assert engine.load("ab").status == Status.OK


def test_unknown_sessions_are_gone():
    cache = make()
    assert cache.suspect(7) == cache.died(7, 0.0) == cache.mapped(7, 1) == Status.GONE
    assert cache.detach(7, True, 0.0) == Status.GONE
    assert cache.begin_store(7, 1, NS, b"", 1, 0.0).status == Status.GONE
    assert cache.begin_load(7, 1, NS, b"", 0, 1, 0.0).status == Status.GONE
    assert cache.abort(7, 1, (), 0.0).status == Status.GONE


def test_limit_of_sessions():
    cache = make(sessions=256)
    for sid in range(1, 257):
        assert cache.attach(sid, f"g{sid}", "planner", 0, 1, 0.0).slot == sid - 1
    refused = cache.attach(257, "h", "planner", 0, 1, 0.0)
    assert (refused.status, refused.text) == (Status.BUSY, "all 256 sessions are taken")
    cache.died(17, 0.0)
    assert cache.attach(257, "h", "planner", 0, 1, 0.0).slot == 16


def test_limit_of_leases():
    cache = make(64, leases=3)
    engine = Engine(cache)
    for name in "abc":
        assert engine.store(name).status == Status.OK
    assert (engine.store("d").status, engine.store("d").reason) == (Status.BUSY, "leases")
    assert (engine.load("a").status, engine.load("a").reason) == (Status.BUSY, "leases")
    engine.finish(1)
    assert engine.store("d").taken == 1
    cache.check()


def test_r14_session_records_carry_the_last_number():
    cache = make()
    engine = Engine(cache)
    planner, mover = cache.take_writes()
    assert isinstance(planner, SessionRecord)
    assert planner[:5] == (0, engine.sid, PLANNER, 0, 1)
    assert mover[:5] == (1, engine.movers[0], MOVER, 0, 1)
    assert planner.group_hash == mover.group_hash
    assert len(planner.group_hash) == 8
    engine.load("ab")
    assert cache.take_writes() == [SessionNumber(0, 1)]
    cache.died(engine.movers[0], 0.0)
    assert cache.take_writes() == [SessionEnd(1)]


def test_a_group_is_forgotten_with_its_last_session():
    cache = make()
    engine = Engine(cache)
    engine.fill("a")
    assert cache.stats()["engines"] == 1
    cache.died(engine.sid, 0.0)
    cache.died(engine.movers[0], 0.0)
    assert cache._book.sessions.groups == {}
    assert cache.attach(7, "g", "mover", 0, 2, 0.0).complete is False
    assert cache.stats()["engines"] == 0


def test_groups_are_told_apart_by_their_hash():
    cache = make()
    for sid, group, rank in ((1, "one", 0), (2, "two", 0), (3, "one", 1)):
        cache.attach(sid, group, "mover", rank, 2, 0.0)
    hashes = [write.group_hash for write in cache.take_writes() if isinstance(write, SessionRecord)]
    assert hashes[0] != hashes[1]
    assert hashes[0] == hashes[2]
