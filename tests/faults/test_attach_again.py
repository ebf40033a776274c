"""A client that loses its session while its sidecar lives comes back by itself (R2, R11, R20, R24)."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
import time

import pytest
import zmq

from kvtier.client import CacheClient, attacher
from kvtier.shm.attach import AttachRequest, connect
from kvtier.shm.region import Pool, PoolShape
from tests.server.sidecar import Sidecar, layout, until


@pytest.fixture
def sidecar(tmp_path):
    with Sidecar(tmp_path / "run") as running:
        yield running


def client_of(sidecar, role) -> CacheClient:
    return CacheClient(sidecar.run_dir, layout=layout(), group="g", role=role, attach_timeout_s=0.1)


@pytest.mark.parametrize("roles", [("planner", "mover"), ("mover", "planner")])
def test_a_sidecar_that_stands_still_during_hello_is_attached_to_when_it_goes_on(sidecar, monkeypatch, roles):
    """The hello is read after the client has given up: that must not keep its place in the group."""
    connect, stopped = attacher.connect, []

    def stands_still_after_attach(*args, **kwargs):
        found = connect(*args, **kwargs)
        if not stopped:
            stopped.append(True)
            time.sleep(0.1)
            sidecar.send(signal.SIGSTOP)
            threading.Timer(1.0, sidecar.send, [signal.SIGCONT]).start()
        return found

    monkeypatch.setattr(attacher, "connect", stands_still_after_attach)
    clients = [client_of(sidecar, role) for role in roles]
    for client in clients:
        until(lambda client=client: (client.poll(), client.attached)[1], f"never: {client.refused}", 10)
    assert stopped
    assert sidecar.stats()["sessions"] == 2
    for client in clients:
        client.close()


def test_attempts_that_fail_half_way_leave_nothing_open(sidecar, monkeypatch):
    """An engine without descriptors tries again and again: each attempt closes all that it got."""
    real, failed = zmq.Context.socket, []

    def no_socket(self, *args, **kwargs):
        if len(failed) < 4:
            failed.append(len(os.listdir("/proc/self/fd")))
            raise zmq.ZMQError(errno.EMFILE)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(zmq.Context, "socket", no_socket)
    with client_of(sidecar, "planner") as client:
        until(lambda: (client.poll(), client.attached)[1], f"never: {client.refused}", 15)
        assert len(failed) == 4
        assert max(failed) == failed[0], "descriptors stay open"


def test_engines_with_many_open_files_attach_and_map(sidecar):
    """select() cannot do that: its descriptors end at 1,023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("no room for 1,100 descriptors on this host")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        request = AttachRequest("many", "mover", 0, 1, layout().geometry, bytes(32))
        attachment = connect(sidecar.run_dir, request, timeout_s=10)
        assert attachment.fileno() > 1023
        assert attachment.wait_chunks(attachment.tables.shape.frames, 10)
        attachment.close()
        pool = Pool(PoolShape((16, 4096), 16, 16))
        until(lambda: pool.step() or pool.finished, "the pool was not reserved")
        assert pool.frames == 16
        pool.close()
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
