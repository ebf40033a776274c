"""`kvtier flush`: forget what is cached, of one namespace or of all; and which namespaces there are."""

from __future__ import annotations

import sys
from pathlib import Path

from kvtier.cli.control import checked, connect, show_json
from kvtier.config import default_run_dir


def flush(run_dir: Path | None, namespace: str, as_json: bool) -> None:
    """`namespace`: 32 hex digits, or "all". Exit status 1 when it was refused, 3 when there is no sidecar."""
    with connect(run_dir or default_run_dir()) as control:
        counts = checked(control.one("flush", namespace))
    if as_json:
        show_json(counts)
        return
    print(f"{counts['freed']:,} pages forgotten")
    if counts["doomed"]:
        print(f"{counts['doomed']:,} more are in use: not found any more, freed when their leases end")


def namespaces(run_dir: Path | None, as_json: bool) -> None:
    """What there is to flush."""
    with connect(run_dir or default_run_dir()) as control:
        found = control.many("namespaces")
    if as_json:
        show_json(found)
        return
    if not found:
        print("no namespace has any page", file=sys.stderr)
    for one in sorted(found, key=lambda one: -int(one["pages"])):
        print(f"{one['namespace']}  {one['pages']:,} pages")
