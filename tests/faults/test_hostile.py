"""Peers and hosts that are not as they should be: the sidecar lives, and serves those that are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvtier.client import CacheClient
from tests.server.sidecar import Pair, Sidecar, layout, until


class PoorSidecar(Sidecar):
    """May open few files only, and writes what it logs to a file."""

    FILES = 64

    def _command(self) -> list[str]:
        self.log = self.run_dir.parent / "log"
        return ["sh", "-c", f'ulimit -n {self.FILES}; exec "$@" 2>{self.log}', "sh", *super()._command()]


def test_without_a_descriptor_left_newcomers_wait_and_the_loop_does_not_spin(tmp_path):
    with PoorSidecar(tmp_path / "run") as sidecar, Pair(sidecar) as pair:
        strangers = [
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(PoorSidecar.FILES - 8)
        ]
        for stranger in strangers:
            stranger.settimeout(10)
            stranger.connect(str(sidecar.run_dir / "attach.sock"))
        opened = Path(f"/proc/{sidecar.process.pid}/fd")
        until(lambda: len(os.listdir(opened)) >= PoorSidecar.FILES, "there are descriptors left")
        sweeps = sweeps_of(pair)
        until(lambda: sweeps_of(pair) >= sweeps + 2, "no sweep came")
        # It looked once for each sweep, not as fast as it can.
        assert sidecar.log.read_text().count("Too many open files") < 20
        for stranger in strangers:
            stranger.close()
        with CacheClient(sidecar.run_dir, layout=layout(), group="late") as late:
            until(lambda: (late.poll(), late.attached)[1], "those who waited are not let in")


def sweeps_of(pair: Pair) -> int:
    return pair.planner.stats(timeout_s=10).body.values["sweeps"]
