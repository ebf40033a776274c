"""CacheClient against a real sidecar: what is stored is found and given back; and against one that is ill."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import numpy as np
import pytest

from kvtier.client import CacheClient, attacher
from kvtier.errors import GeometryError, Status, UsageError, WrongThreadError
from kvtier.keys import Namespace, PageChain
from kvtier.shm.attach import Refusal, connect
from kvtier.wire.messages import (
    BeginLoad,
    BeginStore,
    End,
    Finish,
    FlushReply,
    LoadChain,
    LoadReply,
    Lookup,
    LookupReply,
    StoreChain,
    StoreReply,
)
from tests.server.sidecar import Pair, Sidecar, layout, until

ALL = (0,)
"""The one mover, quiet."""


def chain(pages: int, seed: int = 0, salt: bytes = b"") -> PageChain:
    made = PageChain(Namespace("model", salt=salt), 64)
    made.extend(np.arange(pages * 64, dtype=np.int32) + seed * 1_000_003)
    return made


def store(planner: CacheClient, keys: PageChain, epoch: int = 0, value: int | None = None) -> np.ndarray:
    """Store a whole chain; the frames."""
    number = planner.next_number()
    (grant,) = planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch)])
    assert grant.status == Status.OK, grant
    if value is not None:
        for at, frame in enumerate(grant.frames):
            planner.pool.page(int(frame), write=True)[:] = (value + at) % 256
    (ended,) = planner.finish([End(number, ALL)])
    assert (ended.status, ended.visible) == (Status.OK, grant.taken), ended
    return grant.frames


def load(planner: CacheClient, keys: PageChain, first: int = 0):
    (grant,) = planner.begin_load([LoadChain(planner.next_number(), keys.namespace, keys.keys, first)])
    return grant


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    with Sidecar(tmp_path_factory.mktemp("s") / "run") as running:
        yield running


@pytest.fixture
def pair(sidecar):
    with Pair(sidecar, writable=True) as made:
        made.planner.flush()
        yield made


@pytest.fixture
def planner(pair):
    return pair.planner


def epoch_of(planner: CacheClient, keys: PageChain) -> int:
    body = planner.lookup(keys.namespace, keys.keys).body
    assert isinstance(body, LookupReply)
    return body.epoch


def test_what_was_stored_is_found_and_its_bytes_are_there(planner):
    keys = chain(8)
    frames = store(planner, keys, epoch_of(planner, keys), value=5)
    found = planner.lookup(keys.namespace, keys.keys).body
    assert isinstance(found, LookupReply)
    assert (found.ready, found.pending) == (8, 0)
    grant = load(planner, keys, first=3)
    assert grant.status == Status.OK
    assert (grant.ready, len(grant.frames), len(grant.gens)) == (8, 5, 5)
    np.testing.assert_array_equal(grant.frames, frames[3:])
    np.testing.assert_array_equal(planner.gens(grant.frames), grant.gens)
    for at, frame in enumerate(grant.frames):
        assert (planner.pool.page(int(frame)) == 5 + 3 + at).all()
    (ended,) = planner.finish([End(grant.number, ALL)])
    assert ended.status == Status.OK


def test_a_mover_sees_the_planners_bytes(pair):
    keys = chain(2, seed=1)
    frames = store(pair.planner, keys, epoch_of(pair.planner, keys), value=9)
    assert (pair.mover.pool.page(int(frames[1])) == 10).all()


def test_a_load_of_nothing_is_a_miss_with_a_reason(planner):
    grant = load(planner, chain(4, seed=2))
    assert (grant.status, len(grant.frames), grant.reason) == (Status.MISS, 0, "absent")


def test_many_chains_go_in_one_message_and_each_has_its_own_answer(planner):
    keys = [chain(2, seed=seed) for seed in (3, 4, 5)]
    epoch = epoch_of(planner, keys[0])
    numbers = [planner.next_number() for _ in keys]
    grants = planner.begin_store(
        [StoreChain(n, c.namespace, c.keys, epoch) for n, c in zip(numbers, keys, strict=True)]
    )
    assert [(g.number, g.status, g.taken) for g in grants] == [(n, Status.OK, 2) for n in numbers]
    ended = planner.finish([End(n, ALL) for n in numbers])
    assert [(e.number, e.visible) for e in ended] == [(n, 2) for n in numbers]
    loads = planner.begin_load(
        [LoadChain(planner.next_number(), c.namespace, c.keys) for c in (keys[0], chain(2, seed=6), keys[2])]
    )
    assert [g.status for g in loads] == [Status.OK, Status.MISS, Status.OK]


def test_one_wrong_chain_of_many_is_bad_alone(planner):
    keys = chain(2, seed=7)
    epoch = epoch_of(planner, keys)
    number = planner.next_number()
    grants = planner.begin_store(
        [
            StoreChain(number, keys.namespace, keys.keys, epoch),
            StoreChain(number, keys.namespace, keys.keys, epoch),
        ]
    )
    assert [grant.status for grant in grants] == [Status.OK, Status.BAD]
    assert grants[1].text
    planner.abort([End(number, ALL)])


def test_finish_and_abort_are_idempotent(planner):
    """R10: a number that was used and has ended is `done`."""
    keys = chain(2, seed=8)
    number = planner.next_number()
    planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))])
    assert planner.finish([End(number, ALL)])[0].status == Status.OK
    assert planner.finish([End(number, ALL)])[0].status == Status.DONE
    assert planner.abort([End(number, ALL)])[0].status == Status.DONE


def test_an_abort_before_its_begin_wins(planner):
    """R10: abort raises the last number, so that a begin which comes after it is refused."""
    keys = chain(2, seed=9)
    epoch, number = epoch_of(planner, keys), planner.next_number()
    planner.abort([End(number, ALL)])
    (grant,) = planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch)])
    assert grant.status == Status.BAD


def test_a_mover_says_quiet_itself(pair):
    """R9: frames of a lease that ended without it wait until the mover is quiet."""
    keys, planner = chain(2, seed=10), pair.planner
    number = planner.next_number()
    planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))])
    planner.abort([End(number)])
    free = stat(planner, "frames_free")
    assert pair.mover.quiet(planner.sid, [number])[0].status == Status.OK
    assert stat(planner, "frames_free") == free + 2
    assert pair.mover.quiet(planner.sid, [number])[0].status == Status.DONE


def stat(planner: CacheClient, name: str) -> int:
    return planner.stats().body.values[name]


def test_flush_makes_a_miss_and_gives_the_namespace_a_new_epoch(planner):
    """R13, and P15 before it: finished means visible."""
    keys = chain(3, seed=11)
    before = epoch_of(planner, keys)
    store(planner, keys, before)
    grant = load(planner, keys)
    assert grant.status == Status.OK
    flushed = planner.flush(keys.namespace).body
    assert isinstance(flushed, FlushReply)
    assert (flushed.freed, flushed.doomed) == (0, 3)
    assert flushed.epoch > before
    after = load(planner, keys)
    assert (after.status, after.epoch) == (Status.MISS, flushed.epoch)
    planner.finish([End(grant.number, ALL)])
    late = planner.begin_store([StoreChain(planner.next_number(), keys.namespace, keys.keys, before)])[0]
    assert late.status != Status.OK


def test_a_store_begun_before_a_flush_brings_nothing_back(planner):
    """R13: it is doomed at once, freed at its end, and says so."""
    keys = chain(3, seed=20)
    number = planner.next_number()
    planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))])
    assert planner.flush().body.doomed == 3
    assert planner.lookup(keys.namespace, keys.keys).body.pending == 0
    (ended,) = planner.finish([End(number, ALL)])
    assert (ended.status, ended.visible, ended.dropped) == (Status.OK, 0, 3)
    assert planner.lookup(keys.namespace, keys.keys).body.ready == 0


def test_tenants_with_different_salts_share_nothing(planner):
    ours, theirs = chain(2, seed=12, salt=b"a"), chain(2, seed=12, salt=b"b")
    store(planner, ours, epoch_of(planner, ours))
    assert load(planner, theirs).status == Status.MISS


def test_posted_requests_get_one_reply_each_from_poll(planner):
    keys = chain(2, seed=13)
    rids = [planner.post(Lookup(keys.namespace, keys.keys)) for _ in range(20)]
    seen = []
    while len(seen) < 20:
        assert planner.wait(10.0)
        seen += planner.poll()
    assert [reply.rid for reply in seen] == rids
    assert planner.wait(0.02) is False
    assert planner.poll() == []


def test_a_call_leaves_other_replies_for_poll(planner):
    keys = chain(2, seed=14)
    rid = planner.post(Lookup(keys.namespace, keys.keys))
    assert planner.lookup(keys.namespace, keys.keys).status == Status.OK
    assert [reply.rid for reply in planner.poll()] == [rid]


def test_wait_returns_for_the_callers_own_descriptor(planner):
    reader, writer = os.pipe()
    try:
        assert planner.wait(0.01, fd=reader) is False
        os.write(writer, b"x")
        started = time.monotonic()
        assert planner.wait(10.0, fd=reader) is True
        assert time.monotonic() - started < 9
    finally:
        os.close(reader)
        os.close(writer)


def test_another_thread_is_refused(planner):
    planner.poll()
    caught = []

    def other():
        try:
            planner.poll()
        except WrongThreadError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert len(caught) == 1


def test_a_request_beyond_a_messages_limits_is_the_callers_mistake(planner):
    with pytest.raises(UsageError, match="limit"):
        planner.lookup(b"n" * 16, bytes(9 << 20))


def test_another_geometry_is_refused_with_both_values_while_the_pool_is_in_use(sidecar, pair, caplog):
    """R30; the engine goes on with misses."""
    with caplog.at_level(logging.WARNING):
        client = CacheClient(sidecar.run_dir, layout=layout(page_tokens=32), group="other")
    try:
        assert not client.attached
        with pytest.raises(GeometryError, match=r"64 tokens.*32 tokens.*kvtier serve"):
            client.raise_if_refused()
        assert client.lookup(b"n" * 16, b"").status == Status.AWAY
        assert any("32 tokens" in record.message for record in caplog.records)
    finally:
        client.close()


def test_a_group_that_is_not_whole_gets_no_lease(sidecar):
    """R2."""
    planner = sidecar.client(group="half")
    try:
        assert not planner.complete
        assert load(planner, chain(2)).status == Status.BUSY
        mover = sidecar.client(group="half", role="mover")
        try:
            until(
                lambda: planner.poll() == [] and planner.complete,
                "the planner never heard that its group is whole",
            )
            assert load(planner, chain(2, seed=99)).status == Status.MISS
        finally:
            mover.close()
    finally:
        planner.close()


def test_a_forked_child_finds_the_client_inert(pair):
    """R21."""
    planner, keys = pair.planner, chain(2, seed=15)
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a client that is not inert may wait for ever
        inert = (
            not planner.attached
            and planner.poll() == []
            and planner.post(Lookup(keys.namespace, keys.keys)) is None
            and planner.lookup(keys.namespace, keys.keys).status == Status.AWAY
            and not planner.wait(0.01)
        )
        planner.close()
        os._exit(0 if inert else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert planner.lookup(keys.namespace, keys.keys).status == Status.OK


def test_close_detaches_and_can_be_called_twice(sidecar):
    before = sidecar.stats()["sessions_attached"]
    client = sidecar.client(group="brief")
    assert sidecar.stats()["sessions_attached"] == before + 1
    client.close()
    client.close()
    assert sidecar.stats()["sessions_attached"] == before
    assert client.lookup(b"n" * 16, b"").status == Status.AWAY
    assert client.post(Lookup(b"n" * 16, b"")) is None


# --- a server that stands still, dies, or talks nonsense ---------------------------------------------


@pytest.fixture
def own(tmp_path):
    with Sidecar(tmp_path / "run") as running:
        yield running


def test_without_a_server_everything_is_away_and_nothing_waits(tmp_path):
    started = time.monotonic()
    with CacheClient(tmp_path / "none", layout=layout(), group="g") as client:
        assert not client.attached
        assert client.refused is None
        keys = chain(2)
        assert client.lookup(keys.namespace, keys.keys).status == Status.AWAY
        assert load(client, keys).status == Status.AWAY
        assert client.finish([End(1)])[0].status == Status.AWAY
        assert client.post(Lookup(keys.namespace, keys.keys)) is None
        assert client.poll() == []
        with pytest.raises(UsageError, match="not attached"):
            _ = client.pool
    assert time.monotonic() - started < 10


def test_a_begin_that_timed_out_is_undone(own):
    """R10: the server executed it after all; the abort that follows gives everything back."""
    with Pair(own) as pair:
        planner, keys = pair.planner, chain(4)
        free = stat(planner, "frames_free")
        epoch = epoch_of(planner, keys)
        own.send(signal.SIGSTOP)
        # `expires` would keep the server from granting it: a deadline in the far future stands for a grant
        # that was made in time but came late.
        planner.timeout_s = 1e4
        posted = planner.post(
            BeginStore((StoreChain(planner.next_number(), keys.namespace, keys.keys, epoch),))
        )
        planner._open[posted].deadline = planner._next_deadline = 0.0
        (late,) = planner.poll()
        assert (late.rid, late.status) == (posted, Status.AWAY)
        own.send(signal.SIGCONT)
        planner.timeout_s = 10.0
        assert planner.lookup(keys.namespace, keys.keys).body.pending == 0
        assert stat(planner, "frames_free") == free
        assert stat(planner, "requests") > 0


def test_a_request_after_its_deadline_is_not_carried_out(own):
    with Pair(own) as pair:
        planner, keys = pair.planner, chain(4)
        epoch = epoch_of(planner, keys)
        own.send(signal.SIGSTOP)
        grant = planner.begin_store(
            [StoreChain(planner.next_number(), keys.namespace, keys.keys, epoch)], 0.02
        )[0]
        assert grant.status == Status.AWAY
        own.send(signal.SIGCONT)
        body = planner.lookup(keys.namespace, keys.keys).body
        assert (body.ready, body.pending) == (0, 0)
        assert planner.poll() == []


def test_calls_to_a_stopped_server_wait_no_longer_than_their_bound(own):
    with Pair(own, timeout_s=0.05) as pair:
        planner, keys = pair.planner, chain(4)
        own.send(signal.SIGSTOP)
        started = time.monotonic()
        statuses = {planner.lookup(keys.namespace, keys.keys).status for _ in range(10)}
        assert time.monotonic() - started < 5.0
        assert statuses == {Status.AWAY}
        own.send(signal.SIGCONT)
        planner.timeout_s = 10.0
        assert planner.lookup(keys.namespace, keys.keys).status == Status.OK


def test_starting_and_closing_beside_a_stopped_server_is_bounded(own):
    planner = own.client(group="early")
    own.send(signal.SIGSTOP)
    started = time.monotonic()
    late = CacheClient(own.run_dir, layout=layout(), group="late")
    assert not late.attached
    assert late.lookup(b"n" * 16, b"").status == Status.AWAY
    late.close()
    planner.close()
    assert time.monotonic() - started < 15.0
    own.send(signal.SIGCONT)
    # What was asked of it meanwhile is undone by itself: nobody is left.
    until(lambda: own.stats()["sessions_attached"] == 0, "a session was left over")


def test_posts_to_a_stopped_server_are_bounded_and_each_gets_its_reply(own):
    """No more than 64 go unanswered; the rest is refused at once. Ends are kept, and all arrive."""
    with Pair(own) as pair:
        planner, keys = pair.planner, chain(1)
        epoch = epoch_of(planner, keys)
        numbers = [planner.next_number() for _ in range(100)]
        chains = [chain(1, seed=seed) for seed in range(100)]
        grants = planner.begin_store(
            [StoreChain(n, c.namespace, c.keys, epoch) for n, c in zip(numbers, chains, strict=True)]
        )
        assert all(grant.status == Status.OK for grant in grants)
        own.send(signal.SIGSTOP)
        posted = []
        for _ in range(20):
            posted += [planner.post(Lookup(keys.namespace, keys.keys), 60.0) for _ in range(20)]
            planner.wait(0.002)  # time for libzmq to pass them on: its own marks would not stop them then
        sent = [rid for rid in posted if rid is not None]
        assert 1 <= len(sent) <= 64
        ends = [planner.post(Finish((End(number, ALL),))) for number in numbers]
        assert None not in ends
        for entry in planner._open.values():
            entry.deadline = min(entry.deadline, 0.0) if isinstance(entry.body, Lookup) else entry.deadline
        planner._next_deadline = 0.0
        replies = []
        until(lambda: replies.extend(planner.poll()) or len(replies) >= len(sent), "no AWAY replies came")
        assert {(reply.rid, reply.status) for reply in replies} == {(rid, Status.AWAY) for rid in sent}
        own.send(signal.SIGCONT)
        replies.clear()
        until(lambda: replies.extend(planner.poll()) or len(replies) >= len(ends), "ends were lost")
        assert [reply.rid for reply in replies] == ends
        assert all(reply.body.ended[0].visible == 1 for reply in replies)
        assert own.stats()["dropped_replies"] == 0


def test_a_killed_server_is_a_miss_and_the_next_one_is_found_by_itself(own):
    with Pair(own, timeout_s=1.0) as pair:
        planner, mover, keys = pair.planner, pair.mover, chain(4)
        store(planner, keys, epoch_of(planner, keys))
        number, pool_id = planner.attachment_no, planner.pool_id
        rid = None
        own.kill()
        until(lambda: not (planner.poll() and False) and not planner.attached, "the end was not noticed")
        assert load(planner, keys).status == Status.AWAY
        assert planner.post(Lookup(keys.namespace, keys.keys)) is rid
        own.again()
        until(lambda: planner.poll() == [] and planner.attached, "the planner did not attach again")
        until(lambda: mover.poll() == [] and mover.attached, "the mover did not attach again")
        until(lambda: planner.poll() == [] and planner.complete, "the group is not whole again")
        assert planner.attachment_no == number + 1
        assert planner.pool_id != pool_id
        planner.timeout_s = 10.0
        assert load(planner, keys).status == Status.MISS


def test_requests_under_way_when_the_server_dies_are_answered_away(own):
    with Pair(own) as pair:
        planner, keys = pair.planner, chain(4)
        own.send(signal.SIGSTOP)
        rids = [planner.post(Lookup(keys.namespace, keys.keys), 100.0) for _ in range(5)]
        rids.append(planner.post(Finish((End(77),))))
        own.kill()
        replies = []
        until(
            lambda: replies.extend(planner.poll()) or len(replies) >= 6, "requests were left without a reply"
        )
        assert [(reply.rid, reply.status) for reply in replies] == [(rid, Status.AWAY) for rid in rids]


def test_a_mover_keeps_the_old_pool_until_it_says_that_it_is_quiet(own):
    """R24: never two pools at once."""
    with Pair(own, manual_release=True, writable=True) as pair:
        mover, planner = pair.mover, pair.planner
        page = mover.pool.page(0, write=True)
        page[:] = 7
        old = mover.pool_id
        own.kill()
        until(lambda: mover.poll() == [] and mover.lost, "the end was not noticed")
        own.again()
        assert mover.wait(0.3) is False
        assert not mover.attached
        assert (mover.pool.page(0) == 7).all()
        assert len(mover.gens(np.array([0], dtype=np.int32))) == 1
        mover.release()
        planner.poll()
        planner.release()
        assert not mover.lost
        until(lambda: mover.poll() == [] and mover.attached, "the mover did not attach again")
        assert mover.pool_id != old
        assert (page == 7).all()  # memory lives as long as an array of it


def test_a_client_that_starts_before_its_server_finds_it_later(tmp_path):
    with CacheClient(tmp_path / "run", layout=layout(), group="g", timeout_s=10.0) as client:
        assert not client.attached
        with Sidecar(tmp_path / "run"):
            until(lambda: client.poll() == [] and client.attached, "the client never attached")
            assert client.lookup(b"n" * 16, b"").status == Status.OK


def test_replies_are_typed(pair):
    planner, keys = pair.planner, chain(1, seed=50)
    rid = planner.post(BeginLoad((LoadChain(planner.next_number(), keys.namespace, keys.keys),)))
    planner.wait(10.0)
    (reply,) = planner.poll()
    assert reply.rid == rid
    assert isinstance(reply.body, LoadReply)
    number = planner.next_number()
    planner.post(BeginStore((StoreChain(number, keys.namespace, keys.keys, reply.body.grants[0].epoch),)))
    planner.wait(10.0)
    (reply,) = planner.poll()
    assert isinstance(reply.body, StoreReply)
    planner.abort([End(number, ALL)])


def test_close_does_not_wait_for_an_attempt_to_attach(tmp_path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()

    def connect_at_last(*args, **kwargs):
        begun.set()
        go_on.wait(60)
        return Refusal(Status.AWAY, "nobody")

    monkeypatch.setattr(attacher, "connect", connect_at_last)
    before = threading.active_count()
    client = CacheClient(tmp_path / "run", layout=layout(), group="g", attach_timeout_s=0.0)
    try:
        assert begun.wait(30)
        started = time.monotonic()
        client.close(timeout_s=0.01)
        assert time.monotonic() - started < attacher.ATTEMPT_S
    finally:
        go_on.set()
    # What the attempt leaves is let go of all the same.
    until(lambda: threading.active_count() == before, "the attaching thread did not end")


def test_a_session_made_while_the_client_was_closed_is_given_back(sidecar, monkeypatch):
    made, go_on = threading.Event(), threading.Event()

    def connect_slowly(*args, **kwargs):
        attachment = connect(*args, **kwargs)
        made.set()
        go_on.wait(60)
        return attachment

    monkeypatch.setattr(attacher, "connect", connect_slowly)
    before = sidecar.stats()["sessions_attached"]
    client = CacheClient(sidecar.run_dir, layout=layout(), group="g", attach_timeout_s=0.0)
    try:
        assert made.wait(30)
        client.close(timeout_s=0.01)
        assert sidecar.stats()["sessions_attached"] == before + 1
    finally:
        go_on.set()
    until(lambda: sidecar.stats()["sessions_attached"] == before, "the session was left over")
