"""The `kvtier` command: one file for each of its commands. typer and rich are imported only in this folder.

A command imports what it needs when it runs, so that `kvtier serve` starts fast and stays small.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier._version import __version__
from kvtier.errors import KVTierError

app = typer.Typer(
    help="Keep the KV of an LLM engine in host memory, and bring it back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="Where sidecar and engines meet. Default: $KVTIER_RUN_DIR, else $XDG_RUNTIME_DIR/kvtier, "
        "else /tmp/kvtier-UID.",
        show_default=False,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keep the KV of an LLM engine in host memory, and bring it back."""


@app.command()
def serve(
    size: Annotated[str, typer.Option("--size", help="Host memory for the pool, such as 1GiB or 200GB.")],
    run_dir: RunDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log warnings only.")] = False,
) -> None:
    """Run a sidecar until SIGINT or SIGTERM."""
    # One array operation at a time: OpenBLAS's threads would only cost memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from kvtier.cli.serve import serve as run

    run(size, run_dir, quiet)


@app.command()
def stats(
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
) -> None:
    """Show a running sidecar's numbers. Attaches nothing and changes nothing."""
    from kvtier.cli.stats import stats as show

    show(run_dir, as_json)


@app.command()
def doctor(
    size: Annotated[
        str | None,
        typer.Option("--size", help="Is there memory for a pool of this size?", show_default=False),
    ] = None,
    run_dir: RunDir = None,
) -> None:
    """Check what this host offers: memory, kernel primitives, the run directory."""
    from kvtier.cli.doctor import doctor as check

    check(size, run_dir)


def main() -> None:
    """Entry point. A mistake of the user's is one message on stderr and exit status 2, never a traceback.

    typer itself deals with Ctrl-C and with a pipe that nobody reads: status 130 and 1, quietly.
    """
    try:
        app()
    except KVTierError as error:
        print(f"kvtier: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
