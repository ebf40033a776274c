"""What device-side allocation costs on the engine's thread. Prints medians and asserts nothing.

python benchmarks/memory.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.task_cache import TaskCacheManager

PAGE = 16
LONG = 131_072


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


def show(what: str, times: dict[str, float]) -> None:
    print(f"{what:<58}" + "   ".join(f"{name} {value:9.2f} us" for name, value in times.items()))


def slots() -> None:
    """Alloc and free of token slots: in the order given out, and in random order.

    `alloc`: indices dropped before the next call. `kept`: indices kept, so that those of the next call lie
    in memory that is new to the process: for long ones its page faults are most of the time.
    """
    for count, target in ((64, "target 1 us"), (LONG, "target 40 us")):
        allocator = KvCacheAllocator(8 * LONG)
        calls = min(1000, 8 * LONG // count)
        spent: dict[str, list[float]] = {"alloc": [], "kept": [], "free": [], "free shuffled": []}
        random = np.random.default_rng(0)

        def clock(name: str, call: Callable[[Any], Any], given: Any, spent: Any = spent) -> Any:
            begun = time.perf_counter()
            result = call(given)
            spent[name].append((time.perf_counter() - begun) * 1e6)
            return result

        for _ in range(20):
            for _ in range(calls):
                allocator.free(clock("alloc", allocator.alloc, count))
            for name in ("free", "free shuffled"):
                held = [clock("kept", allocator.alloc, count) for _ in range(calls)]
                if name != "free":
                    held = list(random.permutation(np.concatenate(held)).reshape(-1, count))
                for given in held:
                    clock(name, allocator.free, given)
                del held
        times = {name: statistics.median(values) for name, values in spent.items()}
        show(f"{count} of {8 * LONG} slots ({target})", times)


def pages() -> None:
    """Alloc and free of device pages, at two sizes of the allocator."""
    for size in (10_000, 1_000_000):
        for count, batch in ((1, 100), (8192, 1)):
            allocator = PageAllocator(size)
            times = timed({"alloc + free": lambda _, a=allocator, n=count: a.free(a.alloc(n))}, 200, batch)  # type: ignore[misc]
            show(f"{count} of {size} pages", times)


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
    show(f"index, {LONG} tokens in pages of {PAGE} (record: target 20 ms)", times)


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
