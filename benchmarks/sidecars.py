"""What benchmarks share: sidecars (and other children) that end with the benchmark, however it ends."""

from __future__ import annotations

import contextlib
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

import children  # noqa: E402

__all__ = ["children", "serving", "start", "stop"]

READY_S = 30.0
END_S = 20.0


def start(run_dir: Path, size: str) -> subprocess.Popen[bytes]:
    """A `kvtier serve` that clients can attach to. It gets SIGTERM when this process is gone, killed too.

    What it logs is shown only when it does not come up: it would stand between the figures.
    """
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--quiet"]
    with tempfile.TemporaryFile() as log:
        process = children.start(
            [*command, "--size", size, "--run-dir", str(run_dir)],
            signal.SIGTERM,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        out = process.stdout
        if out is None or not select.select([out], [], [], READY_S)[0] or not out.readline():
            stop(process)
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise SystemExit(f"the sidecar did not come up in {READY_S:.0f} s")
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a sidecar and wait for its end, at most 20 s; then it is killed."""
    children.stop(process, term_s=END_S)
    if process.stdout is not None:
        process.stdout.close()


@contextlib.contextmanager
def serving(size: str) -> Iterator[Path]:
    """The run directory, in a folder of its own, of a sidecar that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder:
        process = start(Path(folder) / "run", size)
        try:
            yield Path(folder) / "run"
        finally:
            stop(process)
