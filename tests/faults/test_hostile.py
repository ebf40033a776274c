"""Peers and hosts that are not as they should be: the sidecar lives, and serves those that are."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvtier.client import CacheClient
from tests.server.sidecar import Pair, Sidecar, layout, until


class PoorSidecar(Sidecar):
    """May open few files only, and writes what it logs to a file."""

    def __init__(self, run_dir: Path, files: int) -> None:
        self.log = run_dir.parent / "log"
        self.files = files
        super().__init__(run_dir)

    def _command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.files}; exec "$@" 2>{self.log}', "sh", *super()._command()]

    def opened(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def strangers(self, count: int) -> list[socket.socket]:
        """Connections to the attach socket that say nothing."""
        made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        for stranger in made:
            stranger.settimeout(10)
            stranger.connect(str(self.run_dir / "attach.sock"))
        return made


def sweeps_of(pair: Pair) -> int:
    return pair.planner.stats(timeout_s=10).body.values["sweeps"]


def a_newcomer_is_let_in(sidecar: Sidecar) -> None:
    with CacheClient(sidecar.run_dir, layout=layout(), group="late") as late:
        until(lambda: (late.poll(), late.attached)[1], "those who waited are not let in")


def test_strangers_on_the_attach_socket_leave_descriptors_to_the_data_socket(tmp_path):
    """Without one for a newcomer libzmq ends the process."""
    with PoorSidecar(tmp_path / "run", 72) as sidecar, Pair(sidecar) as pair:
        strangers = sidecar.strangers(60)
        sweeps = sweeps_of(pair)
        until(lambda: sweeps_of(pair) > sweeps, "no sweep came")
        others = [sidecar.stats() for _ in range(10)]  # each by a socket of its own
        assert others[-1]["sessions"] == 2
        assert sidecar.opened() < sidecar.files
        for stranger in strangers:
            stranger.close()
        a_newcomer_is_let_in(sidecar)


def test_without_a_descriptor_left_newcomers_wait_and_the_loop_does_not_spin(tmp_path):
    with PoorSidecar(tmp_path / "probe", 64) as probe, Pair(probe):
        needed = probe.opened()
    with PoorSidecar(tmp_path / "run", needed + 2) as sidecar, Pair(sidecar) as pair:
        strangers = sidecar.strangers(6)
        until(lambda: sidecar.opened() >= sidecar.files, "there are descriptors left")
        sweeps = sweeps_of(pair)
        until(lambda: sweeps_of(pair) >= sweeps + 2, "no sweep came")
        # It looked once for each sweep, not as fast as it can.
        assert 0 < sidecar.log.read_text().count("Too many open files") < 20
        for stranger in strangers:
            stranger.close()
        pair.close()
        a_newcomer_is_let_in(sidecar)
