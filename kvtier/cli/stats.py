"""`kvtier stats`: a running sidecar's numbers, as a table or as JSON."""

from __future__ import annotations

from pathlib import Path

from kvtier.cli.control import NO_SIDECAR, REFUSED, Control, NoSidecarError, Values, fail, show_json
from kvtier.client import read_stats
from kvtier.config import default_run_dir, format_size
from kvtier.errors import Status
from kvtier.wire.messages import StatsReply


def stats(run_dir: Path | None, as_json: bool) -> None:
    """Exit status 1 when the sidecar does not answer, 3 when there is none; with a line on stderr."""
    where = run_dir or default_run_dir()
    values = _ask(where)
    if as_json:
        show_json(dict(sorted(values.items())))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kvtier sidecar at {where}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in values.items():
        if isinstance(value, int):
            text = format_size(value) if name.endswith("_bytes") else f"{value:,}"
        else:
            text = value or "-"
        table.add_row(name, text)
    Console().print(table)


def _ask(where: Path) -> Values:
    """Its control is asked, or, where there is none, the engines' socket."""
    try:
        with Control(where) as control:
            return control.one("stats")
    except NoSidecarError:
        reply = read_stats(where)
    if isinstance(reply.body, StatsReply):
        return dict(reply.body.values)
    fail(reply.text, NO_SIDECAR if reply.status == Status.AWAY else REFUSED)
