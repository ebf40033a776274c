"""What `lookup` offers, how long it waits, and which leases it holds."""

from __future__ import annotations

import threading

import pytest

from kvtier.config import Options
from kvtier.errors import Status, UsageError, WrongThreadError
from kvtier.keys import Namespace
from kvtier.layout import KVLayout, Plane
from kvtier.planner import Planner
from kvtier.wire.messages import BeginLoad, BeginStore
from kvtier.wire.plan import decode
from tests.planner.doubles import FakeClient, FakeMovers, chain_of

PAGE = 8


def made(frames=64, least=8, lookup_ms=20.0, layout=None, **options):
    client = FakeClient(frames, **({"layout": layout} if layout else {}))
    planner = Planner(
        client, 1, Options(min_load_tokens=least, lookup_ms=lookup_ms, **options), clock=client.clock
    )
    return client, planner


def answered(client, planner, *args, **kwargs):
    """A look-up whose question is answered while it waits."""
    client.auto = True
    try:
        return planner.lookup(*args, **kwargs)
    finally:
        client.auto = False


def missed(planner):
    return {
        name.removeprefix("tokens_missed_"): count
        for name, count in planner.stats().items()
        if name.startswith("tokens_missed_") and count
    }


def test_a_hit_leaves_the_last_token_to_compute():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    hit = answered(client, planner, "r", chain, 0)
    assert (hit.first, hit.tokens) == (0, 31)  # W6: at most num_tokens - 1
    assert len(client.leases) == 1


def test_a_hit_begins_where_the_device_ends_also_inside_a_page():
    client, planner = made()
    chain = chain_of(33)
    client.store(chain)
    hit = answered(client, planner, "r", chain, 11)
    assert (hit.first, hit.tokens) == (11, 21)
    body = client.posted[0]
    assert body.chains[0].first == 1


def test_a_limit_ends_the_hit_earlier():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    assert answered(client, planner, "r", chain, 0, limit=24).tokens == 24


def test_hits_are_whole_units_of_the_layout():
    layout = KVLayout(8, ((Plane("a", 16, 4), Plane("b", 16, 8)),), "coarse")
    client, planner = made(layout=layout)
    chain = chain_of(32, layout=layout)
    client.store(chain)
    hit = answered(client, planner, "r", chain, 4)
    assert (hit.first, hit.tokens) == (4, 24)  # 31 rounded down to units of 4, from 4 on
    with pytest.raises(UsageError, match="multiple of 4"):
        planner.lookup("r", chain, 3)


def test_fewer_tokens_than_min_load_are_not_offered_and_ask_for_no_lease():
    client, planner = made(least=16)
    chain = chain_of(32)
    client.store(chain)
    hit = planner.lookup("r", chain, 24)
    assert (hit.tokens, hit.reason) == (0, "short")
    assert not any(isinstance(body, BeginLoad) for body in client.posted)
    assert missed(planner) == {"short": 7}


def test_a_host_that_has_too_little_is_a_miss_without_a_lease():
    client, planner = made(least=24)
    chain = chain_of(64)
    client.store(chain, pages=2)
    hit = answered(client, planner, "r", chain, 0)
    assert (hit.tokens, hit.reason) == (0, "absent")
    assert not client.leases
    assert missed(planner) == {"absent": 63}


def test_every_missed_token_has_a_reason():
    client, planner = made()
    chain = chain_of(61)  # 7 pages and 5 tokens
    client.store(chain, pages=4)
    hit = answered(client, planner, "r", chain, 3)
    assert hit.tokens == 29
    stats = planner.stats()
    assert stats["tokens_requested"] == 57
    assert stats["tokens_hit"] == 29
    assert missed(planner) == {"absent": 24, "partial": 4}


def test_asking_again_is_counted_once():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    for _ in range(5):
        assert answered(client, planner, "r", chain, 0).tokens == 31
    assert planner.stats()["tokens_requested"] == 31
    assert planner.stats()["tokens_hit"] == 31


def test_a_second_lookup_uses_the_same_lease_while_it_is_fresh():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    first = answered(client, planner, "r", chain, 0)
    second = planner.lookup("r", chain, 0)
    assert len(client.posted) == 1
    with pytest.raises(UsageError, match="void"):
        planner.load(first, range(31))
    planner.load(second, range(31))


def test_an_answer_older_than_50_ms_is_asked_for_again_and_its_lease_given_back():
    client, planner = made()
    chain = chain_of(64)
    client.store(chain, pages=2)
    assert answered(client, planner, "r", chain, 0).tokens == 16
    client.store(chain)
    client.clock.now += 0.051
    assert answered(client, planner, "r", chain, 0).tokens == 63
    planner.plan()
    client.serve()
    assert len(client.leases) == 1
    client.check()


def test_lookup_waits_no_longer_than_told_and_gives_none():
    client, planner = made()
    before = client.clock.now
    assert planner.lookup("r", chain_of(32), 0, wait_s=0.003) is None
    assert client.clock.now - before == pytest.approx(0.003)


def test_no_answer_within_lookup_ms_in_all_is_a_counted_miss_and_withdrawn():
    client, planner = made(lookup_ms=20)
    chain = chain_of(32)
    client.store(chain)
    spent = client.clock.now
    hit = None
    while hit is None:
        hit = planner.lookup("r", chain, 0, wait_s=0.004)
    assert client.clock.now - spent == pytest.approx(0.020)
    assert (hit.tokens, hit.reason) == (0, "late")
    assert missed(planner) == {"late": 31}
    planner.plan()
    client.serve()  # the begin is executed after all, and then undone (R10)
    assert not client.leases
    client.check()


def test_a_slow_engine_gets_the_answer_that_came_during_its_step():
    client, planner = made(lookup_ms=20)
    chain = chain_of(32)
    client.store(chain)
    assert planner.lookup("r", chain, 0, wait_s=0.0) is None
    client.serve()
    client.clock.now += 0.100  # one step of a large model
    hit = planner.lookup("r", chain, 0, wait_s=0.0)
    assert hit.tokens == 31


def test_a_slow_engine_that_polls_in_between_still_gets_its_answer():
    client, planner = made(lookup_ms=20)
    movers = FakeMovers(client)
    chain = chain_of(32)
    client.store(chain)
    assert planner.lookup("r", chain, 0, wait_s=0.0) is None
    client.serve()
    planner.update(movers.progress)
    client.clock.now += 0.100
    hit = planner.lookup("r", chain, 0, wait_s=0.0)
    assert hit.tokens == 31
    assert len(client.posted) == 1


def test_ask_at_arrival_makes_lookup_answer_without_waiting():
    client, planner = made()
    chain = chain_of(33)
    client.store(chain)
    planner.ask("r", chain)
    client.serve()
    before = client.clock.now
    hit = planner.lookup("r", chain, 10)
    assert (hit.first, hit.tokens) == (10, 22)
    assert client.clock.now == before
    assert sum(isinstance(body, BeginLoad) for body in client.posted) == 1


def test_when_nobody_answers_the_older_lease_is_used():
    client, planner = made(lookup_ms=20)
    chain = chain_of(32)
    client.store(chain)
    planner.ask("r", chain)
    client.serve()
    planner.poll()
    client.clock.now += 1.0  # the answer is old, and the sidecar stands still from now on
    hit = planner.lookup("r", chain, 0, wait_s=0.02)
    assert hit.tokens == 31
    assert len(client.leases) == 1


def test_unadmitted_requests_hold_at_most_a_quarter_of_the_pool_but_for_one():
    client, planner = made(frames=32, least=8)
    chains = [chain_of(range(number * 1000, number * 1000 + 41)) for number in range(4)]
    for chain in chains:
        client.store(chain)
    hits = [answered(client, planner, str(number), chain, 0) for number, chain in enumerate(chains)]
    # A quarter is 8 pages: 5 of the first, the second is the one that may hold more, 3 of the third.
    assert [hit.tokens for hit in hits] == [40, 40, 24, 0]
    assert hits[3].reason == "held"
    assert planner.stats()["held_pages"] == 13
    assert missed(planner) == {"held": 16 + 40}
    planner.load(hits[1], range(40))  # admitted: no longer counted, and another may be large
    assert answered(client, planner, "2", chains[2], 0).tokens == 40
    assert answered(client, planner, "3", chains[3], 0).tokens == 24


def test_a_prompt_longer_than_a_quarter_of_the_pool_is_a_whole_hit():
    client, planner = made(frames=32, least=8)
    chain = chain_of(200)
    client.store(chain)
    planner.ask("r", chain)  # asks for no lease that it could not have
    client.serve()
    assert not client.leases
    assert answered(client, planner, "r", chain, 0).tokens == 199


def test_questions_under_way_count_against_the_quarter_too():
    client, planner = made(frames=32, least=8)
    for number in range(4):
        planner.ask(str(number), chain_of(range(number * 1000, number * 1000 + 33)))
    asked = [
        len(chain.keys) // 32
        for body in client.posted
        if isinstance(body, BeginLoad)
        for chain in body.chains
    ]
    assert asked == [4, 4]


def test_cancel_and_forget_give_the_lease_back():
    for end in ("cancel", "forget"):
        client, planner = made()
        chain = chain_of(32)
        client.store(chain)
        hit = answered(client, planner, "r", chain, 0)
        getattr(planner, end)("r")
        with pytest.raises(UsageError, match="void"):
            planner.load(hit, range(31))
        planner.plan()
        client.serve()
        assert not client.leases
        assert planner.stats()["held_pages"] == 0
        client.check()


def test_cancel_of_an_unanswered_question_undoes_it_whenever_it_is_executed():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    planner.ask("r", chain)
    planner.cancel("r")
    planner.plan()
    client.serve()
    planner.poll()
    assert not client.leases
    assert planner.stats()["held_pages"] == 0
    client.check()


def test_a_chain_that_has_nothing_in_common_is_asked_for_anew():
    client, planner = made()
    first, other = chain_of(32), chain_of(range(500, 532))
    client.store(first)
    assert answered(client, planner, "r", first, 0).tokens == 31
    assert answered(client, planner, "r", other, 0).tokens == 0
    planner.plan()
    client.serve()
    assert not client.leases


def test_going_back_to_an_earlier_position_asks_again():
    client, planner = made()
    chain = chain_of(33)
    client.store(chain)
    assert answered(client, planner, "r", chain, 16).first == 16
    hit = answered(client, planner, "r", chain, 0)
    assert (hit.first, hit.tokens) == (0, 32)
    planner.load(hit, range(32))
    (copy,) = decode(planner.plan()).commands
    assert list(copy.frames) == [client.pages[chain.keys[at : at + 32]].frame for at in range(0, 128, 32)]


def test_an_answer_that_never_comes_leaves_the_older_lease():
    client, planner = made(lookup_ms=1000)
    chain = chain_of(32)
    client.store(chain)
    planner.ask("r", chain)
    client.serve()
    planner.poll()
    client.clock.now += 0.1
    assert planner.lookup("r", chain, 0, wait_s=0.0) is None
    client.late()
    assert planner.lookup("r", chain, 0, wait_s=0.0) is None  # asked once more
    client.clock.now += 1.0
    assert planner.lookup("r", chain, 0, wait_s=0.0).tokens == 31
    assert list(client.leases) == [1]


@pytest.mark.parametrize(
    ("status", "reason"),
    [(Status.BUSY, "busy"), (Status.BAD, "refused"), (Status.GONE, "away"), (Status.EXPIRED, "late")],
)
def test_a_refusal_is_a_miss_with_its_reason(status, reason):
    client, planner = made()
    client.refuse = status
    hit = answered(client, planner, "r", chain_of(32), 0)
    assert (hit.tokens, hit.reason) == (0, reason)


def test_an_absent_sidecar_is_a_miss_at_once():
    client, planner = made()
    client.down = True
    before = client.clock.now
    planner.ask("r", chain_of(32))
    hit = planner.lookup("r", chain_of(32), 0, wait_s=1.0)
    assert (hit.tokens, hit.reason) == (0, "away")
    assert client.clock.now == before


def test_a_client_that_gives_up_makes_a_late_miss():
    client, planner = made(lookup_ms=1000)
    client.store(chain_of(32))
    assert planner.lookup("r", chain_of(32), 0, wait_s=0.0) is None
    client.late()
    assert planner.lookup("r", chain_of(32), 0, wait_s=0.0).reason == "late"


def test_callers_mistakes_raise_and_change_nothing():
    client, planner = made()
    chain = chain_of(32)
    client.store(chain)
    with pytest.raises(UsageError, match="computed"):
        planner.lookup("r", chain, 33)
    with pytest.raises(UsageError, match="computed"):
        planner.lookup("r", chain, -1)
    with pytest.raises(UsageError, match="wait_s"):
        planner.lookup("r", chain, 0, wait_s=-1)
    with pytest.raises(UsageError, match="tokens a page"):
        planner.lookup("r", chain_of(32, layout=KVLayout(16, ((Plane("a", 1),),), "")), 0)
    foreign = chain_of(32, KVLayout(8, ((Plane("0.kv", 16),),), "another format").namespace("model"))
    bare = chain_of(32, Namespace("model"))
    for other in (foreign, bare):  # P6: equal tokens and geometry, but the bytes mean something else
        for call in (planner.ask, lambda name, it: planner.lookup(name, it, 0)):
            with pytest.raises(UsageError, match="make it with"):
                call("r", other)
        with pytest.raises(UsageError, match="make it with"):
            planner.offload("r", other, range(32))
    with pytest.raises(UsageError, match="no hit"):
        planner.load(None, range(31))
    hit = answered(client, planner, "r", chain, 0)
    for units in (range(30), [[1] * 31], ["a"] * 31, [0.5] * 31, [-1] * 31, [2**31] * 31):
        with pytest.raises(UsageError, match="units"):
            planner.load(hit, list(units))
    assert planner.stats()["live_tasks"] == 0
    planner.load(hit, range(31))
    with pytest.raises(UsageError, match="void"):
        planner.load(hit, range(31))


def test_units_beyond_the_engines_are_refused():
    client = FakeClient()
    planner = Planner(client, 1, Options(min_load_tokens=8), units=40, clock=client.clock)
    chain = chain_of(32)
    client.store(chain)
    hit = answered(client, planner, "r", chain, 0)
    with pytest.raises(UsageError, match=r"0 \.\. 39"):
        planner.load(hit, range(10, 41))
    planner.load(hit, range(9, 40))


def test_another_thread_is_told_so():
    _, planner = made()
    planner.ask("r", chain_of(32))
    caught = []

    def other():
        with pytest.raises(WrongThreadError):
            planner.lookup("r", chain_of(32), 0)
        caught.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(10)
    assert caught


def test_after_close_calls_say_so():
    _, planner = made()
    planner.close(0.01)
    planner.close(0.01)
    with pytest.raises(UsageError, match="closed"):
        planner.ask("r", chain_of(32))


def test_requests_that_only_missed_are_forgotten_in_the_end():
    client, planner = made(least=64)
    for number in range(5000):
        planner.lookup(str(number), chain_of(8), 0)
        client.serve()
    assert planner.stats()["known_requests"] == 4096


def test_a_request_that_holds_a_lease_is_never_forgotten():
    client, planner = made(least=8)
    chain = chain_of(33)
    client.store(chain)
    hit = answered(client, planner, "first", chain, 0)
    for number in range(5000):
        planner.lookup(str(number), chain_of(8), 0)
        client.serve()
    assert planner.load(hit, range(32)).tokens == 32


def test_a_short_look_up_learns_the_epoch_without_a_lease():
    client, planner = made(least=16, write="prompt")
    chain = chain_of(32)
    client.store(chain, pages=3)
    planner.lookup("r", chain, 24)
    client.serve()
    planner.poll()
    task = planner.offload("r", chain, range(32))
    assert task.start_page == 3  # what is there already is neither copied nor counted as under way
    planner.plan()
    assert isinstance(client.posted[-1], BeginStore)
    assert client.posted[-1].chains[0].epoch == client.epoch
