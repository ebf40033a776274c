"""Runs every benchmark, one after the other, and prints what each printed: `make bench`.

    python benchmarks/run.py [NAME ...]

Nothing is asserted: machines are shared and noisy, so the figures are ratios and medians of one run. Goals
that were met and missed are counted at the end. A benchmark that fails makes the whole run fail, at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from goals import MARK
from sidecars import children

HERE = Path(__file__).resolve().parent
PROGRAMS = {
    "decisions_core": "decisions of the core at a million pages, tables included",
    "decisions": "decisions through the sidecar, its memory and its start",
    "copies": "copies through the sidecar and its leases, against a plain copy",
    "engine_thread": "time that calls take on the engine's thread",
    "memory": "device-side allocation",
    "ttft": "time to first token, and others' tokens per second during a load",
}


def main() -> int:
    names = sys.argv[1:] or list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        print(f"unknown: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    begun, failed, goals = time.monotonic(), [], Counter[str]()
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for name in names:
        started = time.monotonic()
        print(f"\n=== {name}: {PROGRAMS[name]}", flush=True)
        program = children.start(
            [sys.executable, str(HERE / f"{name}.py")], signal.SIGTERM, stdout=subprocess.PIPE, env=env
        )
        try:
            for line in program.stdout or ():
                text = line.decode(errors="replace")
                goals.update(MARK.findall(text))
                print(text, end="", flush=True)
            if program.wait():
                failed.append(name)
        finally:
            children.stop(program, term_s=5.0)
        print(f"--- {name}: {time.monotonic() - started:.0f} s", flush=True)
    print(f"\nall in {time.monotonic() - begun:.0f} s" + (f"; failed: {', '.join(failed)}" if failed else ""))
    print(f"goals: {goals['met']} met, {goals['missed']} missed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
