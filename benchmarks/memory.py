"""What device-side allocation costs on the engine's thread, beside three other ways to do it.

    python benchmarks/memory.py

Prints medians, with the goal behind them where there is one, and asserts nothing. The others: a Python
list, a bitmask in one int, and a stack in a torch tensor (see their classes).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from goals import at_most

from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.indices import HandOut
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.radix_cache import RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.task_cache import TaskCacheManager

PAGE = 16
LONG = 131_072
SLOTS = 8 * LONG


def timed(calls: dict[str, Callable[[Any], Any]], rounds: int, batch: int = 1) -> dict[str, float]:
    """Median microseconds of each call; one after the other in every round, each given the last result."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    result: Any = None
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            for _ in range(batch):
                result = call(result)
            spent[name].append((time.perf_counter() - begun) / batch * 1e6)
    return {name: statistics.median(times) for name, times in spent.items()}


def show(what: str, times: dict[str, float], goals: dict[str, float] | None = None) -> None:
    line, indent = f"{what:<50}", " " * 50
    for name, value in times.items():
        cell = f"  {name} {value:9.2f} us"
        if goals and name in goals:
            cell += f" {at_most(value, goals[name])}"
        if len(line + cell) > 110:
            print(line)
            line = indent
        line += cell
    print(line)


class ListStack:
    """Free numbers in a Python list, as small engines have it. Checks nothing."""

    def __init__(self, size: int) -> None:
        self.free_list = list(range(size))

    def alloc(self, count: int) -> list[int]:
        given = self.free_list[-count:]
        del self.free_list[-count:]
        return given

    def free(self, given: list[int]) -> None:
        self.free_list.extend(given)


class Bitmask:
    """A bit for each number in one Python int: the lowest set bit is the next one given."""

    def __init__(self, size: int) -> None:
        self.bits = (1 << size) - 1

    def alloc(self, count: int) -> list[int]:
        given = []
        for _ in range(count):
            low = self.bits & -self.bits
            self.bits ^= low
            given.append(low.bit_length() - 1)
        return given

    def free(self, given: list[int]) -> None:
        for number in given:
            if self.bits >> number & 1:
                raise ValueError(number)
            self.bits |= 1 << number


class TorchStack:
    """A stack in a torch tensor, and a second one for what is given out. Checks nothing."""

    def __init__(self, size: int) -> None:
        self.state = torch.arange(size, dtype=torch.int32)
        self.given = torch.empty(3 * size, dtype=torch.int32)
        self.top = self.at = 0

    def alloc(self, count: int) -> torch.Tensor:
        if self.at + count > len(self.given):
            self.at = 0
        out = self.given[self.at : self.at + count]
        out.copy_(self.state[self.top : self.top + count])
        self.top += count
        self.at += count
        return out

    def free(self, given: torch.Tensor) -> None:
        self.state[self.top - len(given) : self.top] = given
        self.top -= len(given)


BITMASK_MOST = 64
"""More are not asked of the bitmask: what it takes for one is multiplied."""


def beside(
    own: Any,
    size: int,
    count: int,
    rounds: int,
    calls: int,
    what: str,
    goals: dict[str, float] | None = None,
) -> None:
    """Alloc and free of `count` numbers: in every round so many calls of each, and one of the bitmask."""
    others: dict[str, Any] = {"kvtier": own, "list": ListStack(size), "torch stack": TorchStack(size)}
    spent: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name, allocator in {**others, "bitmask": Bitmask(size)}.items():
            is_bitmask = name == "bitmask"
            asked = min(count, BITMASK_MOST) if is_bitmask else count
            times = spent.setdefault(name, {"alloc": [], "free": []})
            for _ in range(1 if is_bitmask else calls):
                begun = time.perf_counter()
                given = allocator.alloc(asked)
                between = time.perf_counter()
                allocator.free(given)
                ended = time.perf_counter()
                times["alloc"].append((between - begun) * 1e6 * count / asked)
                times["free"].append((ended - between) * 1e6 * count / asked)
    for name, times in spent.items():
        label = f"{what}, {name}" if name == "kvtier" else f"{'':6}{name}"
        if name == "bitmask" and count > BITMASK_MOST:
            label += f" (from {BITMASK_MOST} of them)"
        medians = {part: statistics.median(values) for part, values in times.items()}
        show(label, medians, goals if name == "kvtier" else None)


def slots() -> None:
    """Token slots. kvtier's `free` checks every slot; of the others only the bitmask does."""
    as_for_cuda = KvCacheAllocator(SLOTS, pinned=False)
    as_for_cuda._copy = HandOut(pinned=False).copy  # indices in blocks that outlive them, as pinned ones are
    beside(KvCacheAllocator(SLOTS), SLOTS, 64, 30, 100, f"64 of {SLOTS:,} slots", {"alloc": 1.0})
    beside(KvCacheAllocator(SLOTS), SLOTS, LONG, 20, 8, f"{LONG:,} of {SLOTS:,} slots", {"alloc": 40.0})
    for count, calls in ((64, 1000), (LONG, 100)):
        times = timed({"alloc": lambda _, n=count: as_for_cuda.alloc(n), "free": as_for_cuda.free}, calls)  # type: ignore[misc]
        show(f"{count:,} of {SLOTS:,} slots, kvtier as with CUDA", times)
    for count, rounds in ((64, 2000), (LONG, 20)):
        allocator, random = KvCacheAllocator(SLOTS), np.random.default_rng(0)
        spent: dict[str, list[float]] = {"free in random order": [], "alloc, indices kept": []}
        for _ in range(rounds // (SLOTS // LONG)):
            held = []
            for _ in range(SLOTS // LONG):
                begun = time.perf_counter()
                held.append(allocator.alloc(count))
                spent["alloc, indices kept"].append((time.perf_counter() - begun) * 1e6)
            for given in random.permutation(np.concatenate(held)).reshape(-1, count):
                begun = time.perf_counter()
                allocator.free(given)
                spent["free in random order"].append((time.perf_counter() - begun) * 1e6)
        show(
            f"{count:,} of {SLOTS:,} slots", {name: statistics.median(times) for name, times in spent.items()}
        )
    allocator = KvCacheAllocator(SLOTS)
    times = timed({"alloc_runs": lambda _: allocator.alloc_runs(64, PAGE), "free": allocator.free}, 50)
    show(f"64 of {SLOTS:,} slots in runs of {PAGE}", times)


def pages() -> None:
    """Device pages. kvtier's have reference counts, a cached mark, and copies under way."""
    for size in (10_000, 1_000_000):
        for count, calls in ((1, 100), (8192, 10)):
            beside(PageAllocator(size), size, count, 20, calls, f"{count:,} of {size:,} pages")
    pages = PageAllocator(1_000_000)
    for count, rounds in ((1, 1000), (8192, 100)):
        chain = pages.alloc(count)
        parts: dict[str, Callable[[Any], Any]] = {
            "free, cached": lambda _, c=chain: pages.free(c, keep_cached=True),  # type: ignore[misc]
            "hit": lambda _, c=chain: pages.inc_ref(c),  # type: ignore[misc]
            "free": lambda _, c=chain: pages.free(c),  # type: ignore[misc]
            "evict": lambda _, n=count: pages.evict(n),  # type: ignore[misc]
            "alloc": lambda _, n=count: pages.alloc(n),  # type: ignore[misc]
        }
        # The pages that come are those that went: the stack gives back what it got last.
        show(f"{count:,} of 1,000,000 pages, cached by themselves", timed(parts, rounds))


def index() -> None:
    """The prefix index with a prompt of 131,072 tokens, whole and in the steps of a chunked prefill."""
    allocator = PageAllocator(4 * LONG // PAGE)
    cache = RadixCache(allocator, PAGE)
    random = np.random.default_rng(0)
    spent: dict[str, list[float]] = {"record": [], "lookup": [], "release": [], "evict": []}

    def clock(name: str, call: Callable[[], Any]) -> Any:
        begun = time.perf_counter()
        result = call()
        spent[name].append((time.perf_counter() - begun) * 1e6)
        return result

    for _ in range(40):
        tokens = random.integers(0, 50_000, LONG, dtype=np.int32)
        chain = allocator.alloc(LONG // PAGE)
        prefix, _ = cache.lookup(tokens)
        clock("record", lambda p=prefix, t=tokens, c=chain: cache.record(p, t, c))  # type: ignore[misc]
        allocator.free(chain)
        cache.release(prefix)
        prefix, found = clock("lookup", lambda t=tokens: cache.lookup(t))  # type: ignore[misc]
        allocator.free(found)
        clock("release", lambda p=prefix: cache.release(p))  # type: ignore[misc]
        clock("evict", lambda: cache.evict(LONG // PAGE - 1))
    times = {name: statistics.median(values) for name, values in spent.items()}
    show(f"index, {LONG:,} tokens in pages of {PAGE}", times, {"record": 20_000.0})


def tasks() -> None:
    """A task's life: 3,000 tokens cold and with a hit, and one decoded token with its record."""
    manager = MemoryManager(64_000, torch.float32, head_num=1, head_dim=1, layer_num=1)
    pool = ReqToTokenPool(16, 8192, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    life = TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, PAGE))
    random = np.random.default_rng(0)
    tokens = random.integers(0, 50_000, 3000, dtype=np.int32)

    def decode(_: object) -> None:
        life.task_extend("t", 7)
        life.task_cached("t", life.state("t").length)

    for name in ("cold, cache full", "hit"):
        spent: dict[str, list[float]] = {"alloc": [], "cached": [], "decode": [], "free": []}
        for _ in range(60):
            if name != "hit":
                tokens = random.integers(0, 50_000, 3000, dtype=np.int32)
            steps: dict[str, Callable[[Any], Any]] = {
                "alloc": lambda _, t=tokens: life.task_alloc("t", t),  # type: ignore[misc]
                "cached": lambda _: life.task_cached("t", 3000),
            }
            for step, value in timed(steps, 1).items():
                spent[step].append(value)
            spent["decode"].append(timed({"decode": decode}, 1, batch=64)["decode"])
            spent["free"].append(timed({"free": lambda _: life.task_free("t")}, 1)["free"])
        show(f"task of 3,000 tokens, {name}", {k: statistics.median(v) for k, v in spent.items()})


def main() -> None:
    print(f"median us on this machine; numpy {np.__version__}")
    for part in (slots, pages, index, tasks):
        part()


if __name__ == "__main__":
    main()
