"""What an operator sees of the cache and asks of it: draining, and who holds what."""

from __future__ import annotations

from kvtier.core.results import Holding
from kvtier.errors import Status
from tests.core.chains import NS, OTHER, Engine, make


def test_while_draining_no_lease_begins_and_those_that_run_end_as_ever():
    cache = make()
    engine = Engine(cache)
    assert engine.store("ab").taken == 2
    running = engine.number
    cache.draining = True
    refused = engine.store("cd")
    assert (refused.status, refused.reason, refused.taken) == (Status.BUSY, "draining", 0)
    refused = engine.load("ab")
    assert (refused.status, refused.reason, len(refused.frames)) == (Status.BUSY, "draining", 0)
    assert cache.stats()["missed_draining"] == 2
    assert cache.stats()["leases"] == 1
    assert engine.finish(running).visible == 2
    assert cache.stats()["leases"] == 0
    cache.check()
    cache.draining = False
    assert engine.load("ab").status == Status.OK


def test_holdings_say_what_each_session_holds():
    cache = make(16)
    assert cache.holdings() == []
    engine = Engine(cache)
    engine.store("ab")
    planner, mover = engine.sid, engine.movers[0]
    assert cache.holdings() == [
        Holding(planner, "g", "planner", 0, 1, False, 1, 2, 0),
        Holding(mover, "g", "mover", 0, 1, False, 0, 0, 16),
    ]
    cache.died(planner, 0.0)
    assert cache.holdings() == [
        Holding(planner, "g", "planner", 0, 1, True, 1, 2, 0),
        Holding(mover, "g", "mover", 0, 1, False, 0, 0, 16),
    ]
    cache.died(mover, 0.0)
    assert cache.holdings() == []


def test_namespaces_are_listed_with_their_pages_and_epoch():
    cache = make()
    engine = Engine(cache)
    assert cache.namespaces() == []
    engine.fill("abc")
    engine.fill("d", ns=OTHER)
    assert cache.namespaces() == [(NS, 3, 1), (OTHER, 1, 1)]
    cache.flush(NS, 0.0)
    assert cache.namespaces() == [(OTHER, 1, 1)]
