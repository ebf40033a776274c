"""What tests of `memory/` build on: a task manager over small pages, an index, a task's whole life."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvtier.memory import (
    MemoryManager,
    PageAllocator,
    PagedStrategy,
    RadixCache,
    ReqToTokenPool,
    TaskCacheManager,
)

PAGE = 4


def make_tasks(pages: int = 16, rows: int = 4, length: int = 64) -> TaskCacheManager:
    manager = MemoryManager(pages * PAGE, torch.float32, head_num=1, head_dim=2, layer_num=2)
    pool = ReqToTokenPool(rows, length, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    return TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, PAGE))


def make_cache(pages: int = 16) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(pages)
    return allocator, RadixCache(allocator, PAGE)


def add(pages: PageAllocator, cache: RadixCache, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """A task that computed `tokens` (whole pages) and ended; answers the chain's pages."""
    prefix, shared = cache.lookup([*tokens, 0], namespace=namespace)
    own = pages.alloc(len(tokens) // PAGE - len(shared))
    assert own is not None
    chain = np.concatenate((shared, own))
    cache.record(prefix, tokens, chain)
    pages.free(chain)
    cache.release(prefix)
    return [int(page) for page in chain]


def known(pages: PageAllocator, cache: RadixCache, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """The pages that a look-up finds for all of `tokens`, given back at once."""
    prefix, found = cache.lookup([*tokens, 0], namespace=namespace)
    pages.free(found)
    cache.release(prefix)
    return [int(page) for page in found]


def run(tasks: TaskCacheManager, name: str, tokens: list[int], **options: Any) -> int:
    """A task from prompt to end; answers how many tokens were cached."""
    state = tasks.task_alloc(name, tokens, **options)
    assert state is not None
    tasks.task_cached(name, len(tokens))
    tasks.task_free(name)
    tasks.check()
    return state.cached


def snapshot(tasks: TaskCacheManager) -> tuple[object, ...]:
    stats = {key: value for key, value in tasks.stats().items() if key != "refused"}
    return stats, tasks.req_pool.host.copy().tolist(), tasks.req_pool.free_rows
