"""`kvtier doctor`: what this host offers to a sidecar, tried rather than guessed, with remedies."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvtier.client import read_stats
from kvtier.config import default_run_dir, format_size, parse_size
from kvtier.errors import ConfigError, Status
from kvtier.shm import preflight
from kvtier.wire.messages import StatsReply


def doctor(size: str | None, run_dir: Path | None) -> None:
    """Exit status 1 when a check fails."""
    checks = [
        *preflight.run(parse_size(size) if size is not None else None),
        _run_dir_check(run_dir or default_run_dir()),
    ]
    table = Table(title="kvtier doctor", title_justify="left")
    for column in ("", "check", "found", "remedy"):
        table.add_column(column)
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(mark, check.name, Text(check.text), Text(check.remedy))
    Console().print(table)
    if not all(check.ok for check in checks):
        sys.exit(1)


def _run_dir_check(run_dir: Path) -> preflight.Check:
    """Is the run directory safe, and does a sidecar answer there? None running is no failure."""
    try:
        reply = read_stats(run_dir)
    except ConfigError as error:
        return preflight.Check("run directory", False, str(error), "see the text")
    if isinstance(reply.body, StatsReply):
        values = reply.body.values
        size = format_size(int(values["pool_bytes"]))
        return preflight.Check(
            "run directory",
            True,
            f"{run_dir}: a sidecar of {size} answers, {values['sessions_attached']} sessions",
        )
    if reply.status == Status.AWAY and "does not answer" not in reply.text:
        return preflight.Check("run directory", True, reply.text)
    return preflight.Check(
        "run directory", False, reply.text, "stop that sidecar, or choose another --run-dir"
    )
