"""What the server's table writes cost, at 2,048 pages in tables of a million frames (design, section 4).

    python benchmarks/tables.py

Prints the median microseconds of each operation. Frames are drawn at random, so each line is a cache miss, as
in a pool that has run for a while. Nothing is asserted; the goal for load, store, finish and release
together is 300 us of server CPU, tables included.
"""

from __future__ import annotations

import os
import statistics
import time
from array import array
from collections.abc import Callable

import numpy as np

from kvtier.core import writes as w
from kvtier.shm.shape import PoolShape
from kvtier.shm.tables import Tables, TableView

FRAMES, PAGES, ROUNDS = 1_000_000, 2_048, 200


def drawn(random: np.random.Generator) -> array[int]:
    return array("i", random.choice(FRAMES, PAGES, replace=False).astype(np.int32).tobytes())


def main() -> None:
    begun = time.perf_counter()
    tables = Tables(PoolShape((64, 4096), FRAMES, FRAMES))
    print(f"tables of {FRAMES:,} frames made in {(time.perf_counter() - begun) * 1e3:.0f} ms")
    view = TableView(os.dup(tables.read_fd))
    tables.frames.view(np.uint8)[:] = 0  # touched once, as after a first filling
    random = np.random.default_rng(1)
    keys = os.urandom(32 * PAGES)

    def lease(frames: array[int]) -> w.Write:
        return w.LeaseRecord(7, 1 << 63, 12, w.STORE, frames[-1], len(frames), 3, 0)

    operations: dict[str, Callable[[array[int]], object]] = {
        "Free": lambda frames: tables.apply([w.Free(frames)]),
        "Claim": lambda frames: tables.apply([w.Claim(frames, keys, -1, keys[:8], 7, 9)]),
        "Ready": lambda frames: tables.apply([w.Ready(frames)]),
        "Doom": lambda frames: tables.apply([w.Doom(frames)]),
        "gens (server)": lambda frames: tables.gens(frames),
        "gens (client)": lambda frames: view.gens(frames),
        "lease record and end": lambda frames: tables.apply([lease(frames), w.LeaseEnd(7)]),
        "store: Free, Claim, lease, Ready, end": lambda frames: tables.apply(
            [
                w.Free(frames),
                w.Claim(frames, keys, -1, keys[:8], 7, 9),
                lease(frames),
                w.Ready(frames),
                w.LeaseEnd(7),
            ]
        ),
        "one page: Claim, lease, Ready, end": lambda frames: tables.apply(
            [
                w.Claim(frames[:1], keys[:32], -1, keys[:8], 7, 9),
                lease(frames[:1]),
                w.Ready(frames[:1]),
                w.LeaseEnd(7),
            ]
        ),
    }
    print(f"{PAGES:,} random frames, median of {ROUNDS}:")
    for name, operation in operations.items():
        times = []
        for _ in range(ROUNDS):
            frames = drawn(random)
            begun = time.perf_counter()
            operation(frames)
            times.append(time.perf_counter() - begun)
        print(f"  {name:40} {statistics.median(times) * 1e6:7.1f} us")
    # As the server does it: the frames that a store claims are those that it has just evicted.
    parts: dict[str, list[float]] = {"Free": [], "Claim": [], "Ready": []}
    for _ in range(ROUNDS):
        frames = drawn(random)
        for name, times in parts.items():
            begun = time.perf_counter()
            operations[name](frames)
            times.append(time.perf_counter() - begun)
    for name, times in parts.items():
        print(f"  {name + ', in a store that evicts':40} {statistics.median(times) * 1e6:7.1f} us")
    tables.close()


if __name__ == "__main__":
    main()
