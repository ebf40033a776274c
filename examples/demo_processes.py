"""The two processes that the demo starts: `kvtier serve`, and the inference worker."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import children
from kvtier.client import read_stats
from kvtier.wire.messages import StatsReply

WORKER = Path(__file__).with_name("worker_process.py")
Event = dict[str, Any]


class DemoError(Exception):
    """Something that the demo needs did not happen."""


class Lines:
    """Whole lines from a pipe, each waited for no longer than a deadline."""

    def __init__(self, pipe: IO[bytes], who: str) -> None:
        self._pipe = pipe
        self._who = who
        self._buffer = b""

    def next(self, timeout_s: float) -> bytes:
        """The next line; DemoError at the end of the pipe, or when none has come in time."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._pipe], [], [], left)[0]:
                raise DemoError(f"{self._who} said nothing for {timeout_s:.0f} s")
            data = os.read(self._pipe.fileno(), 1 << 16)
            if not data:
                raise DemoError(f"{self._who} has ended (its messages are above)")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line


class Sidecar:
    """`kvtier serve` on a run directory that it makes, and removes."""

    def __init__(self, run_dir: Path, size: str, log: IO[bytes]) -> None:
        self._run_dir = run_dir
        self._child = children.start(
            [sys.executable, "-m", "kvtier.cli.main", "serve", "--size", size, "--run-dir", str(run_dir)],
            signal.SIGTERM,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert self._child.stdout is not None
        self._lines = Lines(self._child.stdout, "the sidecar")

    def wait_ready(self) -> None:
        """Until it has said that it is ready."""
        self._lines.next(20.0)

    def stats(self) -> dict[str, Any]:
        """Its counters, asked from outside as `kvtier stats` does."""
        reply = read_stats(self._run_dir)
        if not isinstance(reply.body, StatsReply):
            raise DemoError(f"the sidecar gives no numbers: {reply.text}")
        return reply.body.values

    def stop(self) -> None:
        """SIGTERM; it removes what it made."""
        children.stop(self._child, term_s=10.0)
        if self._child.stdout is not None:
            self._child.stdout.close()


class InferenceWorker:
    """The mini engine in a process of its own; see `worker_process.py`."""

    def __init__(self, model: Path, slots: int, run_dir: Path, log: IO[bytes]) -> None:
        # Threads that wait for their siblings sleep: spinning costs all when another program wants the CPU.
        env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self._child = children.start(
            [
                sys.executable,
                str(WORKER),
                "--model",
                str(model),
                "--slots",
                str(slots),
                "--run-dir",
                str(run_dir),
            ],
            signal.SIGKILL,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._stdin = self._child.stdin
        self._lines = Lines(self._child.stdout, "the inference worker")

    def ask(self, name: str, tokens: list[int], new_tokens: int, report: Callable[[Event], None]) -> Event:
        """The answer to `tokens`: the worker's `done` event. `report` gets its `progress` events."""
        self._send(op="ask", id=name, tokens=tokens, max_new_tokens=new_tokens, ignore_eos=True)
        return self.wait_for("done", report)

    def settle(self) -> None:
        """Until no request and no copy is under way."""
        self.call("settle", "settled")

    def call(self, op: str, event: str) -> Event:
        """Send a command, and wait for its event."""
        self._send(op=op)
        return self.wait_for(event)

    def wait_for(self, kind: str, report: Callable[[Event], None] = lambda event: None) -> Event:
        """The next event of this kind."""
        while True:
            event: Event = json.loads(self._lines.next(120.0))
            if event["event"] == kind:
                return event
            report(event)

    def kill(self) -> None:
        """SIGKILL, as an accident would."""
        self._child.kill()
        self._child.wait(10.0)
        self._stdin.close()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _send(self, **command: Any) -> None:
        try:
            self._stdin.write(json.dumps(command).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise DemoError("the inference worker has ended (its messages are above)") from None
