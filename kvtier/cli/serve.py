"""`kvtier serve`: one sidecar in the foreground. Imports neither rich nor torch."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from kvtier._version import __version__
from kvtier.config import default_run_dir, format_size, parse_size
from kvtier.server.server import Server


def serve(size: str, run_dir: Path | None, quiet: bool) -> None:
    """Serve until SIGINT or SIGTERM; then end in bounded time, and remove what was made.

    A second signal ends it at once; what it then leaves in the run directory does not stop the next one.
    The line on stdout says that clients can attach. The log goes to stderr.
    """
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    pool_bytes = parse_size(size)
    server: Server | None = None
    ended_by = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = number
        for either in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                either, signal.SIG_DFL
            )  # the next one ends the process, whatever this one waits for
        if server is not None:
            server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    # Beside the loop there is the admin thread: it gives the interpreter back after half a millisecond.
    sys.setswitchinterval(0.0005)
    server = Server(run_dir or default_run_dir(), pool_bytes)
    where = server.run_dir

    def ready() -> None:
        # The core's nodes are freed by their reference counts; the loop collects young garbage itself.
        gc.freeze()
        gc.disable()
        print(
            f"kvtier {__version__}: up to {format_size(pool_bytes)} at {where} (pid {os.getpid()})",
            flush=True,
        )

    try:
        if not ended_by:
            server.run(ready)
    finally:
        server.close()
    logging.getLogger(__name__).info("ended by %s", signal.Signals(ended_by).name if ended_by else "request")
