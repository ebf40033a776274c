"""Copies through a real sidecar and its leases, against a plain copy between the same buffers.

    python benchmarks/copies.py

A `kvtier serve` process, a planner's client, and a `Mover` with its one copy thread. Each store and each
load is timed from its plan to its end in the mover's progress, and once more with its lease's begin and
finish, one round trip each, waited for (an engine's planner waits for neither). The plain copy moves the same
number of bytes between the same pool pages and the same device buffer, page by page, as one numpy copy each.
The order goes round, medians count, every byte is compared after each run. Goals (4 KiB rows, 8 MiB pages):
offload 0.90 on runs and 0.80 on random slots, load 0.85 and 0.80 of the plain copy's rate. Nothing is
asserted but the bytes.

Beside the clock on the wall stands the CPU time of this process (copies, plans, messages): on a machine
that others use too it is the steadier of the two.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt
import torch
from goals import at_least
from sidecars import serving

from kvtier.client import CacheClient
from kvtier.errors import Status
from kvtier.memory.memory_manager import MemoryManager
from kvtier.mover import Mover
from kvtier.wire.messages import End, LoadChain, LookupReply, StoreChain
from kvtier.wire.plan import Copy, Kind, Lane, encode

LAYERS = 32
PAGES = 15
POOL = "256MiB"
ROUNDS = 9
NS = b"benchmark copies"

Seconds = tuple[float, float, float]
"""On the wall, of this process's CPU time, and on the wall with the lease's begin and finish."""

Ints = npt.NDArray[np.int32]


class Timer:
    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


class Bench:
    """One row size: KV for one page more than is copied, a planner's client and a mover over it."""

    def __init__(self, run_dir: Path, heads: int, head_dim: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        slots = (PAGES + 1) * page_tokens
        memory = MemoryManager(slots, torch.float32, heads, head_dim, LAYERS)
        row_bytes = 2 * heads * head_dim * 4
        self.device = memory.kv_buffer.view(torch.uint8).view(LAYERS, slots + 1, row_bytes).numpy()
        buffers = memory.kv_buffers(page_tokens, engine="benchmark")
        self.layout = buffers.layout
        self.page_bytes = page_tokens * LAYERS * row_bytes
        group = f"{row_bytes}"
        self.mover = Mover(buffers, run_dir, group)
        self.client = CacheClient(
            run_dir, layout=self.layout, group=group, timeout_s=5.0, attach_timeout_s=10.0, writable=True
        )
        self.random = np.random.default_rng(row_bytes)
        self.slots = {
            "random slots": self.random.permutation(slots)[: PAGES * page_tokens].astype(np.int32),
            "runs": self.runs(slots, page_tokens),
            "runs of 16": self.runs(slots, 16),
        }
        self.device[:] = self.random.integers(0, 256, self.device.shape, dtype=np.uint8)
        self.image = self.device.copy()
        self.tasks = 0
        self.keys = b""
        self.frames: Ints = np.zeros(0, np.int32)
        self.stored: Ints = np.zeros(0, np.int32)

    def runs(self, slots: int, length: int) -> Ints:
        """Slots in runs of `length`, as an allocator of device pages gives them."""
        starts = self.random.permutation(slots // length)[: -(-PAGES * self.page_tokens // length)]
        runs = (starts[:, None] * length + np.arange(length)).ravel()
        return runs[: PAGES * self.page_tokens].astype(np.int32)

    def wait_whole(self) -> None:
        """Until the group is complete and the pool is mapped."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.client.poll()
            if self.client.complete and self.client.pool.frames == self.client.pool.shape.frames:
                return
            self.client.wait(0.05)
        raise SystemExit("the pool did not come up in 30 s")

    def copy(
        self, kind: Kind, frames: Ints, units: Ints, gens: npt.NDArray[np.uint32] | None = None
    ) -> tuple[float, float]:
        """One task of the mover, from plan to progress."""
        self.tasks += 1
        lane = Lane.OFFLOADS if kind == Kind.OFFLOAD else Lane.LONG_LOADS
        none = np.empty(0, np.uint32)
        copy = Copy(self.tasks, kind, lane, self.tasks, frames, units, 0, none if gens is None else gens)
        timer = Timer()
        self.mover.mark()
        self.mover.apply(encode([copy], self.client.pool_id))
        while True:
            seen = self.mover.progress().read()
            if seen.done[lane] >= copy.seq:
                break
            self.mover.wait_progress(30)
        if seen.failures:
            raise SystemExit(f"a copy failed: {seen.failures}")
        return timer.stop()

    def offload(self, units: Ints) -> Seconds:
        """Seconds for PAGES pages under a store lease, begin to finish."""
        self.keys = os.urandom(32 * PAGES)
        found = self.client.lookup(NS, self.keys)
        if not isinstance(found.body, LookupReply):
            raise SystemExit(f"look-up: {found}")
        started = time.perf_counter()
        number = self.client.next_number()
        (grant,) = self.client.begin_store([StoreChain(number, NS, self.keys, found.body.epoch)])
        if grant.status != Status.OK or grant.taken != PAGES:
            raise SystemExit(f"no room: {grant}")
        frames = np.array(grant.frames, np.int32)
        copied = self.copy(Kind.OFFLOAD, frames, units)
        (ended,) = self.client.finish([End(number, (0,))])
        seconds = (*copied, time.perf_counter() - started)
        if ended.visible != PAGES:
            raise SystemExit(f"not all is visible: {ended}")
        self.frames, self.stored = frames, units
        for page, frame in enumerate(frames.tolist()):
            some = units[page * self.page_tokens : (page + 1) * self.page_tokens]
            if not np.array_equal(self.pool_page(frame), self.image[:, some].reshape(-1)):
                raise SystemExit(f"page {page} is not what the device holds")
        return seconds

    def load(self, units: Ints) -> Seconds:
        """Seconds for what was stored last, into other slots, under a load lease, begin to finish."""
        self.device[:, units] = 0
        started = time.perf_counter()
        number = self.client.next_number()
        (grant,) = self.client.begin_load([LoadChain(number, NS, self.keys)])
        if grant.status != Status.OK or len(grant.frames) != PAGES:
            raise SystemExit(f"no hit: {grant}")
        frames = np.array(grant.frames, np.int32)
        copied = self.copy(Kind.LOAD, frames, units, np.array(grant.gens, np.uint32))
        self.client.finish([End(number, (0,))])
        seconds = (*copied, time.perf_counter() - started)
        for layer in range(LAYERS):
            if not np.array_equal(self.device[layer, units], self.image[layer, self.stored]):
                raise SystemExit(f"layer {layer} is not what was stored")
        self.device[:] = self.image
        return seconds

    def plain(self, load: bool) -> Seconds:
        """Seconds for as many bytes between the same pages and the same buffer, one copy a page."""
        flat, size = self.device.reshape(-1), self.page_bytes
        pages = [self.pool_page(frame, write=not load) for frame in self.frames.tolist()]
        started = Timer()
        for number, page in enumerate(pages):
            device = flat[number * size : (number + 1) * size]
            if load:
                np.copyto(device, page)
            else:
                np.copyto(page, device)
        wall, cpu = started.stop()
        for number, page in enumerate(pages):
            if not np.array_equal(page, flat[number * size : (number + 1) * size]):
                raise SystemExit("a plain copy is not equal")
        if load:
            self.device[:] = self.image
        return wall, cpu, wall

    def pool_page(self, frame: int, write: bool = False) -> npt.NDArray[np.uint8]:
        return self.client.pool.page(frame, 0, write=write)[: self.page_bytes]

    def close(self) -> None:
        self.client.close()
        self.mover.close()


def measure(bench: Bench, rounds: int) -> dict[str, list[Seconds]]:
    """Seconds of each way in each round; the order goes round from round to round."""
    offloads: dict[str, Callable[[], Seconds]] = {"offload plain": lambda: bench.plain(load=False)}
    loads: dict[str, Callable[[], Seconds]] = {"load plain": lambda: bench.plain(load=True)}
    for name, units in bench.slots.items():
        offloads[f"offload {name}"] = lambda units=units: bench.offload(units)  # type: ignore[misc]
        loads[f"load {name}"] = lambda units=units: bench.load(units)  # type: ignore[misc]
    seconds: dict[str, list[Seconds]] = {name: [] for name in (*offloads, *loads)}
    for number in range(rounds):
        for ways in (offloads, loads):
            names = list(ways)
            at = number % len(names)
            # A plain offload overwrites a stored page, so the loads come after a real one.
            for name in names[at:] + names[:at]:
                seconds[name].append(ways[name]())
            if ways is offloads:
                bench.offload(bench.slots["runs"])
    return seconds


def report(row_bytes: int, bench: Bench, seconds: dict[str, list[Seconds]]) -> None:
    moved = PAGES * bench.page_bytes
    print(
        f"\nrows of {row_bytes} bytes, {LAYERS} planes, pages of {bench.page_bytes / 2**20:.1f} MiB", end=""
    )
    print(f", {PAGES} pages a copy, one thread, median of {len(seconds['load plain'])}")
    goals = {"offload runs": 0.90, "offload random slots": 0.80, "load runs": 0.85, "load random slots": 0.80}
    heads = (f"  {head:>16s} " for head in ("wall", "CPU", "wall, with lease"))
    print(f"{'':23s}" + "".join(heads))
    print(f"{'':23s}" + "  {:>7s} {:>8s} ".format("GB/s", "of plain") * 3)
    for name, values in seconds.items():
        line, shares = f"  {name:21s}", []
        for clock in range(3):
            plain = statistics.median(value[clock] for value in seconds[name.split()[0] + " plain"])
            median = statistics.median(value[clock] for value in values)
            shares.append(plain / median)
            line += f"  {moved / median / 1e9:7.2f} {plain / median:8.2f} "
        wanted = f" {at_least(shares[0], goals[name])}" if name in goals and row_bytes == 4096 else ""
        print((line + wanted).rstrip())


def main() -> int:
    for row_bytes, heads, head_dim, page_tokens in ((4096, 4, 128, 64), (1536, 3, 64, 176)):
        with serving(POOL) as run_dir:
            bench = Bench(run_dir, heads, head_dim, page_tokens)
            try:
                bench.wait_whole()
                measure(bench, 1)  # faults, first touches
                report(row_bytes, bench, measure(bench, ROUNDS))
            finally:
                bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
