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
from kvtier.config import MIB, default_run_dir, format_size, parse_size
from kvtier.errors import ConfigError
from kvtier.server.server import Server

MIN_BYTES = MIB
"""A smaller pool holds next to nothing: whoever asks for it has forgotten the unit."""


def serve(size: str, run_dir: Path | None, quiet: bool) -> None:
    """Serve until SIGINT, SIGTERM or SIGHUP; then end in bounded time, and remove what was made.

    SIGHUP stays ignored where it is (nohup). A second signal ends it at once; what it then leaves in the run
    directory does not stop the next one.
    The line on stdout says that clients can attach. The log goes to stderr.
    """
    logging.basicConfig(
        level=logging.WARNING if quiet else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    pool_bytes = parse_size(size)
    if pool_bytes < MIN_BYTES:
        raise ConfigError(
            f"size {size!r}: {format_size(pool_bytes)}, needed {format_size(MIN_BYTES)} or more; give "
            "a unit, such as 512MiB, 1GiB or 20GB (a bare number is bytes)"
        )
    server: Server | None = None
    ended_by = 0
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signals.append(signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended_by
        ended_by = number
        for one in signals:
            signal.signal(one, signal.SIG_DFL)  # the next ends the process, whatever this one waits for
        if server is not None:
            server.stop()

    for number in signals:
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
