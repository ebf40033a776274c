"""What an operator sees and does, on a real sidecar: sessions, flush, drain, and forcing a session out."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from kvtier.client import CacheClient
from kvtier.errors import KVTierError, Status
from kvtier.wire.messages import End, StoreChain
from tests.client.test_client import ALL, chain, epoch_of, load, store
from tests.server.operators import operator
from tests.server.sidecar import PAGE, Pair, Sidecar, until
from tests.server.test_death import Engine


class Operator:
    """Answers by name."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.conn = operator(sidecar.run_dir)

    def __getattr__(self, method: str) -> Any:
        return lambda *arguments: dict(getattr(self.conn.root, method)(*arguments))

    def many(self, method: str) -> list[dict[str, Any]]:
        return [dict(pairs) for pairs in getattr(self.conn.root, method)()]

    def sessions(self) -> dict[str, dict[str, Any]]:
        return {f"{one['group']} {one['role']}": one for one in self.many("sessions")}


@pytest.fixture
def sidecar(tmp_path):
    with Sidecar(tmp_path / "run") as running:
        yield running


@pytest.fixture
def control(sidecar):
    made = Operator(sidecar)
    yield made
    made.conn.close()


def begun(planner: CacheClient, pages: int = 4, seed: int = 0) -> int:
    """A store lease that runs."""
    keys = chain(pages, seed)
    number = planner.next_number()
    (grant,) = planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch_of(planner, keys))])
    assert (grant.status, grant.taken) == (Status.OK, pages)
    return number


# --- seeing ------------------------------------------------------------------------------------------


def test_nobody_is_there_before_the_first_attach(sidecar, control):
    assert control.many("sessions") == []
    assert control.many("namespaces") == []
    assert control.flush("all")["freed"] == 0
    assert control.stats()["sessions_attached"] == 0


def test_stats_are_those_of_the_engines_socket(sidecar, control):
    with Pair(sidecar):
        ours, theirs = control.stats(), sidecar.stats()
        differ = {name for name in theirs if ours[name] != theirs[name]}
        assert list(ours) == list(theirs)
        assert differ <= {"requests", "sweeps", "uptime_s"}


def test_sessions_say_who_and_what_each_holds(sidecar, control):
    with Pair(sidecar, group="one", writable=True) as pair:
        number = begun(pair.planner)
        seen = control.sessions()
        assert set(seen) == {"one planner", "one mover"}
        planner, mover = seen["one planner"], seen["one mover"]
        assert planner["session"] == f"{pair.planner.sid:016x}"
        assert (planner["leases"], planner["pages_held"], planner["bytes_held"]) == (1, 4, 4 * PAGE)
        assert (mover["leases"], mover["pages_held"], mover["rank"], mover["ranks"]) == (0, 0, 0, 1)
        for one in (planner, mover):
            assert (one["state"], one["process"], one["lock"]) == ("attached", "running", "held")
            assert one["pid"] == os.getpid()
            assert 0 <= one["age_s"] < 60
            assert one["frames_mapped"] == 256
        pair.planner.finish([End(number, ALL)])
        assert control.sessions()["one planner"]["leases"] == 0
    assert control.sessions() == {}


def test_a_dead_planner_is_shown_while_its_frames_wait_for_its_mover(sidecar, control):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        pair.planner.close(quiet=False)
        until(lambda: control.sessions()["g planner"]["state"] == "doubted", "not noticed")
        assert control.sessions()["g mover"]["state"] == "attached"


# --- flush -------------------------------------------------------------------------------------------


def test_flush_of_one_namespace_leaves_the_others(sidecar, control):
    """R13."""
    with Pair(sidecar, writable=True) as pair:
        one, other = chain(3, salt=b"1"), chain(5, salt=b"2")
        for keys in (one, other):
            store(pair.planner, keys, epoch_of(pair.planner, keys))
        listed = {found["namespace"]: found["pages"] for found in control.many("namespaces")}
        assert listed == {one.namespace.hex(): 3, other.namespace.hex(): 5}
        flushed = control.flush(one.namespace.hex())
        assert (flushed["ok"], flushed["freed"], flushed["doomed"]) == (1, 3, 0)
        assert pair.planner.lookup(one.namespace, one.keys).body.ready == 0
        grant = load(pair.planner, other)
        assert grant.ready == 5
        flushed = control.flush("all")
        assert (flushed["freed"], flushed["doomed"]) == (0, 5)
        pair.planner.finish([End(grant.number, ALL)])
        assert pair.planner.lookup(other.namespace, other.keys).body.ready == 0
        until(lambda: control.stats()["frames_free"] == 256, "the frames did not come back")


@pytest.mark.parametrize("namespace", ["", "ALL", "ab", "zz" * 16, "00" * 17, "all "])
def test_flush_of_what_is_no_namespace_is_refused(sidecar, control, namespace):
    with Pair(sidecar):
        answer = control.flush(namespace)
        assert answer["ok"] == 0
        assert "32 hex digits" in answer["text"]
        assert control.stats()["epoch"] == 1


# --- drain -------------------------------------------------------------------------------------------


def test_a_drain_lets_what_runs_end_and_then_the_sidecar_ends(sidecar, control):
    with Pair(sidecar, writable=True) as pair:
        number = begun(pair.planner)
        drained = control.drain(600)
        assert (drained["ok"], drained["draining"], drained["leases"], drained["sessions"]) == (1, 1, 1, 2)
        assert drained["ended"] == ""
        assert 590 < drained["seconds_left"] <= 600
        keys = chain(2, seed=9)
        refused = load(pair.planner, keys)
        assert (refused.status, refused.reason) == (Status.BUSY, "draining")
        with pytest.raises(KVTierError, match="draining"):
            sidecar.client(group="late")
        sweeps = control.stats()["sweeps"]
        until(lambda: control.stats()["sweeps"] > sweeps + 3, "no sweep came")
        assert control.progress()["ended"] == ""
        assert control.stats()["draining"] == 1
        (ended,) = pair.planner.finish([End(number, ALL)])
        assert (ended.status, ended.visible) == (Status.OK, 4)
        until(lambda: control.progress()["ended"] == "idle", "the drain did not end")
        assert control.progress()["leases"] == 0
        assert sidecar.process.wait(30) == 0
    assert not sidecar.run_dir.exists()


def test_a_drain_ends_at_its_deadline_and_says_what_was_running(sidecar, control):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        assert control.drain(0.2)["ended"] == ""
        until(lambda: control.progress()["ended"] == "deadline", "the deadline passed")
        assert control.progress()["leases"] == 1
        assert control.undrain()["ok"] == 0
        assert control.drain(60)["ended"] == "deadline"
        assert sidecar.process.wait(30) == 0


def test_a_drain_can_be_taken_back(sidecar, control):
    assert control.undrain()["ok"] == 0
    with Pair(sidecar, writable=True) as pair:
        number = begun(pair.planner)
        control.drain(600)
        taken_back = control.undrain()
        assert (taken_back["ok"], taken_back["draining"]) == (1, 0)
        begun(pair.planner, seed=1)
        pair.planner.finish([End(number, ALL), End(number + 1, ALL)])
        with Pair(sidecar, group="new"):
            pass
        assert control.stats()["draining"] == 0


def test_a_drain_without_engines_ends_at_once(sidecar, control):
    control.drain(600)
    assert sidecar.process.wait(30) == 0


def test_a_signal_ends_a_sidecar_that_drains_at_once(sidecar, control):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        control.drain(600)
        started = time.monotonic()
        assert sidecar.end(signal.SIGTERM) == 0
        assert time.monotonic() - started < 10


# --- forcing a session out ---------------------------------------------------------------------------


def test_a_session_that_lives_cannot_be_forced_out(sidecar, control):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        answer = control.force_out(control.sessions()["g planner"]["session"], True)
        assert answer["ok"] == 0
        assert "lives" in answer["text"]
        assert control.stats()["frames_writing"] == 4


@pytest.mark.parametrize("session", ["", "0", "0" * 16, "x" * 16, "00" * 8, "ab" * 8])
def test_an_unknown_session_cannot_be_forced_out(sidecar, control, session):
    assert control.force_out(session, True)["ok"] == 0


def test_a_doubted_session_is_forced_out_only_with_a_yes(sidecar, control):
    """Against R20, by hand: the engine left without being quiet, and its process lives on."""
    with Engine(sidecar.run_dir, "planner.close(quiet=False); pair.mover.close(quiet=False)"):
        until(lambda: [one["state"] for one in control.sessions().values()] == ["doubted"] * 2, "not noticed")
        seen = control.sessions()
        assert seen["engine planner"]["process"] == "running"
        for one in seen.values():
            warned = control.force_out(one["session"], False)
            assert warned["ok"] == 0
            assert "wrong KV" in warned["text"]
        assert control.stats()["frames_writing"] == 4
        out = control.force_out(seen["engine planner"]["session"], True)
        assert (out["ok"], out["leases"], out["pages_held"]) == (1, 1, 4)
        # Its mover may still be writing into them.
        left = control.sessions()
        assert left["engine planner"]["state"] == "dead"
        assert control.stats()["frames_quarantined"] == 4
        assert control.force_out(seen["engine mover"]["session"], True)["ok"] == 1
        assert control.sessions() == {}
        stats = control.stats()
        assert (stats["frames_free"], stats["forced_out"], stats["leases"]) == (256, 2, 0)
        with Pair(sidecar, group="engine", writable=True) as pair:
            begun(pair.planner)


def test_a_child_that_keeps_the_lock_of_a_dead_engine_is_shown(sidecar, control, tmp_path):
    """R21: the process has ended, its lock is held."""
    flag = tmp_path / "end"
    then = f"""
if os.fork() == 0:
    os.close(0); os.close(1)
    while not Path({str(flag)!r}).exists():
        time.sleep(0.01)
    os._exit(0)
"""
    with Engine(sidecar.run_dir, then) as engine:
        engine.kill()
        until(lambda: control.sessions()["engine planner"]["state"] == "doubted", "not noticed")
        seen = control.sessions()["engine planner"]
        assert (seen["process"], seen["lock"]) == ("ended", "held")
        flag.touch()
        until(lambda: control.sessions() == {}, "the death was not noticed")


# --- not in the way ----------------------------------------------------------------------------------


def test_an_absent_admin_socket_disturbs_nothing(sidecar):
    (sidecar.run_dir / "admin.sock").unlink()
    with Pair(sidecar) as pair:
        assert pair.planner.lookup(b"n" * 16, b"").status == Status.OK
    assert sidecar.end() == 0
