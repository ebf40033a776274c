"""Reserving in a child process: step by step, within what the host allows, and never outliving the server
(R29).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.config import MIB
from kvtier.errors import UsageError
from kvtier.shm.region import Pool, PoolView
from kvtier.shm.shape import PoolShape
from tests.shm.harness import open_fds

SHAPE = PoolShape((64, MIB), frames=10, chunk_frames=4)


def child_of(pool: Pool) -> int:
    return pool._pid


def run(pool: Pool, until: Callable[[], bool] = lambda: False, timeout_s: float = 30.0) -> list[int]:
    """The server's part: steps until finished (or `until`); the values that `frames` took."""
    seen, deadline = [pool.frames], time.monotonic() + timeout_s
    while not pool.finished and not until():
        assert select.select([pool.fileno()], [], [], deadline - time.monotonic())[0], "no progress"
        if pool.step() and pool.frames != seen[-1]:
            seen.append(pool.frames)
    return seen


def test_chunks_become_usable_one_after_the_other() -> None:
    pool = Pool(SHAPE, step_bytes=MIB)
    assert run(pool) == [0, 4, 8, 10]
    assert (pool.finished, pool.error, pool.reserved_bytes) == (True, None, SHAPE.pool_bytes)
    assert pool.fileno() == -1
    for chunk, fd in enumerate(pool.chunks):
        status = os.fstat(fd)
        # All of it is there: no page is left that could fail later.
        assert (status.st_size, status.st_blocks * 512) == (SHAPE.chunk_bytes(chunk),) * 2
    view = PoolView(SHAPE)
    view.add([os.dup(fd) for fd in pool.chunks])
    assert not view.page(9).any()
    pool.close()


def test_nothing_of_it_is_mapped_or_counted_in_the_server() -> None:
    before = Path("/proc/self/maps").read_text().count("memfd:kvtier-0")
    pool = Pool(SHAPE, step_bytes=MIB)
    run(pool)
    assert Path("/proc/self/maps").read_text().count("memfd:kvtier-0") == before
    pool.close()


def test_the_child_is_the_one_that_the_kernel_kills_first() -> None:
    pool = Pool(SHAPE, step_bytes=MIB)
    run(pool, until=lambda: pool.reserved_bytes > 0)
    assert Path(f"/proc/{child_of(pool)}/oom_score_adj").read_text().strip() == "1000"
    pool.close()


def test_headroom_is_asked_before_each_step_and_ends_the_growth() -> None:
    asked = []

    def headroom() -> int:
        asked.append(1)
        return 100 * MIB - pool_bytes()

    def pool_bytes() -> int:
        return 94 * MIB + made[0].reserved_bytes if made else 94 * MIB

    made: list[Pool] = []
    made.append(Pool(SHAPE, headroom=headroom, step_bytes=MIB, margin_bytes=0))
    pool = made[0]
    assert run(pool) == [0, 4]
    assert pool.finished
    assert len(asked) >= 6
    assert pool.error is not None
    for part in ("Needed 10 MiB", "reserved 4 MiB", "available", "4 of 10 pages", "memory limit", "--size"):
        assert part in pool.error
    # What was reserved of the unfinished chunk has been given back; what was announced stays.
    assert (pool.reserved_bytes, len(pool.chunks)) == (4 * MIB, 1)
    pool.close()


def test_a_margin_is_left_to_others() -> None:
    pool = Pool(SHAPE, headroom=lambda: 5 * MIB, step_bytes=MIB, margin_bytes=4 * MIB + 1)
    assert (pool.finished, pool.frames) == (True, 0)
    assert "not enough memory" in str(pool.error)
    pool.close()


def test_a_child_killed_by_the_kernel_leaves_the_pool_at_what_was_reserved() -> None:
    pool = Pool(SHAPE, step_bytes=MIB)
    run(pool, until=lambda: pool.frames == 4)
    os.kill(child_of(pool), signal.SIGKILL)
    run(pool)
    assert (pool.frames, len(pool.chunks), pool.finished) == (4, 1, True)
    assert "killed the reserving process" in str(pool.error)
    assert "memory limit" in str(pool.error)
    pool.close()


def test_a_child_that_cannot_start_is_an_error_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    pool = Pool(SHAPE)
    assert pool.finished
    assert "/nowhere/python" in str(pool.error)
    pool.close()
    assert open_fds() == before


def test_close_at_any_moment_leaves_neither_child_nor_descriptor() -> None:
    for moment in range(6):
        before = open_fds()
        pool = Pool(SHAPE, step_bytes=MIB)
        for _ in range(moment):
            select.select([pool.fileno()], [], [], 10)
            pool.step()
        child = child_of(pool)
        pool.close()
        pool.close()
        assert open_fds() == before
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)


def test_step_never_blocks() -> None:
    pool = Pool(SHAPE)
    os.kill(child_of(pool), signal.SIGSTOP)
    assert not pool.step()
    assert not pool.finished
    os.kill(child_of(pool), signal.SIGCONT)
    run(pool)
    assert not pool.step()
    pool.close()


def test_steps_are_whole_mebibytes() -> None:
    with pytest.raises(UsageError):
        Pool(SHAPE, step_bytes=4096)


SERVER = """
import os, select, sys
from kvtier.shm.region import Pool
from kvtier.shm.shape import PoolShape
pool = Pool(PoolShape((64, 1 << 20), 10, 4), step_bytes=1 << 20)
while not pool.reserved_bytes:
    select.select([pool.fileno()], [], [])
    pool.step()
print(pool._pid, flush=True)
if sys.argv[1] == "exit":
    os._exit(0)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["SIGKILL", "exit", "stopped child"])
def test_the_child_dies_with_the_server_however_it_ends(end: str) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, "exit" if end == "exit" else "stay"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    child = int(server.stdout.readline())
    try:
        pidfd = os.pidfd_open(child)
    except ProcessLookupError:
        assert end == "exit"  # gone already
        pidfd = -1
    if end == "stopped child":
        os.kill(child, signal.SIGSTOP)  # it cannot see the end of its socket: PDEATHSIG must do it
    if end != "exit":
        server.kill()
    server.wait(10)
    if pidfd >= 0:
        assert select.select([pidfd], [], [], 10)[0], "the reserving child outlives the server"
        os.close(pidfd)
    assert server.stdin is not None
    server.stdin.close()
    server.stdout.close()
