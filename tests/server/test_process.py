"""The sidecar as a process: small, the only one, and gone in bounded time with nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvtier.errors import OwnedError
from kvtier.server.server import Server
from tests.server.sidecar import Pair, Sidecar, layout, until


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_in_bounded_time_and_nothing_is_left(tmp_path, number):
    run_dir = tmp_path / "run"
    with Sidecar(run_dir) as sidecar:
        memfds = memfds_of(sidecar.process.pid)
        with Pair(sidecar) as pair:
            pair.planner.lookup(b"n" * 16, b"")
            assert memfds_of(sidecar.process.pid) > memfds
            started = time.monotonic()
            assert sidecar.end(number) == 0
            assert time.monotonic() - started < 10
    assert not run_dir.exists()


def test_nohup_keeps_it_when_its_terminal_goes(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what is ignored is so in a child too
    try:
        sidecar = Sidecar(tmp_path / "run")
    finally:
        signal.signal(signal.SIGHUP, before)
    with sidecar:
        sidecar.send(signal.SIGHUP)
        with Pair(sidecar) as pair:
            assert pair.planner.lookup(b"n" * 16, b"").status == 0


STUCK = """
import sys, time
from pathlib import Path
from kvtier.cli.serve import serve
from kvtier.server.server import Server

def stuck(self):
    print("ending", flush=True)
    time.sleep(600)

Server.close = stuck
serve("16MiB", Path(sys.argv[1]), True)
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_it_at_once_and_the_next_one_starts(tmp_path, second):
    """Also when its end, which the first one began, does not come."""
    run_dir = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", STUCK, str(run_dir)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("kvtier")
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ending\n"
        process.send_signal(second)
        assert process.wait(30) == -second
    finally:
        process.kill()
        process.communicate(timeout=30)
    with Sidecar(run_dir) as sidecar, Pair(sidecar) as pair:
        assert pair.planner.lookup(b"n" * 16, b"").status == 0
    assert not run_dir.exists()


def memfds_of(pid: int) -> int:
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "memfd:" in os.readlink(entry)
        except FileNotFoundError:
            continue
    return found


def test_its_children_end_with_it_however_it_ends(tmp_path):
    """R29: the child that reserves the pool."""
    with Sidecar(tmp_path / "run", size="512MiB") as sidecar:
        client = sidecar.client()
        children = children_of(sidecar.process.pid)
        sidecar.kill()
        until(lambda: not any(alive(child) for child in children), "a child of the sidecar lives on")
        client.close()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_directory_that_was_there_stays_but_its_sockets_go(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    with Sidecar(run_dir) as sidecar:
        assert {"attach.sock", "data.sock"} <= {entry.name for entry in run_dir.iterdir()}
        assert all(entry.stat().st_mode & 0o077 == 0 for entry in run_dir.iterdir())
        sidecar.end()
    assert list(run_dir.iterdir()) == []


def test_a_second_server_is_refused_and_the_first_serves_on(tmp_path):
    """R25, P7."""
    run_dir = tmp_path / "run"
    with Sidecar(run_dir) as sidecar, Pair(sidecar) as pair:
        second = subprocess.run(
            [sys.executable, "-m", "kvtier.cli.main", "serve", "--size", "16MiB", "--run-dir", str(run_dir)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert second.returncode == 2
        assert str(sidecar.process.pid) in second.stderr
        assert "Traceback" not in second.stderr
        assert pair.planner.lookup(b"n" * 16, b"").status == 0
        with pytest.raises(OwnedError):
            Server(run_dir, 16 << 20)
        assert pair.planner.lookup(b"n" * 16, b"").status == 0


def test_a_killed_servers_leftovers_do_not_stop_the_next(tmp_path):
    with Sidecar(tmp_path / "run") as sidecar:
        sidecar.kill()
        assert (tmp_path / "run" / "attach.sock").exists()
        sidecar.again()
        with Pair(sidecar) as pair:
            assert pair.planner.lookup(b"n" * 16, b"").status == 0
    assert not (tmp_path / "run").exists()


def test_a_pool_that_does_not_fit_is_refused_at_once_with_a_remedy(tmp_path):
    asked = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvtier.cli.main",
            "serve",
            "--size",
            "900TiB",
            "--run-dir",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 2
    assert re.search(r"needed .* available .*--size", asked.stderr, re.DOTALL), asked.stderr
    assert not (tmp_path / "run").exists()


def test_a_pool_smaller_than_a_page_is_refused_at_attach_and_the_server_lives(tmp_path):
    """Zero pages is an error, not a cache that never hits."""
    with Sidecar(tmp_path / "run", size="1MiB") as sidecar:
        client = sidecar_client(sidecar, layout(pages_per_mib=1, page_tokens=64), shards=4)
        try:
            assert not client.attached
            assert client.refused is not None
            assert "holds no page" in str(client.refused)
        finally:
            client.close()
        assert sidecar.stats()["refused_attaches"] >= 1
        assert sidecar.stats()["formats"] == 0
        with Pair(sidecar) as pair:
            assert pair.planner.complete


def sidecar_client(sidecar: Sidecar, base, shards: int):
    from kvtier.client import CacheClient
    from kvtier.layout import KVLayout

    wide = KVLayout(base.page_tokens, base.shards * shards, base.format)
    return CacheClient(sidecar.run_dir, layout=wide, group="wide")


def test_nobody_of_it_imports_torch():
    """No CUDA context, no seconds of start: neither server, client, wire and core, nor the command. And no
    rpyc before an operator comes."""
    code = (
        "import sys, kvtier.server.server, kvtier.client, kvtier.cli.main, kvtier.cli.serve;"
        "sys.exit(any(name.split('.')[0] in ('torch', 'rich', 'rpyc') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_it_stays_small(tmp_path):
    """Under 60 MB of private memory with a pool of 1 GiB; 380 MB is what users have today."""
    with Sidecar(tmp_path / "run", size="1GiB") as sidecar:
        client = sidecar.client(layout=layout(pages_per_mib=1))
        try:
            until(lambda: sidecar.stats()["reserving"] == 0, "the pool was not reserved", timeout_s=60)
            text = Path(f"/proc/{sidecar.process.pid}/smaps_rollup").read_text()
            private = sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))
            assert private * 1024 < 60e6
        finally:
            client.close()
