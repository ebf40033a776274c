"""The engines of a soak, from the outside: a nursery process, and what its children have counted."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Nursery:
    """Engines that can be killed, stopped and replaced; none outlives the block."""

    def __init__(self, run_dir: Path, out: Path) -> None:
        self.out = out
        self._pidfds: dict[int, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.soak_engine", str(run_dir), str(out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )

    def born(self, seed: int | str) -> int:
        """A new engine's process id; or, by the name of a step, a victim's."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        assert select.select([self._process.stdout], [], [], 60)[0], "the nursery does not answer"
        pid = int(self._process.stdout.readline())
        self._pidfds[pid] = os.pidfd_open(pid)
        return pid

    def send(self, pid: int, number: int) -> None:
        signal.pidfd_send_signal(self._pidfds[pid], number)

    def ended(self, pid: int, timeout_s: float = 0.0) -> bool:
        """Has it ended, or does it in time?"""
        return bool(select.select([self._pidfds[pid]], [], [], timeout_s)[0])

    def counts(self) -> Counter[str]:
        """What all engines, dead ones too, have counted."""
        total: Counter[str] = Counter()
        for file in self.out.glob("*.json"):
            text = file.read_text()
            total.update(json.loads(text) if text else {})
        return total

    def wrong(self) -> list[str]:
        """What engines say of wrong bytes, or of exceptions."""
        return [file.read_text() for file in self.out.glob("wrong.*")]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate(timeout=30)
        for fd in self._pidfds.values():
            os.close(fd)

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
