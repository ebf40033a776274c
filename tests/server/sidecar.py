"""A real sidecar process for tests: `kvtier serve` in a run directory of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from kvtier.client import CacheClient, read_stats
from kvtier.layout import KVLayout, Plane
from kvtier.wire.messages import StatsReply

PAGE = 64 * 1024
"""Bytes of one page of `layout()`."""


def layout(pages_per_mib: int = 16, page_tokens: int = 64) -> KVLayout:
    """A layout of one shard and one plane: 64 KiB pages by default."""
    return KVLayout(page_tokens, ((Plane("kv", (1 << 20) // pages_per_mib // page_tokens),),), "test")


class Sidecar:
    """`kvtier serve`, started and awaited; ends with the block."""

    def __init__(self, run_dir: Path, size: str = "16MiB") -> None:
        self.run_dir = run_dir
        self.size = size
        self.process = self._start()

    def _command(self) -> list[str]:
        serve = ["serve", "--size", self.size, "--run-dir", str(self.run_dir)]
        return [sys.executable, "-m", "kvtier.cli.main", *serve]

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(self._command(), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 30)
        line = process.stdout.readline() if ready else ""
        if not line.startswith("kvtier"):
            process.kill()
            raise AssertionError(f"the sidecar did not come up: {line!r}, exit status {process.wait(10)}")
        return process

    def again(self) -> None:
        """Start another one in the same run directory, once this one has ended."""
        self.process.wait(30)
        self._close_pipe()
        self.process = self._start()

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end; its exit status."""
        self.send(number)
        return self.process.wait(30)

    def _close_pipe(self) -> None:
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stats(self) -> dict[str, Any]:
        reply = read_stats(self.run_dir, timeout_s=10)
        assert isinstance(reply.body, StatsReply), reply
        return reply.body.values

    def client(self, **options: Any) -> CacheClient:
        """A client that has attached; `timeout_s` is generous, so that a busy machine fails no test."""
        settings: dict[str, Any] = {"layout": layout(), "group": "g", "timeout_s": 10.0, **options}
        client = CacheClient(self.run_dir, **settings)
        client.raise_if_refused()
        assert client.attached
        return client

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.end()
        self._close_pipe()


class Pair:
    """An engine's planner and its one mover, attached, with the whole pool mapped."""

    def __init__(self, sidecar: Sidecar, group: str = "g", **options: Any) -> None:
        self.sidecar = sidecar
        self.mover = sidecar.client(role="mover", group=group, **options)
        self.planner = sidecar.client(role="planner", group=group, **options)
        until(lambda: self._whole(), "the pool was not mapped")

    def _whole(self) -> bool:
        self.mover.poll()
        self.planner.poll()
        shape = self.mover.pool.shape
        return self.planner.complete and shape.frames == self.mover.pool.frames == self.planner.pool.frames

    def close(self) -> None:
        self.planner.close()
        self.mover.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll until something holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
