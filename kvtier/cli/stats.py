"""`kvtier stats`: a running sidecar's numbers, as a table or as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtier.cli.absent import nobody_at, owner_lives
from kvtier.cli.control import NO_SIDECAR, REFUSED, Control, NoSidecarError, Values, fail, show_json
from kvtier.cli.labels import FILL, GROUPS, HIT_RATE, Line
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
    from rich.text import Text

    table = Table(title=f"kvtier sidecar at {where}", title_justify="left")
    table.add_column("what")
    table.add_column("value", justify="right", max_width=24, overflow="fold")
    table.add_column("name in --json")
    for title, lines in _groups(values):
        table.add_section()
        table.add_row(Text(title, style="bold"))
        for line in lines:
            table.add_row(Text(f"  {line.label}"), Text(_shown(line, values)), Text(line.name, style="dim"))
    Console().print(table)


def _groups(values: Values) -> Iterator[tuple[str, list[Line]]]:
    """What there is to show. A sidecar of another version may lack a name, or have more."""
    known = {HIT_RATE, FILL}
    for title, lines in GROUPS.items():
        known.update(line.name for line in lines)
        yield title, [line for line in lines if line.name in values or line.name in (HIT_RATE, FILL)]
    others = [Line(name, name) for name in values if name not in known]
    if others:
        yield "others", others


def _shown(line: Line, values: Values) -> str:
    """Value and unit."""
    if line.name == HIT_RATE:
        return _share(values.get("hits", 0), values.get("asked", 0))
    if line.name == FILL:
        usable = values.get("frames_usable", 0)
        return _share(usable - values.get("frames_free", 0), usable)
    value = values[line.name]
    if not isinstance(value, int):
        return value or "-"
    if line.unit == "yes/no":
        return "yes" if value else "no"
    if line.name.endswith("_bytes"):
        return format_size(value)
    return f"{value:,} {line.unit}" if line.unit else str(value)


def _share(part: int, whole: int) -> str:
    """In percent; "-" of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _ask(where: Path) -> Values:
    """Its control is asked, or, where there is none, the engines' socket."""
    try:
        with Control(where) as control:
            return control.one("stats")
    except NoSidecarError:
        if not owner_lives(where):
            fail(nobody_at(where), NO_SIDECAR)
    reply = read_stats(where)
    if isinstance(reply.body, StatsReply):
        return dict(reply.body.values)
    fail(nobody_at(where) if reply.status == Status.AWAY else reply.text, REFUSED)
