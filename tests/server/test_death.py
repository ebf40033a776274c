"""Clients that die, leave, or seem to: R11, R19 to R21, seen from outside of the server."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.client import CacheClient
from kvtier.errors import Status
from kvtier.shm.attach import AttachRequest, connect
from kvtier.wire.messages import End, Op, StoreChain
from tests.client.test_client import ALL, chain, epoch_of
from tests.server.sidecar import Pair, Sidecar, layout, until
from tests.server.test_data_socket import Peer, raw

ROOT = Path(__file__).resolve().parents[2]

ENGINE = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.server.sidecar import Pair
from tests.client.test_client import chain, epoch_of
from kvtier.wire.messages import StoreChain

class At:
    run_dir = Path({run_dir!r})
    from tests.server.sidecar import Sidecar
    client = Sidecar.client

pair = Pair(At(), group="engine", writable=True)
keys = chain(4, seed=77)
planner = pair.planner
number = planner.next_number()
(grant,) = planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))])
assert grant.taken == 4, grant
{then}
print("ready", os.getpid(), flush=True)
sys.stdin.readline()
"""


class Engine:
    """A process with a planner and a mover that holds a store lease on 4 frames, and then does `then`."""

    def __init__(self, run_dir: Path, then: str = "") -> None:
        code = ENGINE.format(root=str(ROOT), run_dir=str(run_dir), then=then)
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0]
        words = self.process.stdout.readline().split()
        assert words[:1] == ["ready"], words
        self.words = words

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


@pytest.fixture
def sidecar(tmp_path):
    with Sidecar(tmp_path / "run") as running:
        yield running


def test_a_killed_engines_frames_come_back(sidecar):
    """P4: what it was writing is never seen."""
    with Engine(sidecar.run_dir) as engine, Pair(sidecar) as pair:
        before = sidecar.stats()
        assert (before["frames_writing"], before["sessions"]) == (4, 4)
        engine.kill()
        until(lambda: sidecar.stats()["sessions"] == 2, "the death was not noticed")
        after = sidecar.stats()
        assert after["frames_writing"] == after["frames_quarantined"] == after["leases"] == 0
        assert after["frames_free"] == before["frames_free"] + 4
        assert after["deaths"] == 2
        keys = chain(4, seed=77)
        body = pair.planner.lookup(keys.namespace, keys.keys).body
        assert (body.ready, body.pending) == (0, 0)


def test_a_forked_child_keeps_the_session_alive(sidecar):
    """R21: the child might still touch the pool, so nothing is freed until it has ended too."""
    then = """
if os.fork() == 0:
    os.close(0); os.close(1)
    while os.getppid() > 1 and not Path({flag!r}).exists():
        time.sleep(0.01)
    while not Path({flag!r}).exists():
        time.sleep(0.01)
    os._exit(0)
"""
    flag = sidecar.run_dir.parent / "end"
    with Engine(sidecar.run_dir, then.format(flag=str(flag))) as engine:
        engine.kill()
        until(lambda: sidecar.stats()["sessions_doubted"] == 2, "the end of the connection was not noticed")
        # Several sweeps later the child still holds the locks.
        requests = sidecar.stats()["sweeps"]
        until(lambda: sidecar.stats()["sweeps"] > requests + 5, "no sweep came")
        held = sidecar.stats()
        assert (held["sessions"], held["frames_writing"], held["deaths"]) == (2, 4, 0)
        flag.touch()
        until(lambda: sidecar.stats()["sessions"] == 0, "the death was not noticed")
        assert sidecar.stats()["frames_writing"] == 0


def test_leaving_without_being_quiet_leaves_the_frames_to_the_proof_of_death(sidecar):
    """R11."""
    with Engine(sidecar.run_dir, "planner.close(quiet=False)") as engine:
        requests = sidecar.stats()["sweeps"]
        until(lambda: sidecar.stats()["sweeps"] > requests + 5, "no sweep came")
        held = sidecar.stats()
        assert (held["sessions"], held["frames_writing"]) == (2, 4)
        engine.kill()
        until(lambda: sidecar.stats()["sessions"] == 0, "the death was not noticed")
        assert sidecar.stats()["frames_writing"] == 0


def test_leaving_when_quiet_gives_the_frames_back_at_once(sidecar):
    """R11."""
    with Engine(sidecar.run_dir, "planner.close(quiet=True)"):
        left = sidecar.stats()
        assert (left["sessions"], left["frames_writing"], left["leases"]) == (1, 0, 0)


def test_a_stopped_engine_is_not_dead(sidecar):
    """No timer frees anything."""
    with Engine(sidecar.run_dir) as engine:
        os.kill(engine.process.pid, signal.SIGSTOP)
        sweeps = sidecar.stats()["sweeps"]
        until(lambda: sidecar.stats()["sweeps"] > sweeps + 1, "no sweep came")
        assert sidecar.stats()["frames_writing"] == 4
        assert sidecar.stats()["sessions_doubted"] == 0
        os.kill(engine.process.pid, signal.SIGCONT)


def test_a_dead_movers_planner_gets_no_new_lease(sidecar):
    """A page needs all ranks; its frames stay while the other mover may still write them (R9)."""
    with Pair(sidecar) as pair:
        keys, planner = chain(2), pair.planner
        epoch = epoch_of(planner, keys)
        pair.mover.close()
        (grant,) = planner.begin_store([StoreChain(planner.next_number(), keys.namespace, keys.keys, epoch)])
        assert grant.status == Status.BUSY
        assert planner.finish([End(99, ALL)])[0].status in (Status.BAD, Status.DONE)


def test_a_mover_in_doubt_stops_new_leases_and_frees_nothing(sidecar):
    """R20: its connection has ended and its lock is free, but its process lives: suspect, not dead."""
    shape = layout()
    request = AttachRequest("doubt", "mover", 0, 1, shape.geometry, shape.fingerprint)
    mover = connect(sidecar.run_dir, request, timeout_s=10)
    planner = sidecar.client(group="doubt")
    try:
        with Peer(sidecar) as peer:
            assert peer.ask(raw(Op.HELLO, gen=mover.server_gen, sid=mover.sid)).status == Status.OK
        frames = mover.pool.shape.frames
        assert mover.wait_chunks(frames, 20)
        until(lambda: planner.poll() == [] and planner.pool.frames == frames, "the pool was not mapped")
        keys = chain(2)
        epoch = epoch_of(planner, keys)
        number = planner.next_number()
        (grant,) = planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch)])
        assert grant.status == Status.OK
        mover.close()
        until(lambda: sidecar.stats()["sessions_doubted"] == 1, "the end of the connection was not noticed")
        more = chain(2, seed=1)
        (grant,) = planner.begin_store([StoreChain(planner.next_number(), more.namespace, more.keys, epoch)])
        assert (grant.status, grant.reason) == (Status.BUSY, "suspect")
        assert sidecar.stats()["frames_writing"] == 2
        assert sidecar.stats()["deaths"] == 0
    finally:
        planner.close()


def test_a_restarted_engine_is_a_new_group_and_its_id_is_free_when_the_old_one_is_dead(sidecar):
    """R2."""
    with Engine(sidecar.run_dir) as engine:
        with CacheClient(sidecar.run_dir, layout=layout(), group="engine") as early:
            assert not early.attached
            assert "complete" in str(early.refused)
        engine.kill()
        until(lambda: sidecar.stats()["sessions"] == 0, "the death was not noticed")
        with Pair(sidecar, group="engine") as pair:
            assert pair.planner.complete
