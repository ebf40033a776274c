"""`kvtier sessions`: who is attached, what each holds, and a way out where a death cannot be proven."""

from __future__ import annotations

from pathlib import Path

from kvtier.cli.control import Values, checked, connect, show_json
from kvtier.config import default_run_dir, format_size


def sessions(run_dir: Path | None, as_json: bool) -> None:
    """Exit status 1 when the sidecar does not answer, 3 when there is none."""
    where = run_dir or default_run_dir()
    with connect(where) as control:
        found = control.many("sessions")
    if as_json:
        show_json(found)
        return
    if not found:
        print(f"nobody is attached to the sidecar at {where}")
        return
    _table(found, where)


def force_out(run_dir: Path | None, session: str, yes: bool, as_json: bool) -> None:
    """Exit status 1, with the reason or the warning, when it was not done."""
    with connect(run_dir or default_run_dir()) as control:
        answer = control.one("force_out", session, yes)
    if not yes and answer["text"] and not answer["ok"]:
        answer["text"] = f"{answer['text']}. Nothing was done; to do it nevertheless add --yes"
    held = checked(answer)
    if as_json:
        show_json(held)
    else:
        print(f"session {session} is out: {held['leases']} leases of {held['pages_held']} pages were ended")


def _table(found: list[Values], where: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"sessions of the kvtier sidecar at {where}", title_justify="left")
    for column in ("session", "group", "role", "state", "pid", "process"):
        table.add_column(column)
    for column in ("age", "leases", "pages held", "bytes held"):
        table.add_column(column, justify="right")
    for one in found:
        role = "planner" if one["role"] == "planner" else f"mover {one['rank']} of {one['ranks']}"
        state = Text(one["state"], style="" if one["state"] == "attached" else "bold red")
        process = one["process"]
        if process == "ended" and one["lock"] == "held":
            process = "ended, a child lives"
        table.add_row(
            one["session"],
            Text(one["group"]),
            role,
            state,
            str(one["pid"] or "-"),
            process,
            f"{one['age_s']:,} s",
            f"{one['leases']:,}",
            f"{one['pages_held']:,}",
            format_size(one["bytes_held"]),
        )
    Console().print(table)
