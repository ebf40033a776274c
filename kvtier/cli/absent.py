"""No sidecar answers: has one been killed, does one hang, or was there none? And what to do.

The owner lock tells (R25): it goes with its process, however that ended. Imports `shm` and the ground floor.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from kvtier.config import default_run_dir
from kvtier.shm.liveness import lock_is_free
from kvtier.shm.rundir import OWNER


def owner_lives(run_dir: Path) -> bool:
    """Does a process own this run directory?"""
    return _owner_lock_is_free(run_dir) is False


def nobody_at(run_dir: Path) -> str:
    """One line: nobody serves there, why, and the command that starts one."""
    where = "" if run_dir == default_run_dir() else f" --run-dir {shlex.quote(str(run_dir))}"
    command = f"kvtier serve --size SIZE{where}"
    free = _owner_lock_is_free(run_dir)
    if free:
        return (
            f"the sidecar at {run_dir} was killed: nobody owns this run directory any more, and a sidecar "
            f"can be started there again: {command}"
        )
    if free is None:
        return f"no sidecar runs at {run_dir}; start one: {command}"
    return f"the sidecar at {run_dir} is starting, ending or hanging: its process lives but takes no calls"


def _owner_lock_is_free(run_dir: Path) -> bool | None:
    """None where no sidecar has ever started, or the last one has cleaned up."""
    try:
        fd = os.open(run_dir / OWNER, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # no such file, or none of a sidecar's
        return None
    try:
        return lock_is_free(fd, 0)
    finally:
        os.close(fd)
