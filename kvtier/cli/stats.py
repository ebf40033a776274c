"""`kvtier stats`: a running sidecar's numbers, as a table or as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvtier.client import read_stats
from kvtier.config import default_run_dir, format_size
from kvtier.wire.messages import StatsReply


def stats(run_dir: Path | None, as_json: bool) -> None:
    """Exit status 1, and a line on stderr, when no sidecar answers."""
    where = run_dir or default_run_dir()
    reply = read_stats(where)
    if not isinstance(reply.body, StatsReply):
        print(f"kvtier: {reply.text}", file=sys.stderr)
        sys.exit(1)
    values = reply.body.values
    if as_json:
        print(json.dumps(values, indent=2, sort_keys=True))
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
