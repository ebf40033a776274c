"""A client that loses its session while its sidecar lives comes back by itself (R2, R11, R20, R24)."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvtier.client import CacheClient, attacher
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
