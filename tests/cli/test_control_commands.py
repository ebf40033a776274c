"""`kvtier sessions`, `flush`, `drain` and `stats`: what they print, and exit statuses that mean something.

0 done, 1 refused or failed, 2 wrong usage, 3 no sidecar.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from kvtier.cli import control
from kvtier.cli.sessions import sessions
from kvtier.wire.messages import End
from tests.client.test_client import ALL, chain, epoch_of, store
from tests.server.operators import operator
from tests.server.sidecar import Pair, Sidecar, until
from tests.server.test_control import begun
from tests.server.test_death import Engine


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "kvtier.cli.main", *map(str, arguments)]


def kvtier(sidecar: Sidecar, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments, "--run-dir", sidecar.run_dir),
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200"},
    )


@pytest.fixture
def sidecar(tmp_path):
    with Sidecar(tmp_path / "run") as running:
        yield running


@pytest.fixture(scope="module")
def lasting(tmp_path_factory):
    """For tests after which it is as before."""
    with Sidecar(tmp_path_factory.mktemp("c") / "run") as running:
        yield running


@pytest.mark.parametrize(
    "arguments",
    [["sessions"], ["flush", "--all"], ["flush", "--list"], ["drain"], ["drain", "--undo"], ["stats"]],
)
def test_without_a_sidecar_it_is_status_3_and_one_line(tmp_path, arguments):
    asked = subprocess.run(
        command(*arguments, "--run-dir", tmp_path / "none"), capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 3
    assert asked.stdout == ""
    assert asked.stderr.count("\n") == 1
    assert str(tmp_path / "none") in asked.stderr
    assert not (tmp_path / "none").exists()


def test_after_a_kill_it_is_status_3_too(sidecar):
    sidecar.kill()
    assert (sidecar.run_dir / "admin.sock").exists()
    for arguments in (["drain"], ["stats"]):
        asked = kvtier(sidecar, *arguments)
        assert (asked.returncode, asked.stdout) == (3, "")
        assert "Traceback" not in asked.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["flush"],
        ["flush", "--all", "--list"],
        ["flush", "--all", "--namespace", "00" * 16],
        ["sessions", "--yes"],
        ["drain", "--timeout", "-1"],
        ["drain", "--timeout", "soon"],
    ],
)
def test_wrong_usage_is_status_2_and_changes_nothing(lasting, arguments):
    asked = kvtier(lasting, *arguments)
    assert asked.returncode == 2
    assert "Traceback" not in asked.stderr
    assert lasting.stats()["draining"] == 0


def test_sessions_as_a_table_and_as_json(sidecar):
    nobody = kvtier(sidecar, "sessions")
    assert (nobody.returncode, "nobody is attached" in nobody.stdout) == (0, True)
    assert json.loads(kvtier(sidecar, "sessions", "--json").stdout) == []
    with Pair(sidecar, group="my-engine", writable=True) as pair:
        begun(pair.planner)
        table = kvtier(sidecar, "sessions")
        assert table.returncode == 0
        for word in ("my-engine", "planner", "mover 0 of 1", "attached", str(os.getpid()), "256 KiB"):
            assert word in table.stdout
        found = json.loads(kvtier(sidecar, "sessions", "--json").stdout)
        assert [one["role"] for one in found] == ["mover", "planner"]
        assert found[1]["bytes_held"] == 4 * 65536


def test_forcing_out_says_what_it_means_and_wants_a_yes(sidecar):
    with Engine(sidecar.run_dir, "planner.close(quiet=False)"):
        until(lambda: sidecar.stats()["sessions_doubted"] == 1, "not noticed")
        found = json.loads(kvtier(sidecar, "sessions", "--json").stdout)
        (doubted,) = [one["session"] for one in found if one["state"] == "doubted"]
        (living,) = [one["session"] for one in found if one["state"] == "attached"]
        warned = kvtier(sidecar, "sessions", "--force-out", doubted)
        assert (warned.returncode, warned.stdout) == (1, "")
        assert "wrong KV" in warned.stderr
        assert "--yes" in warned.stderr
        refused = kvtier(sidecar, "sessions", "--force-out", living, "--yes")
        assert refused.returncode == 1
        assert "lives" in refused.stderr
        assert sidecar.stats()["forced_out"] == 0
        done = kvtier(sidecar, "sessions", "--force-out", doubted, "--yes")
        assert done.returncode == 0
        assert doubted in done.stdout
        assert sidecar.stats()["forced_out"] == 1


def test_flush_counts_what_went(sidecar):
    with Pair(sidecar, writable=True) as pair:
        keys, more = chain(3, salt=b"1"), chain(2, salt=b"2")
        for one in (keys, more):
            store(pair.planner, one, epoch_of(pair.planner, one))
        listed = kvtier(sidecar, "flush", "--list")
        assert listed.stdout == f"{keys.namespace.hex()}  3 pages\n{more.namespace.hex()}  2 pages\n"
        one = kvtier(sidecar, "flush", "--namespace", keys.namespace.hex(), "--json")
        assert (one.returncode, json.loads(one.stdout)) == (0, {"freed": 3, "doomed": 0, "epoch": 2})
        number = begun(pair.planner, seed=5)
        everything = kvtier(sidecar, "flush", "--all")
        assert everything.returncode == 0
        assert everything.stdout.startswith("2 pages forgotten\n4 more are in use")
        pair.planner.finish([End(number, ALL)])
        wrong = kvtier(sidecar, "flush", "--namespace", "my-model")
        assert wrong.returncode == 1
        assert "32 hex digits" in wrong.stderr


def test_drain_waits_until_the_sidecar_has_ended(sidecar):
    with Pair(sidecar, writable=True) as pair:
        number = begun(pair.planner)
        draining = subprocess.Popen(
            command("drain", "--run-dir", sidecar.run_dir),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert draining.stderr is not None
        assert draining.stderr.readline().startswith("draining: 1 lease running")
        pair.planner.finish([End(number, ALL)])
        shown, _ = draining.communicate(timeout=60)
        assert (draining.returncode, "nothing was running" in shown) == (0, True)
        assert sidecar.process.wait(30) == 0
        assert not sidecar.run_dir.exists()


def test_drain_at_its_deadline_is_status_1(sidecar):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        drained = kvtier(sidecar, "drain", "--timeout", "0.3", "--json")
        assert drained.returncode == 1
        seen = json.loads(drained.stdout)
        assert (seen["ended"], seen["leases"]) == ("deadline", 1)
        assert "1 lease running" in drained.stderr
        assert sidecar.process.wait(30) == 0


def test_drain_can_be_left_alone_and_taken_back(sidecar):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        started = kvtier(sidecar, "drain", "--no-wait")
        assert (started.returncode, started.stdout[:27]) == (0, "draining: 1 lease running, ")
        assert sidecar.stats()["draining"] == 1
        undone = kvtier(sidecar, "drain", "--undo")
        assert (undone.returncode, undone.stdout) == (0, "serving as before\n")
        assert sidecar.stats()["draining"] == 0
        again = kvtier(sidecar, "drain", "--undo")
        assert again.returncode == 1
        assert "not draining" in again.stderr


@pytest.mark.parametrize(("how", "status"), [("undrain", 1), ("kill", 1), ("signal", 1), ("interrupt", 130)])
def test_a_drain_that_ends_otherwise_says_so(sidecar, how, status):
    with Pair(sidecar, writable=True) as pair:
        begun(pair.planner)
        draining = subprocess.Popen(
            command("drain", "--run-dir", sidecar.run_dir), stderr=subprocess.PIPE, text=True
        )
        assert draining.stderr is not None
        assert draining.stderr.readline().startswith("draining")
        if how == "undrain":
            conn = operator(sidecar.run_dir)
            assert dict(conn.root.undrain())["ok"] == 1
            conn.close()
        elif how == "interrupt":
            draining.send_signal(signal.SIGINT)
        else:
            sidecar.send(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        _, said = draining.communicate(timeout=60)
        assert draining.returncode == status
        assert "Traceback" not in said
        assert {"undrain": "taken back", "interrupt": "goes on without you"}.get(how, "ended before") in said


def test_stats_ask_the_engines_socket_where_there_is_no_control(sidecar):
    (sidecar.run_dir / "admin.sock").unlink()
    asked = kvtier(sidecar, "stats", "--json")
    assert asked.returncode == 0
    assert json.loads(asked.stdout)["draining"] == 0


def test_a_sidecar_that_stands_still_is_status_1(lasting, monkeypatch, capsys):
    monkeypatch.setattr(control, "TIMEOUT_S", 0.3)
    lasting.send(signal.SIGSTOP)
    try:
        with pytest.raises(SystemExit) as ended:
            sessions(lasting.run_dir, as_json=True)
    finally:
        lasting.send(signal.SIGCONT)
    assert ended.value.code == 1
    assert "did not answer within 0.3 s" in capsys.readouterr().err


def test_what_is_no_sidecar_is_status_1(tmp_path):
    import socket

    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run_dir / "admin.sock"))
        listener.listen()
        asking = subprocess.Popen(
            command("sessions", "--run-dir", run_dir), stderr=subprocess.PIPE, text=True
        )
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            _, said = asking.communicate(timeout=60)
    assert asking.returncode == 1
    assert "is no sidecar" in said
