"""Proof of death, with processes that really die, fork and hold on (R19 to R21), and the one owner (R25)."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import OwnedError, UsageError
from kvtier.shm import rundir
from kvtier.shm.liveness import Liveness, OwnerLock, SessionLocks, has_ended, is_pidfd, try_lock
from tests.shm.harness import exit_code, forked, open_fds

SID = 2**64 - 1


@pytest.fixture
def locks(tmp_path: Path) -> SessionLocks:
    return SessionLocks(tmp_path)


def ended(pidfd: int, timeout_s: float = 10.0) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    """For what the kernel does on its own: files are released after the pidfd is readable, or before."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


class Client:
    """A process that gets a session's lock by SCM_RIGHTS and then does as `body` says."""

    def __init__(self, locks: SessionLocks, body: Callable[[int], None], sid: int = SID) -> None:
        self.ours, theirs = socket.socketpair()
        lock = locks.grant(sid)

        def child() -> None:
            self.ours.close()
            os.close(lock)
            held = socket.recv_fds(theirs, 1, 1)[1][0]
            theirs.send(b"r")
            body(held)
            theirs.recv(1)

        self.process = forked(child)
        self.pid = self.process.__enter__()
        self.pidfd = os.pidfd_open(self.pid)
        theirs.close()
        socket.send_fds(self.ours, [b"x"], [lock])
        os.close(lock)  # the server keeps none
        self.ours.settimeout(10)
        assert self.ours.recv(1) == b"r"

    def end(self) -> None:
        self.process.__exit__(None, None, None)
        self.ours.close()
        os.close(self.pidfd)


def test_a_session_lives_until_its_process_is_killed(locks: SessionLocks) -> None:
    client = Client(locks, lambda held: None)
    assert locks.probe(SID, client.pidfd) is Liveness.ALIVE
    assert not locks.is_free(SID)
    os.kill(client.pid, signal.SIGKILL)
    assert ended(client.pidfd)
    assert until(lambda: locks.probe(SID, client.pidfd) is Liveness.DEAD)
    client.end()


def test_a_stopped_process_is_alive(locks: SessionLocks) -> None:
    client = Client(locks, lambda held: None)
    os.kill(client.pid, signal.SIGSTOP)
    assert locks.probe(SID, client.pidfd) is Liveness.ALIVE
    client.end()


def test_a_free_lock_alone_is_only_suspect(locks: SessionLocks) -> None:
    """R20: the files of a dying process are released one by one; its copies may still run."""
    done_read, done = os.pipe()

    def drop(held: int) -> None:
        os.close(held)
        os.write(done, b"x")

    client = Client(locks, drop)
    os.read(done_read, 1)
    assert locks.is_free(SID)
    assert locks.probe(SID, client.pidfd) is Liveness.SUSPECT
    os.kill(client.pid, signal.SIGKILL)
    assert ended(client.pidfd)
    assert locks.probe(SID, client.pidfd) is Liveness.DEAD
    client.end()
    os.close(done)
    os.close(done_read)


def test_a_forked_child_that_holds_the_lock_keeps_the_session(locks: SessionLocks) -> None:
    """R21: the process has ended, but something of it may still touch the pool."""
    stay_read, stay = os.pipe()

    def fork(held: int) -> None:
        if os.fork() == 0:
            os.close(stay)
            os.read(stay_read, 1)  # until the test closes its end
            os._exit(0)
        os._exit(0)

    client = Client(locks, fork)
    assert ended(client.pidfd)
    assert not locks.is_free(SID)
    assert locks.probe(SID, client.pidfd) is Liveness.ALIVE
    os.close(stay)
    assert until(lambda: locks.probe(SID, client.pidfd) is Liveness.DEAD)
    os.close(stay_read)
    client.end()


def test_a_receiver_that_dies_before_it_reads_the_lock_leaves_it_free(locks: SessionLocks) -> None:
    """R19: there is no moment without a lock, and none when nobody is left."""
    ours, theirs = socket.socketpair()
    lock = locks.grant(SID)
    with forked(lambda: signal.pause()) as pid:
        socket.send_fds(ours, [b"x"], [lock])
        os.close(lock)
        theirs.close()
        # Unread, in the child's copy of the socket: still held.
        assert not locks.is_free(SID)
        os.kill(pid, signal.SIGKILL)
        assert exit_code(pid) == -signal.SIGKILL
        ours.close()
        assert until(lambda: locks.is_free(SID))


def test_a_lock_in_flight_to_nobody_is_free(locks: SessionLocks) -> None:
    ours, theirs = socket.socketpair()
    lock = locks.grant(SID)
    socket.send_fds(ours, [b"x"], [lock])
    os.close(lock)
    assert not locks.is_free(SID)
    theirs.close()
    assert until(lambda: locks.is_free(SID))
    ours.close()


def test_sessions_do_not_share_locks(locks: SessionLocks) -> None:
    sids = [0, 2, 2**63, 2**64 - 1, 12345678901234567890]
    held = {sid: locks.grant(sid) for sid in sids}
    for sid in sids:
        assert not locks.is_free(sid)
        os.close(held.pop(sid))
        assert locks.is_free(sid)
        assert all(not locks.is_free(other) for other in held)


def test_a_lock_is_granted_once(locks: SessionLocks) -> None:
    before = open_fds()
    lock = locks.grant(SID)
    with pytest.raises(UsageError, match="held already"):
        locks.grant(SID)
    assert open_fds() == before + 1
    os.close(lock)
    os.close(locks.grant(SID))


def test_what_cannot_be_told_is_suspect(locks: SessionLocks) -> None:
    own = os.pidfd_open(os.getpid())
    assert locks.probe(SID, -1) is Liveness.SUSPECT
    assert locks.probe(SID, 10_000) is Liveness.SUSPECT
    locks.close()
    locks.close()
    assert locks.probe(SID, own) is Liveness.SUSPECT
    os.close(own)


def test_a_lock_file_whose_name_was_removed_goes_on_working(locks: SessionLocks, tmp_path: Path) -> None:
    early = locks.grant(1)
    os.unlink(tmp_path / rundir.LOCKS)
    (tmp_path / rundir.LOCKS).touch()
    late = locks.grant(SID)
    assert not locks.is_free(1)
    assert not locks.is_free(SID)
    os.close(early)
    os.close(late)
    assert locks.is_free(1)
    assert locks.is_free(SID)


def test_only_a_pidfd_is_one(tmp_path: Path) -> None:
    own = os.pidfd_open(os.getpid())
    assert is_pidfd(own)
    assert not has_ended(own)
    os.close(own)
    file = os.open(tmp_path, os.O_RDONLY)
    assert not is_pidfd(file)
    os.close(file)
    assert not is_pidfd(file)
    with pytest.raises(OSError, match="pidfd"):
        has_ended(-1)
    with pytest.raises(OSError, match="pidfd"):
        has_ended(file)


# --- one owner (R25) --------------------------------------------------------------------------------


def test_a_second_server_is_refused_with_the_first_ones_name(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    owner = OwnerLock(run_dir)
    before = open_fds()
    with pytest.raises(OwnedError, match=rf"process {os.getpid()}.*--run-dir"):
        OwnerLock(run_dir)
    assert open_fds() == before

    def other() -> None:
        os.close(owner.fd)  # a copy of the lock would be the lock
        with pytest.raises(OwnedError, match=str(os.getppid())):
            OwnerLock(run_dir)

    with forked(other) as pid:
        assert exit_code(pid) == 0
    owner.release()


@pytest.mark.parametrize("full", ["open", "pwrite"])
def test_a_full_disk_leaves_no_directory_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = open_fds()
    run_dir = tmp_path / "new"
    with monkeypatch.context() as patched:
        patched.setattr(os, full, no_room)
        with pytest.raises(OSError, match="No space left"):
            OwnerLock(run_dir)
    assert not run_dir.exists()
    assert open_fds() == before
    OwnerLock(run_dir).release()


def test_a_killed_owner_gives_way_and_its_directory_is_removed_in_the_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ready_read, ready = os.pipe()

    def first() -> None:
        owner = OwnerLock(run_dir)
        (run_dir / rundir.ATTACH_SOCKET).touch()
        os.write(ready, b"x")
        signal.pause()
        owner.release()

    with forked(first) as pid:
        os.read(ready_read, 1)
        with pytest.raises(OwnedError, match=str(pid)):
            OwnerLock(run_dir)
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    owner = OwnerLock(run_dir)
    owner.release()
    assert not run_dir.exists()
    os.close(ready)
    os.close(ready_read)


def test_the_owner_lock_is_kept_by_a_process_that_inherits_it(tmp_path: Path) -> None:
    owner = OwnerLock(tmp_path / "run")
    with forked(lambda: signal.pause()):
        fd, owner.fd = owner.fd, -1
        os.close(fd)
        with pytest.raises(OwnedError):
            OwnerLock(tmp_path / "run")
    OwnerLock(tmp_path / "run").release()


def test_release_removes_what_is_the_servers_and_nothing_else(tmp_path: Path) -> None:
    made = tmp_path / "made"
    owner = OwnerLock(made)
    SessionLocks(made).close()
    owner.release()
    owner.release()
    assert not made.exists()

    found = tmp_path / "found"
    found.mkdir(mode=0o700)
    OwnerLock(found).release()
    assert list(found.iterdir()) == []

    owner = OwnerLock(made)
    (made / "note").touch()
    owner.release()
    assert [path.name for path in made.iterdir()] == ["note"]


def test_an_owner_file_that_is_removed_under_the_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A former owner unlinks its file after the next has opened it: it must not own a nameless file."""
    run_dir = tmp_path / "run"
    former = OwnerLock(run_dir)
    tries = []

    def late(fd: int, byte: int) -> bool:
        tries.append(fd)
        if len(tries) == 1:
            former.release()  # between the open and the lock
        return try_lock(fd, byte)

    monkeypatch.setattr("kvtier.shm.liveness.try_lock", late)
    owner = OwnerLock(run_dir)
    assert len(tries) == 2
    assert os.path.samestat(os.fstat(owner.fd), os.stat(run_dir / rundir.OWNER))
    with pytest.raises(OwnedError):
        OwnerLock(run_dir)
    owner.release()
    assert not run_dir.exists()
