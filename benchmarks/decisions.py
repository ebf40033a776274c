"""What the sidecar's decisions cost over its socket: round trips, rates, memory, start time.

    python benchmarks/decisions.py [--seconds 2.0]

Every client is a process with a planner of its own and a chain of 2,048 pages in the pool. Printed, not
asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import sidecars

from kvtier.client import CacheClient
from kvtier.config import GIB
from kvtier.errors import Status
from kvtier.keys import Namespace, PageChain
from kvtier.layout import KVLayout, Plane
from kvtier.wire.messages import End, LoadChain, LookupReply, StoreChain

PAGES = 2048
LAYOUT = KVLayout(64, ((Plane("kv", 512),),), "bench")
"""32 KiB pages: 32,768 frames in a pool of 1 GiB."""


def private_bytes(pid: int) -> int:
    """Memory that only this process has, from smaps_rollup."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def first_lookup_s(run_dir: Path) -> float:
    """Seconds from the start of `kvtier serve` (that of its launcher too, a bare Python) to the answer of a
    client's first look-up, the attach included."""
    keys = bytes(32 * PAGES)
    started = time.perf_counter()
    process = sidecars.start(run_dir, "1GiB")
    with CacheClient(run_dir, layout=LAYOUT, group="start", timeout_s=5.0) as client:
        while not client.attached:
            client.wait(0.01)
            client.poll()
        status = client.lookup(b"n" * 16, keys).status
        took = time.perf_counter() - started
    sidecars.stop(process)
    if status != Status.OK:
        raise SystemExit(f"the first look-up was answered {status.name}")
    return took


def client_process(run_dir: Path, name: str, seconds: float) -> None:
    """One engine: stores its chain, says "ready", waits for a line, then loads; prints times."""
    mover = CacheClient(run_dir, layout=LAYOUT, group=name, role="mover", timeout_s=5.0)
    planner = CacheClient(run_dir, layout=LAYOUT, group=name, timeout_s=5.0)
    chain = PageChain(Namespace("bench", salt=name.encode()), 64)
    chain.extend(np.arange(PAGES * 64, dtype=np.int32))
    ns, keys = chain.namespace, chain.keys
    while not (planner.complete and mover.pool.frames == planner.pool.frames == mover.pool.shape.frames):
        for client in (mover, planner):
            client.wait(0.01)
            client.poll()
    found = planner.lookup(ns, keys).body
    if not isinstance(found, LookupReply):
        raise SystemExit("no look-up was answered")
    (grant,) = planner.begin_store([StoreChain(planner.next_number(), ns, keys, found.epoch)])
    planner.finish([End(grant.number, (0,))])
    print("ready", flush=True)
    sys.stdin.readline()
    took: dict[str, list[float]] = {"begin_load": [], "finish": [], "lookup": []}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        number = planner.next_number()
        start = time.perf_counter()
        (load,) = planner.begin_load([LoadChain(number, ns, keys)])
        begun = time.perf_counter()
        planner.finish([End(number, (0,))])
        ended = time.perf_counter()
        planner.lookup(ns, keys)
        found_at = time.perf_counter()
        if load.status != Status.OK or len(load.frames) != PAGES:
            raise SystemExit(f"a load was answered {load.status.name} with {len(load.frames)} frames")
        for name_, took_s in (
            ("begin_load", begun - start),
            ("finish", ended - begun),
            ("lookup", found_at - ended),
        ):
            took[name_].append(took_s)
    print(json.dumps(took), flush=True)
    planner.close()
    mover.close()


def load_test(run_dir: Path, clients: int, seconds: float) -> None:
    command = [sys.executable, __file__, "--seconds", str(seconds), "--client"]
    processes = [
        sidecars.children.start(
            [*command, f"{clients}-{number}", str(run_dir)],
            signal.SIGKILL,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(clients)
    ]
    for process in processes:
        if process.stdout is None or process.stdout.readline() != b"ready\n":
            raise SystemExit("a client did not come up")
    for process in processes:
        if process.stdin is not None:
            process.stdin.write(b"go\n")
            process.stdin.flush()
    results = [json.loads(process.communicate()[0]) for process in processes]
    decisions = sum(len(times) for result in results for times in result.values())
    print(f"{clients} client{'s' * (clients > 1)}: {decisions / seconds:8,.0f} decisions/s")
    for name in ("begin_load", "finish", "lookup"):
        times = np.array([took for result in results for took in result[name]]) * 1e6
        print(
            f"    {name:10} of {PAGES} pages: p50 {np.percentile(times, 50):7.0f} us,"
            f" p99 {np.percentile(times, 99):7.0f} us"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each load test runs")
    parser.add_argument("--client", nargs=2, metavar=("NAME", "RUN_DIR"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.client:
        client_process(Path(chosen.client[1]), chosen.client[0], chosen.seconds)
        return
    with tempfile.TemporaryDirectory(prefix="kvt") as folder:
        starts = [first_lookup_s(Path(folder) / "run") for _ in range(7)]
        print(
            "start of `kvtier serve` to the first answered look-up: "
            f"median {statistics.median(starts) * 1000:.0f} ms"
            f" of 7 ({min(starts) * 1000:.0f} to {max(starts) * 1000:.0f})"
        )
        process = sidecars.start(Path(folder) / "run", "1GiB")
        try:
            for clients in (1, 4):
                load_test(Path(folder) / "run", clients, chosen.seconds)
            print(
                f"server with a pool of {GIB // LAYOUT.page_bytes:,} pages, 1 GiB: "
                f"{private_bytes(process.pid) / 1e6:.1f} MB private memory"
            )
        finally:
            sidecars.stop(process)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
