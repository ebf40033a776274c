"""Attaching: descriptors change hands, chunks come step by step, and garbage closes a connection at worst."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtier.errors import ConfigError, Status, UsageError
from kvtier.shm import rundir
from kvtier.shm.attach import Attachment, AttachRequest, Greeting, Listener, Refusal, connect
from kvtier.shm.handover import MAX_BYTES, MAX_FDS, send
from kvtier.shm.liveness import Liveness, OwnerLock
from kvtier.shm.shape import PoolShape
from tests.shm.harness import SMALL, MiniServer, exit_code, forked, open_fds, request

LONG = PoolShape((64, 4096), frames=150, chunk_frames=1)
"""150 chunks: three messages of descriptors."""


@pytest.fixture
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r") / "run"


@pytest.fixture
def server(run_dir: Path) -> Iterator[MiniServer]:
    server = MiniServer(run_dir)
    yield server
    server.stop()


def attach(server: MiniServer, **changes: Any) -> Attachment:
    attachment = connect(server.owner.run_dir, request(server.shape, **changes), timeout_s=10)
    assert isinstance(attachment, Attachment), attachment
    return attachment


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


# --- what an attach gives ---------------------------------------------------------------------------


def test_an_attach_gives_session_tables_and_pool(server: MiniServer) -> None:
    server.announce(SMALL.chunks)
    attachment = attach(server)
    assert attachment.wait_chunks(SMALL.frames, 10)
    assert (attachment.sid, attachment.pool_id, attachment.server_gen) == (101, server.tables.pool_id, 3)
    assert attachment.complete
    assert attachment.tables.shape == SMALL
    server.tables.beat(77)
    assert attachment.tables.heartbeat_ns == 77
    attachment.pool.page(9, 1, write=True)[:] = 5
    place = SMALL.where(9, 1)
    assert os.pread(server.chunks[2], place.bytes, place.offset) == b"\5" * place.bytes
    attachment.close()


def test_the_server_is_told_what_is_mapped_before_it_hands_out_more(server: MiniServer) -> None:
    """R28: `chunks` says from where, and raises the session's mark."""
    attachment = attach(server)
    assert until(lambda: server.mapped == [0])
    assert attachment.poll_chunks() == 0
    server.announce(1)
    assert attachment.wait_chunks(4, 10)
    server.announce(3)
    assert attachment.wait_chunks(10, 10)
    assert until(lambda: server.mapped == [0, 1, 3])
    assert server.sent == [1, 2]
    attachment.close()


def test_more_than_64_descriptors_go_in_several_messages(run_dir: Path) -> None:
    server = MiniServer(run_dir, LONG)
    server.announce(LONG.chunks)
    before = open_fds()
    attachment = attach(server)
    assert attachment.wait_chunks(LONG.frames, 10)
    assert until(lambda: server.mapped == [0, 64, 128, 150])
    assert server.sent == [64, 64, 22]
    # Connection, its other end, the lock, and the client's pidfd at the server: no chunk keeps a descriptor.
    assert open_fds() == before + 4
    attachment.close()
    server.stop()


def test_a_planner_maps_for_reading_and_a_mover_for_writing(server: MiniServer) -> None:
    server.announce(SMALL.chunks)
    planner = attach(server, role="planner")
    assert planner.wait_chunks(SMALL.frames, 10)
    with pytest.raises(UsageError, match="read-only"):
        planner.pool.page(0, write=True)
    with pytest.raises(ValueError, match="read-only"):
        planner.pool.page(0)[0] = 1
    planner.close()


def test_nothing_of_an_attach_is_left_after_close(server: MiniServer) -> None:
    server.announce(SMALL.chunks)
    before = open_fds()
    for _ in range(3):
        attachment = attach(server)
        assert attachment.wait_chunks(SMALL.frames, 10)
        sid = attachment.sid
        attachment.close()
        attachment.close()
        assert attachment.closed()
        assert server.locks.is_free(sid)
    assert until(lambda: not server.connections)
    assert open_fds() == before + 3  # the pidfds that the server keeps


# --- death (R19 to R21, R24) ------------------------------------------------------------------------


def test_the_lock_is_held_from_the_answer_until_the_process_is_dead(server: MiniServer) -> None:
    ready_read, ready = os.pipe()

    def client() -> None:
        attachment = connect(server.owner.run_dir, request(), timeout_s=10)
        os.write(ready, b"x" if isinstance(attachment, Attachment) else b"-")
        signal.pause()

    with forked(client) as pid:
        assert os.read(ready_read, 1) == b"x"
        pidfd = server.pidfds[101]
        # The fork copied this process's descriptors, among them no lock: it was made after.
        assert server.locks.probe(101, pidfd) is Liveness.ALIVE
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
        assert until(lambda: server.locks.probe(101, pidfd) is Liveness.DEAD)
        assert until(lambda: not server.connections)
    os.close(ready)
    os.close(ready_read)


def test_a_closed_attachment_of_a_living_process_is_no_proof_of_death(server: MiniServer) -> None:
    attachment = attach(server)
    pidfd = server.pidfds[attachment.sid]
    attachment.close()
    assert server.locks.probe(attachment.sid, pidfd) is Liveness.SUSPECT


def test_an_attachment_is_inert_in_a_forked_child(server: MiniServer) -> None:
    server.announce(1)
    attachment = attach(server)
    assert attachment.wait_chunks(4, 10)

    def child() -> None:
        assert attachment.closed()
        assert attachment.poll_chunks() == 0
        assert not attachment.wait_chunks(10, 0.0)
        with pytest.raises(UsageError, match="forked child"):
            attachment.pool.page(0)
        attachment.close()

    with forked(child) as pid:
        assert exit_code(pid) == 0
    assert not attachment.closed()
    assert not server.locks.is_free(attachment.sid)
    server.announce(3)
    assert attachment.wait_chunks(10, 10)
    attachment.close()
    assert server.locks.is_free(attachment.sid)


def test_a_program_that_the_client_starts_inherits_nothing(server: MiniServer) -> None:
    before = set(os.listdir("/proc/self/fd"))
    attachment = attach(server)
    made = {int(name) for name in os.listdir("/proc/self/fd")} - {int(name) for name in before}
    assert len(made) >= 4  # both ends of the connection, lock, pidfd
    for fd in made:
        with contextlib.suppress(OSError):  # that of listdir itself is closed again
            assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    attachment.close()


def test_the_end_of_the_connection_is_noticed(server: MiniServer) -> None:
    server.announce(1)
    attachment = attach(server)
    assert attachment.wait_chunks(4, 10)
    assert not attachment.closed()
    assert until(lambda: len(server.mapped) == 2)
    server.do(
        lambda: [connection.close() for connection in server.connections] and server.connections.clear()
    )
    assert until(attachment.closed)
    assert "closed" in attachment.why
    assert attachment.poll_chunks() == 0
    assert not attachment.wait_chunks(10, 10)
    assert (attachment.pool.page(3) == 0).all()  # what is mapped stays until close (R24)
    attachment.close()


# --- refused, absent, stopped -----------------------------------------------------------------------


def test_a_refusal_carries_status_text_and_the_pools_geometry(server: MiniServer) -> None:
    server.refusal = (Status.BAD, "another geometry", (32, 4096))
    assert connect(server.owner.run_dir, request(), timeout_s=10) == Refusal(
        Status.BAD, "another geometry", (32, 4096)
    )
    server.refusal = (Status.BUSY, "later", None)
    assert connect(server.owner.run_dir, request(), timeout_s=10) == Refusal(Status.BUSY, "later", None)
    assert until(lambda: not server.connections)


def test_without_a_server_attaching_is_away(run_dir: Path) -> None:
    before = open_fds()
    for make in (lambda: None, lambda: rundir.make_run_dir(run_dir), lambda: bind_dead(run_dir)):
        make()
        refusal = connect(run_dir, request(), timeout_s=1)
        assert isinstance(refusal, Refusal)
        assert refusal.status is Status.AWAY
        assert str(run_dir) in refusal.text
    assert open_fds() == before


def bind_dead(run_dir: Path) -> None:
    """The socket's file of a server that was killed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.bind(str(run_dir / rundir.ATTACH_SOCKET))


@pytest.mark.parametrize("silence", ["deaf", "never accepts", "backlog full"])
def test_a_server_that_does_not_answer_is_away_within_the_bound(run_dir: Path, silence: str) -> None:
    owner = OwnerLock(run_dir)
    listener = Listener(run_dir, Greeting(b"", 1))
    stop, threads, waiting = threading.Event(), [], []
    if silence == "deaf":
        threads = [
            threading.Thread(
                target=lambda: [waiting.extend(listener.accept()) for _ in iter(stop.is_set, True)]
            )
        ]
        threads[0].start()
    elif silence == "backlog full":
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect(str(run_dir / rundir.ATTACH_SOCKET))
    begun = time.monotonic()
    refusal = connect(run_dir, request(), timeout_s=0.2)
    assert isinstance(refusal, Refusal)
    assert refusal.status is Status.AWAY
    assert time.monotonic() - begun < 5
    stop.set()
    for thread in threads:
        thread.join()
    for sock in waiting:
        sock.close()
    listener.close()
    owner.release()


def test_an_unsafe_run_directory_is_the_operators_mistake(run_dir: Path, server: MiniServer) -> None:
    run_dir.chmod(0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        connect(run_dir, request(), timeout_s=1)
    with pytest.raises(ConfigError, match="chmod 700"):
        Listener(run_dir, Greeting(b"", 1))
    run_dir.chmod(0o700)
    (run_dir.parent / "link").symlink_to(run_dir)
    with pytest.raises(ConfigError, match="symbolic link"):
        connect(run_dir.parent / "link", request(), timeout_s=1)


def test_the_socket_is_closed_to_others_and_a_dead_ones_file_is_replaced(run_dir: Path) -> None:
    owner = OwnerLock(run_dir)
    bind_dead(run_dir)
    listener = Listener(run_dir, Greeting(b"", 1))
    path = run_dir / rundir.ATTACH_SOCKET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listener.close()
    listener.close()
    assert not path.exists()
    owner.release()
    assert not run_dir.exists()


# --- what a hostile or broken client can do ---------------------------------------------------------


def raw(server: MiniServer) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(10)
    sock.connect(str(server.owner.run_dir / rundir.ATTACH_SOCKET))
    assert msgpack.unpackb(sock.recv(MAX_BYTES))["kind"] == "greeting"
    return sock


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(MAX_BYTES) == b""
    except ConnectionError:
        return True


GOOD = {
    "kind": "attach",
    "group": "g",
    "role": "mover",
    "rank": 0,
    "ranks": 1,
    "geometry": list(SMALL.geometry),
    "fingerprint": bytes(32),
    "format": "",
    "boot_id": "",
    "numa_node": -1,
    "versions": [1, 1],
}


def own_pidfd() -> int:
    return os.pidfd_open(os.getpid())


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "hello"},
        {"kind": "chunks", "start": 0},  # before an attach
        {"kind": None},
        {"group": 7},
        {"group": "g" * 257},
        {"rank": 1},
        {"rank": -1},
        {"rank": True},
        {"ranks": 0},
        {"ranks": 10**6},
        {"geometry": "abc"},
        {"geometry": [64, -1]},
        {"geometry": [64, 2**63]},
        {"geometry": [4096] * 300},
        {"fingerprint": b"short"},
        {"fingerprint": "text" * 8},
        {"versions": [1]},
        {"numa_node": 1.5},
    ],
)
def test_an_attach_with_a_wrong_field_ends_its_connection_only(
    server: MiniServer, change: dict[str, Any]
) -> None:
    good = attach(server)
    with raw(server) as sock:
        pidfd = own_pidfd()
        send(sock, {**GOOD, **change}, [pidfd])
        os.close(pidfd)
        assert is_closed(sock)
    assert not good.closed()
    good.close()


def test_a_request_may_bring_one_pidfd_and_nothing_else(server: MiniServer, tmp_path: Path) -> None:
    before = open_fds()
    file = os.open(tmp_path, os.O_RDONLY)
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    dead_pidfd = os.pidfd_open(dead)
    os.waitpid(dead, 0)
    mine = own_pidfd()
    for fds in ([], [file], [dead_pidfd], [mine, mine], [mine] * 200):
        with raw(server) as sock:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            sock.sendmsg([msgpack.packb(GOOD)], rights)
            assert is_closed(sock)
    for fd in (file, dead_pidfd, mine):
        os.close(fd)
    assert until(lambda: not server.connections)
    assert open_fds() == before


def test_a_second_attach_and_chunks_out_of_turn_end_the_connection(server: MiniServer) -> None:
    for second in (GOOD, {"kind": "chunks", "start": 99}, {"kind": "chunks", "start": -1}):
        with raw(server) as sock:
            pidfd = own_pidfd()
            send(sock, GOOD, [pidfd])
            os.close(pidfd)
            assert msgpack.unpackb(sock.recv(MAX_BYTES))["kind"] == "attached"
            send(sock, second, [])
            assert is_closed(sock)
    with raw(server) as sock:
        pidfd = own_pidfd()
        send(sock, GOOD, [pidfd])
        os.close(pidfd)
        sock.recv(MAX_BYTES)
        send(sock, {"kind": "chunks", "start": 0}, [])
        send(sock, {"kind": "chunks", "start": 0}, [])  # the first waits still
        assert is_closed(sock)


def test_a_client_that_reads_nothing_costs_the_server_nothing(server: MiniServer) -> None:
    with raw(server) as sock:
        pidfd = own_pidfd()
        send(sock, GOOD, [pidfd])
        os.close(pidfd)
        send(sock, {"kind": "chunks", "start": 0}, [])
        server.announce(3)
        other = attach(server)
        assert other.wait_chunks(SMALL.frames, 10)
        other.close()


@given(
    data=st.binary(max_size=300)
    | st.binary(max_size=40).map(lambda tail: msgpack.packb(GOOD)[: -len(tail)] + tail)
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_end_their_connection_at_most(server: MiniServer, data: bytes) -> None:
    with raw(server) as sock:
        sock.send(data)
        sock.shutdown(socket.SHUT_WR)
        assert is_closed(sock)
    assert server._thread.is_alive()


def test_a_message_above_the_limit_ends_its_connection(server: MiniServer) -> None:
    with raw(server) as sock:
        sock.send(msgpack.packb({**GOOD, "format": "x" * MAX_BYTES}))
        assert is_closed(sock)
    attach(server).close()


def test_connections_beyond_the_room_are_closed_at_once(run_dir: Path) -> None:
    owner = OwnerLock(run_dir)
    listener = Listener(run_dir, Greeting(b"", 1))
    socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(5)]
    for sock in socks:
        sock.settimeout(10)
        sock.connect(str(run_dir / rundir.ATTACH_SOCKET))
    accepted = listener.accept(room=3)
    assert len(accepted) == 3
    assert [is_closed(sock) for sock in socks] == [False] * 3 + [True] * 2
    assert [connection.pid for connection in accepted] == [os.getpid()] * 3
    for each in (*socks, *accepted, listener):
        each.close()
    owner.release()


# --- what a hostile or broken server can do ---------------------------------------------------------


class Puppet:
    """A server that answers one client with whatever the test says; `fds` go with the last message."""

    def __init__(self, run_dir: Path, messages: list[bytes], fds: list[int]) -> None:
        rundir.make_run_dir(run_dir)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(run_dir / rundir.ATTACH_SOCKET))
        self.socket.listen()
        self.messages, self.fds = messages, fds
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        self.sock, _ = self.socket.accept()
        for number, message in enumerate(self.messages, 1):
            rights = []
            if number == len(self.messages) and self.fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.fds))]
            with contextlib.suppress(OSError):  # the client may have gone already
                self.sock.sendmsg([message], rights)

    def close(self) -> None:
        self.thread.join(10)
        self.sock.close()
        self.socket.close()


GREETING = msgpack.packb({"kind": "greeting", "v": 1, "pool_id": b"", "server_gen": 1})


def attached(**changes: Any) -> bytes:
    message = {
        "kind": "attached",
        "sid": 5,
        "pool_id": bytes(16),
        "server_gen": 1,
        "complete": True,
        **changes,
    }
    data: bytes = msgpack.packb(message)
    return data


@pytest.mark.parametrize(
    ("messages", "fds"),
    [
        ([b"\xc1"], 0),
        ([b"\xc0"], 0),
        ([msgpack.packb({1: 2})], 0),
        ([GREETING], 1),
        ([msgpack.packb({"kind": "greeting", "pool_id": b"short", "server_gen": 1})], 0),
        ([GREETING, GREETING], 0),
        ([GREETING, attached()], 0),
        ([GREETING, attached()], 1),
        ([GREETING, attached()], 2),  # no tables
        ([GREETING, attached()], 3),
        ([GREETING, attached(sid="x")], 2),
        ([GREETING, attached(complete=1)], 2),
        ([GREETING, attached(pool_id=b"")], 2),
        ([GREETING, msgpack.packb({"kind": "refused", "status": 99, "text": ""})], 0),
        ([GREETING, msgpack.packb({"kind": "refused"})], 2),
        ([GREETING, msgpack.packb({"kind": "refused", "status": 7, "geometry": "wide"})], 0),
    ],
)
def test_a_server_that_answers_garbage_is_refused_and_leaks_nothing(
    run_dir: Path, messages: list[bytes], fds: int, tmp_path: Path
) -> None:
    before = open_fds()
    held = [os.open(tmp_path, os.O_RDONLY) for _ in range(fds)]
    puppet = Puppet(run_dir, messages, held)
    refusal = connect(run_dir, request(), timeout_s=10)
    assert isinstance(refusal, Refusal)
    assert refusal.status is Status.BAD
    puppet.close()
    for fd in held:
        os.close(fd)
    assert open_fds() == before


def puppet_chunks(run_dir: Path, server: MiniServer, message: dict[str, Any], fds: list[int]) -> Attachment:
    """An attachment whose server then sends this as its chunks."""
    attachment = attach(server)
    server.do(
        lambda: server.connections[-1]._socket.sendmsg(
            [msgpack.packb(message)],
            [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [],
        )
    )
    return attachment


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ({"kind": "chunks", "start": 0, "count": 2}, "one"),
        ({"kind": "chunks", "start": 1, "count": 1}, "one"),
        ({"kind": "chunks", "start": 0, "count": 1}, "none"),
        ({"kind": "chunks", "start": 0, "count": 1}, "unsealed"),
        ({"kind": "chunks", "start": 0, "count": 65}, "65"),
        ({"kind": "chunks", "start": 0, "count": 200}, "200"),
        ({"kind": "attached"}, "one"),
    ],
)
def test_wrong_chunks_end_the_attachment_and_map_nothing(
    run_dir: Path, server: MiniServer, message: dict[str, Any], wrong: str
) -> None:
    """R28: counts and MSG_CTRUNC are checked."""
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, SMALL.chunk_bytes(0))
    fds = {
        "none": [],
        "one": server.chunks[:1],
        "unsealed": [unsealed],
        "65": server.chunks[:1] * 65,
        "200": server.chunks[:1] * 200,
    }[wrong]
    attachment = puppet_chunks(run_dir, server, message, fds)
    before = open_fds()
    assert until(lambda: attachment.poll_chunks() or attachment.closed())
    assert attachment.pool.frames == 0
    assert attachment.why
    if wrong in ("65", "200"):
        assert "descriptors were lost" in attachment.why
    assert open_fds() == before
    attachment.close()
    os.close(unsealed)


def test_too_few_free_descriptors_are_said_so_and_lose_none(server: MiniServer) -> None:
    attachment = attach(server)
    before = open_fds()
    server.announce(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    spare = [os.dup(0) for _ in range(highest + 1 - before)]  # no gaps below
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(spare, default=highest) + 2, hard))
    try:
        assert until(lambda: attachment.poll_chunks() or attachment.closed())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in spare:
            os.close(fd)
    assert "ulimit -n" in attachment.why
    assert attachment.pool.frames == 0
    assert open_fds() == before
    attachment.close()


def test_no_more_than_64_descriptors_are_ever_sent() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        send(ours, {}, [0] * MAX_FDS)
        with pytest.raises(UsageError, match="at most 64"):
            send(ours, {}, [0] * (MAX_FDS + 1))
        with pytest.raises(UsageError, match="bytes"):
            send(ours, {"x": "y" * MAX_BYTES}, [])


def test_a_wide_layout_fits_into_a_request(run_dir: Path) -> None:
    shape = PoolShape((64, *[4096] * 256), 3, 2)
    server = MiniServer(run_dir, shape)
    attachment = attach(server)
    assert attachment.tables.shape == shape
    attachment.close()
    server.stop()


def test_requests_arrive_as_they_were_made(run_dir: Path) -> None:
    owner = OwnerLock(run_dir)
    listener = Listener(run_dir, Greeting(b"p" * 16, 2))
    sent = AttachRequest("g", "planner", 0, 64, (64, 4096), b"f" * 32, "fmt", "boot", 3, (1, 4))
    thread = threading.Thread(target=connect, args=(run_dir, sent), kwargs={"timeout_s": 10})
    thread.start()
    connections: list[Any] = []
    assert until(lambda: connections.extend(listener.accept()) or connections)
    got: list[Any] = []
    assert until(lambda: got.extend(connections[0].receive()) or got)
    assert got == [sent]
    assert 0 <= time.monotonic() - connections[0].since < 60
    connections[0].close()
    thread.join()
    listener.close()
    owner.release()
