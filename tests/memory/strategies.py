"""The strategies that the contract suite runs on (the fixture `make` is in conftest.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtier.memory import (
    AllocationStrategy,
    ContiguousStrategy,
    KvCacheAllocator,
    MemoryManager,
    PagedStrategy,
    ReqToTokenPool,
    TaskCacheManager,
)

SIZE, ROWS, LONGEST = 60, 8, 20
STRATEGIES: dict[str, Callable[[KvCacheAllocator], AllocationStrategy]] = {
    "pages of 1": lambda allocator: PagedStrategy(allocator, 1),
    "pages of 4": lambda allocator: PagedStrategy(allocator, 4),
    "pages of 7": lambda allocator: PagedStrategy(allocator, 7),
    "ranges": lambda allocator: ContiguousStrategy(allocator, LONGEST),
}
Make = Callable[..., TaskCacheManager]


def maker(name: str) -> Make:
    """Makes task managers on the strategy of that name."""

    def tasks(size: int = SIZE, length: int = LONGEST, **options: Any) -> TaskCacheManager:
        manager = MemoryManager(size, torch.int64, head_num=1, head_dim=1, layer_num=2, **options)
        pool = ReqToTokenPool(ROWS, length, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
        return TaskCacheManager(manager, pool, STRATEGIES[name](manager.allocator))

    return tasks


def fill(tasks: TaskCacheManager, length: int = LONGEST) -> list[str]:
    """Begin tasks of different tokens until none fits."""
    names: list[str] = []
    while True:
        name, first = f"task {len(names)}", 1000 * (len(names) + 1)
        if tasks.task_alloc(name, list(range(first, first + length))) is None:
            return names
        names.append(name)


def snapshot(tasks: TaskCacheManager) -> tuple[object, ...]:
    stats = {name: count for name, count in tasks.stats().items() if name != "refused"}
    return stats, tasks.req_pool.host.tolist(), tasks.req_pool.free_rows, tasks.manager.size
