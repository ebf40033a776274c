"""The data socket under everything that is not right: mutated, huge, late, foreign, too much."""

from __future__ import annotations

import random
import socket as sockets
import time

import msgpack
import pytest
import zmq

from kvtier.errors import Status
from kvtier.shm.rundir import DATA_SOCKET
from kvtier.wire.codec import decode_reply, encode_request
from kvtier.wire.messages import (
    Abort,
    BeginLoad,
    BeginStore,
    Detach,
    End,
    Finish,
    Flush,
    Hello,
    LoadChain,
    Lookup,
    Op,
    Quiet,
    Reply,
    Request,
    Stats,
    StoreChain,
)
from kvtier.wire.packing import MAX_MESSAGE_BYTES
from tests.client.test_client import ALL, chain, epoch_of, load, stat, store
from tests.server.sidecar import Pair, Sidecar, until
from tests.wire.test_messages import mutate

NS = b"n" * 16


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    with Sidecar(tmp_path_factory.mktemp("s") / "run") as running:
        yield running


@pytest.fixture
def pair(sidecar):
    with Pair(sidecar) as made:
        made.planner.flush()
        yield made


class Peer:
    """A socket of anybody's, without our client's care."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self.socket.setsockopt(zmq.SNDTIMEO, 10_000)
        self.socket.connect(f"ipc://{sidecar.run_dir / DATA_SOCKET}")

    def ask(self, *parts: bytes) -> Reply:
        self.socket.send_multipart(parts)
        return decode_reply(self.socket.recv())

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def peer(sidecar):
    with Peer(sidecar) as made:
        yield made


def raw(op: int, *fields: object, gen: int = 0, sid: int = 0, rid: int = 7, expires: int = 0) -> bytes:
    return msgpack.packb([1, op, gen, sid, rid, expires, *fields])


def test_stats_need_no_session_and_format_nothing(tmp_path):
    with Sidecar(tmp_path / "run") as fresh:
        values = fresh.stats()
        assert values["formats"] == values["attaches"] == values["sessions_attached"] == 0
        assert values["pool_id"] == ""
        assert values["frames"] == values["missed_absent"] == values["epoch"] == 0
        with Pair(fresh) as pair:
            keys = chain(3)
            store(pair.planner, keys, epoch_of(pair.planner, keys))
            load(pair.planner, keys)
            load(pair.planner, chain(3, salt=b"none"))
            later = fresh.stats()
        assert later.keys() == values.keys()  # programs find every name from the start
        assert later["asked"] == later["hits"] + sum(n for k, n in later.items() if k.startswith("missed_"))
        assert later["missed_absent"] == 3


def test_an_unknown_session_or_an_older_server_is_gone(pair, peer):
    gen, sid = pair.planner.server_gen, pair.planner.sid
    assert peer.ask(raw(Op.LOOKUP, NS, b"", gen=gen, sid=sid ^ 1)).status == Status.GONE
    assert peer.ask(raw(Op.LOOKUP, NS, b"", gen=gen - 1, sid=sid)).status == Status.GONE
    assert peer.ask(raw(Op.HELLO, gen=gen - 1, sid=sid)).status == Status.GONE


def test_a_socket_that_did_not_say_hello_cannot_speak_for_a_session(pair, peer):
    reply = peer.ask(raw(Op.DETACH, True, gen=pair.planner.server_gen, sid=pair.planner.sid))
    assert (reply.status, reply.rid) == (Status.BAD, 7)
    assert "hello" in reply.text
    assert pair.planner.lookup(NS, b"").status == Status.OK


def test_a_late_request_is_expired_but_a_late_end_is_carried_out(pair):
    """Taking over a session's socket is what `hello` does."""
    planner, keys = pair.planner, chain(2, seed=1)
    (grant,) = planner.begin_store(
        [StoreChain(planner.next_number(), keys.namespace, keys.keys, epoch_of(planner, keys))]
    )
    with Peer(pair.sidecar) as peer:
        who = {"gen": planner.server_gen, "sid": planner.sid}
        assert peer.ask(raw(Op.HELLO, **who)).status == Status.OK
        late = time.monotonic_ns() - 1
        assert peer.ask(raw(Op.LOOKUP, keys.namespace, b"", expires=late, **who)).status == Status.EXPIRED
        reply = peer.ask(raw(Op.FINISH, [[grant.number, [0]]], expires=late, **who))
        assert reply.body.ended[0].visible == 2
        assert peer.ask(raw(Op.LOOKUP, keys.namespace, b"", **who)).status == Status.OK
        assert peer.ask(raw(Op.DETACH, True, **who)).status == Status.OK


def test_a_message_of_two_to_four_parts_is_bad_and_a_longer_one_is_dropped(sidecar, peer):
    """Limit: parts of a message."""
    good = raw(Op.STATS)
    for parts in ((good, b"x"), (good, b"", b""), (b"", b"", b"", good)):
        reply = peer.ask(*parts)
        assert (reply.status, reply.rid) == (Status.BAD, 0)
    before = sidecar.stats()["dropped_requests"]
    peer.socket.send_multipart([good] * 5)
    peer.socket.send_multipart([b"x"] * 500)
    assert peer.ask(good).status == Status.OK
    assert sidecar.stats()["dropped_requests"] == before + 2


def test_a_message_of_8_mib_is_read_and_a_longer_one_never_arrives(sidecar, peer):
    """Limit: bytes of a message. libzmq hangs up on a peer that sends more."""
    assert peer.ask(b"\xc4" * MAX_MESSAGE_BYTES).status == Status.BAD
    peer.socket.setsockopt(zmq.RCVTIMEO, 300)
    peer.socket.send(b"\xc4" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(zmq.Again):
        peer.socket.recv()
    assert sidecar.stats()["version"]


def test_65536_keys_are_read_and_one_more_is_bad(pair):
    """Limit: keys of a message."""
    assert pair.planner.lookup(NS, bytes(32 * 65_536)).status == Status.OK
    reply = pair.planner.lookup(NS, bytes(32 * 65_537))
    assert reply.status == Status.BAD
    assert "65536" in reply.text


def test_a_session_holds_at_most_its_share_of_the_pool(pair):
    """Limit: R12. Half of the pool; beyond it a begin is busy and changes nothing."""
    planner, frames = pair.planner, pair.mover.pool.shape.frames
    held = []
    for seed in range(4):
        keys = chain(frames // 4, seed=seed)
        number = planner.next_number()
        (grant,) = planner.begin_store(
            [StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))]
        )
        held.append((number, grant))
    assert sum(grant.taken for _, grant in held) == frames // 2
    assert held[-1][1].status == Status.BUSY
    assert held[-1][1].reason == "cap"
    ended = planner.abort([End(number, ALL) for number, grant in held if grant.taken])
    assert all(end.status == Status.OK for end in ended)
    assert stat(planner, "frames_free") == frames


def test_65536_leases_are_the_most(pair):
    """Limit: leases. Loads of one page, 1,024 in a message; then `busy`, and all of them end again."""
    planner, keys = pair.planner, chain(1, seed=3)
    store(planner, keys, epoch_of(planner, keys))
    begun: list[int] = []
    statuses: set[Status] = set()
    for _ in range(65):
        numbers = [planner.next_number() for _ in range(1024)]
        grants = planner.begin_load([LoadChain(number, keys.namespace, keys.keys) for number in numbers])
        begun += [grant.number for grant in grants if grant.status == Status.OK]
        statuses |= {grant.status for grant in grants}
    assert len(begun) == 65_536
    assert statuses == {Status.OK, Status.BUSY}
    for at in range(0, len(begun), 1024):
        ended = planner.finish([End(number, ALL) for number in begun[at : at + 1024]])
        assert {end.status for end in ended} == {Status.OK}
    assert stat(planner, "leases") == 0


def test_256_sessions_are_the_most(tmp_path):
    """Limit: sessions. The 257th is refused by name; when one leaves there is room again."""
    from kvtier.shm.attach import AttachRequest, Refusal, connect
    from tests.server.sidecar import layout

    shape = layout()
    with Sidecar(tmp_path / "run") as sidecar:

        def attach(number: int):
            request = AttachRequest(f"g{number}", "planner", 0, 1, shape.geometry, shape.fingerprint)
            return connect(sidecar.run_dir, request, timeout_s=10)

        attached = [attach(number) for number in range(256)]
        assert not any(isinstance(one, Refusal) for one in attached)
        refused = attach(256)
        assert isinstance(refused, Refusal)
        assert refused.status == Status.BUSY
        assert "256 sessions" in refused.text
        attached.pop().close()
        until(lambda: sidecar.stats()["sessions_attached"] == 255, "the end of a session was not noticed")
        again = attach(257)
        assert not isinstance(again, Refusal)
        for one in (*attached, again):
            one.close()
        until(lambda: sidecar.stats()["sessions_attached"] == 0, "the ends of the sessions were not noticed")


def test_a_peer_that_reads_nothing_costs_its_own_replies_only(sidecar, pair):
    """Limit: high-water marks. Its replies are dropped, or its requests wait; others are served."""
    with Peer(sidecar) as greedy:
        greedy.socket.setsockopt(zmq.RCVHWM, 1)
        sent = 0
        greedy.socket.setsockopt(zmq.SNDTIMEO, 200)
        keys = bytes(32 * 2048)
        try:
            while sent < 20_000:
                greedy.socket.send(raw(Op.LOOKUP, NS, keys))
                sent += 1
        except zmq.Again:
            pass
        started = time.monotonic()
        for _ in range(20):
            assert pair.planner.lookup(NS, b"").status == Status.OK
        assert time.monotonic() - started < 10
    assert sent > 64


def test_20000_mutated_messages_harm_nobody(sidecar, pair):
    """P2, P3: each gets an error reply or is dropped (or is a right message after all), while a valid client
    is served; and afterwards the core is whole."""
    planner, keys = pair.planner, chain(8, seed=4)
    epoch = epoch_of(planner, keys)
    store(planner, keys, epoch)
    rng = random.Random(20_000)
    dropped = sidecar.stats()["dropped_replies"]

    def served() -> None:
        """A mutated flush may have emptied all namespaces; that apart, the valid client finds its pages."""
        found = planner.lookup(keys.namespace, keys.keys).body
        if found.ready != 8:
            store(planner, keys, found.epoch)
        assert planner.lookup(keys.namespace, keys.keys).body.ready == 8

    def answered(batch: list[bytes]) -> None:
        # At most 32 unanswered, so that no reply can be dropped for want of room.
        for message in batch:
            peer.socket.send(message)
        for _ in batch:
            status = decode_reply(peer.socket.recv()).status
            counted["ok" if status == Status.OK else "bad" if status == Status.BAD else "other"] += 1

    counted = {"ok": 0, "bad": 0, "other": 0}
    with Pair(sidecar, group="victim") as victim, Peer(sidecar) as peer:
        gen, sid = victim.planner.server_gen, victim.planner.sid
        k = chain(6, seed=5)
        bodies = [
            Hello(),
            Lookup(k.namespace, k.keys),
            BeginLoad((LoadChain(1 << 40, k.namespace, k.keys, 1, 2), LoadChain(1 << 41, NS, b""))),
            BeginStore((StoreChain(1 << 42, k.namespace, k.keys, epoch),)),
            Finish((End(1 << 42, ALL), End(3))),
            Abort((End(1 << 43, ALL),)),
            Quiet(sid, (1, 2, 3)),
            Flush(k.namespace),
            Stats(),
        ]
        originals = [encode_request(Request(9, gen, sid, body)) for body in bodies]
        assert peer.ask(originals[0]).status == Status.OK  # the session is this peer's from now on
        sent = 0
        while sent < 20_000:
            answered([mutate(rng.choice(originals), rng) for _ in range(32)])
            sent += 32
            if sent % 1024 == 0:
                served()
        goodbye = encode_request(Request(9, gen, sid, Detach(False)))
        for _ in range(10):
            answered([mutate(goodbye, rng) for _ in range(32)])
            sent += 32
        served()
        peer.socket.setsockopt(zmq.RCVTIMEO, 50)
        with pytest.raises(zmq.Again):
            peer.socket.recv()  # one reply each, and no more
    assert sum(counted.values()) == sent
    assert counted["bad"] > sent // 2
    assert counted["ok"] > 100  # deep enough to reach the core
    values = sidecar.stats()
    assert (values["internal_errors"], values["dropped_replies"]) == (0, dropped)
    served()


def connected(raw_socket: sockets.socket, sidecar: Sidecar) -> bool:
    try:
        raw_socket.connect(str(sidecar.run_dir / "attach.sock"))
    except BlockingIOError:
        return False  # the backlog is full for now
    return True


def test_random_bytes_on_the_attach_socket_harm_nobody(sidecar, pair):
    rng = random.Random(7)
    before = sidecar.stats()["sessions_attached"]
    good = msgpack.packb({"kind": "attach", "group": "x", "role": "planner", "rank": 0, "ranks": 1})
    for _ in range(300):
        with sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET) as raw_socket:
            raw_socket.settimeout(10)
            until(lambda: connected(raw_socket, sidecar), "the attach socket is stuck")
            raw_socket.send(rng.choice((mutate(good, rng), rng.randbytes(rng.randint(1, 200)))))
    assert pair.planner.lookup(NS, b"").status == Status.OK
    assert sidecar.stats()["internal_errors"] == 0
    until(lambda: sidecar.stats()["sessions_attached"] == before, "a session was left over")
