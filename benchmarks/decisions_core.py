"""What the core's decisions cost at a million pages, and what it remembers of each (design, section 4).

    python benchmarks/decisions_core.py [long|leaves8|leaves2 ...]

A full cache of a million pages in three shapes: long chains (2,048 pages), 8-page leaves and 2-page
leaves (64 of them under each 16-page trunk). Each round serves a 128k-token prompt of 2,048 pages: a store
that evicts
as many, its finish, a load of the same pages, and its release. Frames lie at random, as in a pool that has
run for a while. Printed are medians in microseconds, with and without the table's writes, beside the goal;
nothing is asserted. The pool's own bytes are never reserved.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterable
from typing import TypeVar

from goals import at_most

from kvtier.core.host_cache import HostCache
from kvtier.core.writes import READY, Write
from kvtier.shm.shape import PoolShape
from kvtier.shm.tables import Tables

FRAMES, PAGES, ROUNDS = 1_000_000, 2_048, 101
NS = b"namespace of all"
PLANNER, MOVER = 1, 2
STEPS = ("store", "finish", "load", "release")
GOAL_US = {"long": 300, "leaves8": 500, "leaves2": 1000}
LEAF_PAGES = {"leaves8": 8, "leaves2": 2}
TRUNK_PAGES, LEAVES = 16, 64

T = TypeVar("T")


def filled(shape: str) -> HostCache:
    """A full cache with one engine attached, its tree built past the protocol (to be quick)."""
    cache = HostCache(FRAMES)
    cache.grow(FRAMES)
    cache.attach(PLANNER, "engine", "planner", 0, 1, 0.0)
    cache.attach(MOVER, "engine", "mover", 0, 1, 0.0)
    cache.mapped(MOVER, FRAMES)
    frames = list(cache._book.free.take(FRAMES))
    random.Random(1).shuffle(frames)
    packed = array("i", frames).tobytes()
    del frames
    space = cache._book.spaces.get_or_add(NS)
    if space is None:
        raise RuntimeError("no namespace")
    tree, root, at = cache._book.tree, space.root, 0

    def values(pages: int) -> bytes:
        nonlocal at
        at += 4 * pages
        return packed[at - 4 * pages : at]

    while at < len(packed):
        pages = min(PAGES if shape == "long" else TRUNK_PAGES, (len(packed) - at) // 4)
        node = tree.insert(root, os.urandom(32 * pages), values(pages), READY)
        for _ in range(LEAVES if shape != "long" else 0):
            pages = min(LEAF_PAGES[shape], (len(packed) - at) // 4)
            if pages:
                tree.insert(node, os.urandom(32 * pages), values(pages), READY)
    cache.check(budget=1)
    return cache


def rounds(cache: HostCache, apply: Callable[[Iterable[Write]], None]) -> dict[str, float]:
    """Median microseconds of each step, table writes included where `apply` does them."""

    def timed(step: str, decide: Callable[..., T], *args: object) -> T:
        begun = time.perf_counter()
        result = decide(PLANNER, *args)
        apply(cache.take_writes())
        taken[step].append((time.perf_counter() - begun) * 1e6)
        return result

    taken: dict[str, list[float]] = {step: [] for step in STEPS}
    for number in range(1, 2 * ROUNDS, 2):
        keys = os.urandom(32 * PAGES)
        stored = timed("store", cache.begin_store, number, NS, keys, 1, 0.0)
        timed("finish", cache.finish, number, (0,), 0.0)
        loaded = timed("load", cache.begin_load, number + 1, NS, keys, 0, 1, 0.0)
        timed("release", cache.finish, number + 1, (0,), 0.0)
        if stored.taken != PAGES or len(loaded.frames) != PAGES:
            raise RuntimeError(f"cut short: {stored.taken} pages stored, {len(loaded.frames)} loaded")
    sums = [sum(taken[step][at] for step in STEPS) for at in range(ROUNDS)]
    return {**{step: statistics.median(taken[step]) for step in STEPS}, "together": statistics.median(sums)}


def main() -> None:
    shapes = sys.argv[1:] or list(GOAL_US)
    tables = Tables(PoolShape((64, 4096), FRAMES, FRAMES))
    tables.frames.view("u1")[:] = 0  # every page touched, as after a first filling
    print(f"{'us, medians':>24} " + " ".join(f"{step:>9}" for step in (*STEPS, "together")))
    for shape in shapes:
        gc.collect()
        cache = filled(shape)
        # As the server does: reference counts free every node, so the collector has nothing to find.
        gc.freeze()
        gc.disable()
        for name, apply in (("core alone", lambda writes: None), ("with tables", tables.apply)):
            medians = rounds(cache, apply)
            line = " ".join(f"{medians[step]:9.1f}" for step in (*STEPS, "together"))
            wanted = f"  {at_most(medians['together'], GOAL_US[shape])}" if name == "with tables" else ""
            print(f"{shape:>11} {name:>12} {line}{wanted}", flush=True)
            for sid in (PLANNER, MOVER):
                cache.died(sid, 0.0)
            cache.attach(PLANNER, "engine", "planner", 0, 1, 0.0)
            cache.attach(MOVER, "engine", "mover", 0, 1, 0.0)
            cache.mapped(MOVER, FRAMES)
            cache.take_writes()
        gc.enable()
        gc.unfreeze()
        del cache
    gc.collect()
    tracemalloc.start()
    cache = filled("long")
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del cache
    print(
        f"memory: {used / FRAMES:.1f} bytes a page on long chains {at_most(used / FRAMES, 60)}, "
        f"and the table {tables.frames.nbytes / FRAMES:.0f}"
    )
    tables.close()


if __name__ == "__main__":
    main()
