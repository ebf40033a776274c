"""SIGKILL to the writer at any moment leaves tables that can be read again (R14 to R16).

A child stores, finishes and evicts chains for as long as it lives. Each key tells its frame and generation,
so that one line shows whether it is whole.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from array import array
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest

from kvtier.core import writes as w
from kvtier.shm.shape import PoolShape
from kvtier.shm.table_format import TableView
from kvtier.shm.tables import Tables
from tests.shm.harness import exit_code, forked

ROOT = b"the root"
KILLS = 40


def key(frame: int, gen: int) -> bytes:
    return struct.pack("<II", frame, gen) * 4


def as_array(frames: npt.NDArray[np.int32]) -> array[int]:
    return array("i", frames.tobytes())


def write_for_ever(channel: socket.socket, frames: int, pages: int) -> None:
    tables = Tables(PoolShape((64, 4096), frames, frames), leases=4, sessions=4, namespaces=4)
    order, gens = np.arange(frames, dtype=np.int32), np.zeros(frames, dtype=np.uint32)
    shuffled = np.random.default_rng(os.getpid())
    for number in count(1):
        shuffled.shuffle(order)
        chain = order[:pages].copy()
        gens[chain] += 1
        keys = np.tile(np.stack([chain.astype(np.uint32), gens[chain]], axis=1), 4).tobytes()
        deepest = int(chain[-1])
        tables.apply(
            [
                w.Claim(as_array(chain), keys, -1, ROOT, number % 4, number),
                w.LeaseRecord(number % 4, number * 3, number, w.STORE, deepest, pages, number * 5, 0),
                w.LeaseRecord(number % 4, number * 3, number, w.STORE, deepest, pages, number * 5, 2**64 - 1),
                w.SessionRecord(
                    number % 4, number, w.MOVER, number % 64, 64, struct.pack("<Q", number), number
                ),
                w.EpochRecord(number % 4, struct.pack("<QQ", number, number), number),
                w.Ready(as_array(chain)),
                w.LeaseEnd(number % 4),
                w.Free(as_array(chain[::-1])),
            ]
        )
        if number == 1:
            socket.send_fds(channel, [b"x"], [tables.read_fd])


def check(view: TableView) -> set[str]:
    """Every line and record is whole or does not count; what was met, by name."""
    met = set()
    gens = (view.frames["word"] >> 8).tolist()
    lines = view.frames
    states = lines["state"].tolist()
    for frame in np.flatnonzero(lines["state"]).tolist():
        line = lines[frame]
        met.add(f"state {states[frame]}")
        assert line["key"].tobytes() == key(frame, gens[frame]), "a line is torn"
        parent = int(line["parent"])
        if parent < 0:
            assert line["tag"].tobytes() == ROOT
            continue
        # Claimed and made READY heads first, freed tails first: a page never counts without its parent.
        assert states[parent] != w.FREE
        assert line["tag"].tobytes() == lines[parent]["key"].tobytes()[:8]
        assert int(line["stamp"]) == int(lines[parent]["stamp"])
        if states[frame] == w.READY:
            assert states[parent] == w.READY
        elif states[parent] == w.READY:
            met.add("a finish in between")
    for sid, number, deepest, gen, epoch, quiet, pages, kind in view.leases.tolist():
        if kind:
            met.add("lease")
            assert (sid, epoch, pages) == (number * 3, number * 5, view.shape.frames // 2)
            assert gen == gens[deepest], "a lease pins another generation than it names"
            assert quiet in (0, 2**64 - 1)
    for sid, group, last, rank, ranks, role in view.sessions.tolist():
        if role:
            met.add("session")
            assert (group, last, rank, ranks) == (struct.pack("<Q", sid), sid, sid % 64, 64)
    for ns, epoch, used in view.namespaces.tolist():
        if used:
            met.add("namespace")
            assert ns == struct.pack("<QQ", epoch, epoch)
    return met


@pytest.mark.parametrize("pages", [3, 1500])
def test_a_killed_writer_leaves_whole_lines_and_records(pages: int) -> None:
    met: set[str] = set()
    wanted = {"state 1", "state 2", "lease", "session", "namespace"}
    for kills in range(20 * KILLS):
        if kills >= KILLS and wanted <= met:
            break
        ours, theirs = socket.socketpair()
        with ours, theirs, forked(lambda: write_for_ever(theirs, pages * 2, pages)) as pid:  # noqa: B023
            ours.settimeout(20)
            view = TableView(socket.recv_fds(ours, 1, 1)[1][0])
            time.sleep(random.random() * 0.01)  # the moment of the kill, not a wait for anything
            os.kill(pid, signal.SIGKILL)
            assert exit_code(pid) == -signal.SIGKILL
            met |= check(view)
    # The kills came in the middle of things, else this test shows nothing.
    assert wanted <= met
