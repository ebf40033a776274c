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
from kvtier.errors import ConfigError, KVTierError
from kvtier.shm.rundir import EMPTY

app = typer.Typer(
    help="Keep the KV of an LLM engine in host memory, and bring it back.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _run_dir(text: str | None) -> Path | None:
    if text == "":  # as a Path it would be the current directory
        raise ConfigError(EMPTY)
    return None if text is None else Path(text)


RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        metavar="DIR",
        parser=str,
        callback=_run_dir,
        help="Where sidecar and engines meet. Default: $KVTIER_RUN_DIR, else $XDG_RUNTIME_DIR/kvtier, "
        "else /tmp/kvtier-UID.",
        show_default=False,
    ),
]

AsJson = Annotated[bool, typer.Option("--json", help="JSON, for programs.")]


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
    """Run a sidecar until SIGINT, SIGTERM or SIGHUP."""
    # One array operation at a time: OpenBLAS's threads would only cost memory.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from kvtier.cli.serve import serve as run

    run(size, run_dir, quiet)


@app.command()
def stats(
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Show a running sidecar's numbers. Attaches nothing and changes nothing.

    Exit status: 0 shown, 1 no answer, 2 wrong usage, 3 no sidecar.
    """
    from kvtier.cli.stats import stats as show

    show(run_dir, as_json)


@app.command()
def sessions(
    run_dir: RunDir = None,
    as_json: AsJson = False,
    force_out: Annotated[
        str | None,
        typer.Option(
            "--force-out",
            metavar="SESSION",
            help="End a doubted session whose death cannot be proven, and give its frames to others. "
            "Only safe when nothing of that engine is left on this host; says so, and does it with --yes.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do what --force-out warns of.")] = False,
) -> None:
    """Show who is attached to a running sidecar: each planner and mover, and what it holds.

    A session is "doubted" when its connection or its process has ended but something may still write into the
    pool: nothing of it is freed until that is over. "dead": it is, and its frames wait for its movers.

    Exit status: 0 shown or done, 1 refused or no answer, 2 wrong usage, 3 no sidecar.
    """
    from kvtier.cli import sessions as command

    if force_out is not None:
        command.force_out(run_dir, force_out, yes, as_json)
    elif yes:
        raise typer.BadParameter("is for --force-out", param_hint="--yes")
    else:
        command.sessions(run_dir, as_json)


@app.command()
def flush(
    run_dir: RunDir = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="HEX",
            help="Forget the pages of this namespace: 32 hex digits, as --list shows them.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Forget all pages.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Show the namespaces that have pages.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget cached KV, as of a model whose weights have changed. Give --namespace, --all or --list.

    From its answer on nobody finds these pages again. Pages that are being read or written are counted, and
    freed when that ends; no engine is disturbed.

    Exit status: 0 done, 1 refused or no answer, 2 wrong usage, 3 no sidecar.
    """
    if (namespace is not None) + everything + names != 1:
        raise typer.BadParameter("give one of them", param_hint="--namespace, --all or --list")
    from kvtier.cli import flush as command

    if names:
        command.namespaces(run_dir, as_json)
    else:
        command.flush(run_dir, namespace if namespace is not None else "all", as_json)


@app.command()
def drain(
    run_dir: RunDir = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0, max=86400, help="End after this many seconds, whatever still runs."),
    ] = 60.0,
    undo: Annotated[bool, typer.Option("--undo", help="Take an earlier drain back.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the sidecar has ended.")] = True,
    as_json: AsJson = False,
) -> None:
    """End a sidecar gently: nothing new begins, running copies come to their end, then it exits.

    Engines go on without it. For the end at once send SIGTERM, and again if that is not enough.

    Exit status: 0 nothing was running at the end, 1 something was, or refused, 2 wrong usage, 3 no sidecar.
    """
    from kvtier.cli import drain as command

    if undo:
        command.undrain(run_dir, as_json)
    else:
        command.drain(run_dir, timeout_s, wait, as_json)


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
