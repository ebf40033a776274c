"""`kvtier doctor`: what this host offers to a sidecar, tried rather than guessed, with remedies."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.cli.absent import nobody_at, owner_lives
from kvtier.client import read_stats
from kvtier.config import default_run_dir, format_size, parse_size
from kvtier.errors import ConfigError, Status
from kvtier.shm import preflight
from kvtier.shm.mapping import map_shared, populate, sealed_memfd
from kvtier.shm.preflight import Check
from kvtier.wire.messages import StatsReply


def doctor(size: str | None, run_dir: Path | None) -> None:
    """Exit status 1 when a check fails; ConfigError, after the table, for an unusable run directory."""
    checks = [*preflight.run(parse_size(size) if size is not None else None), _populating()]
    unusable: ConfigError | None = None
    try:
        checks.append(_run_dir_check(run_dir or default_run_dir()))
    except ConfigError as error:
        unusable = error
        checks.append(Check("run directory", False, "cannot be used", "see below"))
    failed = not all(check.ok for check in checks)
    table = Table(title="kvtier doctor", title_justify="left")
    for column in ("", "check", "found", "remedy") if failed else ("", "check", "found"):
        table.add_column(column)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        cells = [mark, Text(check.name), Text(check.text), Text(check.remedy)]
        table.add_row(*cells[: len(table.columns)])
    Console().print(table)
    if unusable is not None:
        raise unusable
    if failed:
        sys.exit(1)


def _populating() -> Check:
    """Can the kernel fault memory in beforehand? Good to know, and no failure."""
    fd = sealed_memfd("kvtier-doctor", mmap.PAGESIZE)
    try:
        works = populate(map_shared(fd, mmap.PAGESIZE, writable=True), write=True)
    except OSError:  # then the check of shared mappings says so
        works = False
    finally:
        os.close(fd)
    text = (
        "works" if works else "not here (Linux 5.14 or later has it): pages are faulted in as they are used"
    )
    return Check("MADV_POPULATE_WRITE", True, text)


def _run_dir_check(run_dir: Path) -> Check:
    """Is the run directory safe, and does a sidecar answer there? None running is no failure."""
    reply = read_stats(run_dir)
    if isinstance(reply.body, StatsReply):
        values = reply.body.values
        size = format_size(int(values["pool_bytes"]))
        return Check(
            "run directory",
            True,
            f"{run_dir}: a sidecar of {size} answers, {values['sessions_attached']} sessions",
        )
    if reply.status == Status.AWAY and not owner_lives(run_dir):
        return Check("run directory", True, nobody_at(run_dir))
    return Check("run directory", False, reply.text, "stop that sidecar, or choose another --run-dir")
