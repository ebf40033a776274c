"""Engines store, load, are killed, stopped and replaced, in a pool that evicts all the time.

Each page's bytes are a function of its key, and each page that is loaded is compared. `KVTIER_SOAK_S` says
for how many seconds (default 8 for each of the two).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.faults.nursery import Nursery
from tests.server.sidecar import Sidecar, until

SOAK_S = float(os.environ.get("KVTIER_SOAK_S", "8"))
SEED = int(os.environ.get("KVTIER_SOAK_SEED", "1"))
ENGINES = 4
GROWTH_KIB = 4096
"""How much a server may grow after its first third: less than one turn of its tables would leak."""

IMPATIENT = """
import sys
from kvtier.cli import serve
from kvtier.server import server
serve.Server = lambda run_dir, size: server.Server(run_dir, size, patience_s=0.3)
from pathlib import Path
serve.serve(sys.argv[1], Path(sys.argv[2]), True)
"""


class ImpatientSidecar(Sidecar):
    """Takes the pages of a writer that hangs over after 0.3 s (R8)."""

    def _command(self) -> list[str]:
        return [sys.executable, "-c", IMPATIENT, self.size, str(self.run_dir)]


def private_kib(process: subprocess.Popen[str]) -> int:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


class Soak:
    """Some engines at a time, and what happens to them."""

    def __init__(self, nursery: Nursery, seed: int) -> None:
        self.nursery = nursery
        self.random = random.Random(seed)
        self.living: list[int] = []
        self.stopped: dict[int, float] = {}
        self.done = dict.fromkeys(("killed", "stopped", "killed while stopped", "ended", "born"), 0)

    def happen(self) -> None:
        """One thing, and then there are enough engines again."""
        what = self.random.choice(("kill", "stop", "stop", "end", "nothing"))
        alive = [pid for pid in self.living if pid not in self.stopped]
        if alive and what == "kill":
            self._leave(self.random.choice(alive), signal.SIGKILL, "killed")
        elif alive and what == "end":
            self._leave(self.random.choice(alive), signal.SIGTERM, "ended")
        elif len(alive) > 1 and what == "stop":
            pid = self.random.choice(alive)
            self.nursery.send(pid, signal.SIGSTOP)
            self.stopped[pid] = time.monotonic() + self.random.choice((0.05, 0.5, 1.5))
            self.done["stopped"] += 1
        for pid, until_s in list(self.stopped.items()):
            if time.monotonic() >= until_s:
                self.go_on(pid, self.random.random() < 0.4)
        while len(self.living) < ENGINES:
            self.living.append(self.nursery.born(self.random.getrandbits(32)))
            self.done["born"] += 1

    def go_on(self, pid: int, dies: bool = False) -> None:
        del self.stopped[pid]
        if dies:
            self._leave(pid, signal.SIGKILL, "killed while stopped")
        else:
            self.nursery.send(pid, signal.SIGCONT)

    def _leave(self, pid: int, number: int, how: str) -> None:
        self.nursery.send(pid, number)
        self.living.remove(pid)
        self.done[how] += 1

    def end(self) -> None:
        """All end, some in order, some not."""
        for pid in list(self.stopped):
            self.go_on(pid)
        for at, pid in enumerate(list(self.living)):
            self._leave(pid, (signal.SIGTERM, signal.SIGKILL)[at % 2], "ended")
            assert self.nursery.ended(pid, 20), f"engine {at} does not end"


def nobody_holds_anything(sidecar: Sidecar) -> bool:
    now = sidecar.stats()
    held = ("sessions", "sessions_attached", "leases", "frames_held", "frames_writing", "frames_doomed")
    return not any(now[name] for name in (*held, "frames_quarantined", "frames_clearing"))


def told(nursery: Nursery, soak: Soak, sidecar: Sidecar) -> None:
    """What came of it; shown by `pytest -s`, or when a test fails."""
    stats = sidecar.stats()
    print(dict(nursery.counts()), soak.done, {name: stats[name] for name in sorted(stats)}, sep="\n")


def test_engines_come_and_go_and_no_byte_is_ever_wrong(tmp_path):
    """P4, P10, R5 to R13, R20: no wrong byte, no frame, lease or session left, no growth."""
    with ImpatientSidecar(tmp_path / "run", "1MiB") as sidecar, Nursery(sidecar.run_dir, tmp_path) as nursery:
        soak = Soak(nursery, SEED)
        begun, grown_from = time.monotonic(), 0
        while time.monotonic() - begun < SOAK_S and not nursery.wrong():
            soak.happen()
            time.sleep(soak.random.uniform(0, 0.3))
            if not grown_from and time.monotonic() - begun > SOAK_S / 3:
                grown_from = private_kib(sidecar.process)
        soak.end()
        assert sidecar.process.poll() is None, "the sidecar has died"
        told(nursery, soak, sidecar)
        assert nursery.wrong() == []
        until(lambda: nobody_holds_anything(sidecar), f"something is left: {sidecar.stats()}")
        stats, counts = sidecar.stats(), nursery.counts()
        assert stats["frames_free"] + stats["frames_ready"] == stats["frames_total"] == 256
        assert stats["internal_errors"] == stats["bad_requests"] == counts["protocol_violations"] == 0
        assert stats["evicted"] > 1000
        assert counts["pages_compared"] > 100
        assert private_kib(sidecar.process) - grown_from < GROWTH_KIB


def test_the_sidecar_too_is_killed_and_started_again(tmp_path):
    """R24, P13: engines go on without it, come back by themselves, and never load a byte of another pool."""
    with ImpatientSidecar(tmp_path / "run", "1MiB") as sidecar, Nursery(sidecar.run_dir, tmp_path) as nursery:
        soak = Soak(nursery, SEED + 1)
        begun = time.monotonic()
        dies_at, kills = begun + 1.5, 0
        while time.monotonic() - begun < SOAK_S and not nursery.wrong():
            soak.happen()
            time.sleep(soak.random.uniform(0, 0.3))
            if time.monotonic() > dies_at:
                sidecar.kill()
                time.sleep(soak.random.choice((0, 0.3)))
                sidecar.again()
                kills += 1
                dies_at = time.monotonic() + soak.random.uniform(0.5, 2.5)
        survivors = [pid for pid in soak.living if pid not in soak.stopped]
        assert not any(nursery.ended(pid) for pid in survivors), "an engine has died"
        until(lambda: sidecar.stats().get("hits", 0) > 0, "nothing is hit again")
        soak.end()
        told(nursery, soak, sidecar)
        assert nursery.wrong() == []
        assert kills > 1
        counts = nursery.counts()
        assert counts["protocol_violations"] == 0
        assert counts["attachments_lost"] > kills // 2
        assert counts["pages_compared"] > 50
        until(lambda: nobody_holds_anything(sidecar), f"something is left: {sidecar.stats()}")
