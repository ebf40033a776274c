"""How a task's token positions get their slots: the strategy protocol, and pages with a shared prefix cache.

May import numpy and the ground floor; single-threaded. Always true: slot = page * page_size + offset; a task
writes only pages that are its own; a failed call changes nothing.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtier.errors import UsageError
from kvtier.memory.allocator import Int32, KvCacheAllocator
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import RadixCache
from kvtier.memory.request_pool import ReqToTokenPool


@dataclass
class TaskCacheState:
    """One task (a request) on the device.

    `req_idx`: its row in `ReqToTokenPool`. `length`: positions that have slots. `cached`: tokens whose KV the
    device had when the task came. `filled`: tokens, from the first on, whose KV is known to be in their
    slots. `recorded`: how many of its pages are in the prefix cache. `pages`: its device pages in order.
    """

    req_idx: int
    namespace: bytes = b""
    length: int = 0
    cached: int = 0
    filled: int = 0
    recorded: int = 0
    epoch: int = 0
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: array[int] = field(default_factory=lambda: array("i"))


class AllocationStrategy(Protocol):
    """Who gets which slots. A strategy claims its whole allocator: slots come from it only."""

    capacity: int
    """Tokens that one task can have at most."""

    def alloc(self, state: TaskCacheState, prompt_ids: array[int], match_limit: int | None = None) -> bool:
        """Slots for a prompt; sets the state. False, and nothing changed, when there is no room."""

    def extend(self, state: TaskCacheState, pos: int, tokens: array[int]) -> bool:
        """Slots for `tokens` from position `pos` (== state.length) on. False, nothing changed, if full."""

    def slots(self, state: TaskCacheState, start: int, stop: int) -> Int32:
        """The slots of positions start .. stop - 1, as a new array."""

    def check_writable(self, state: TaskCacheState, start: int, stop: int) -> None:
        """UsageError where the task may not write positions start .. stop - 1."""

    def write_indices(self, state: TaskCacheState, pool: ReqToTokenPool, start: int = 0) -> None:
        """Write the slots of positions `start` .. into the task's row."""

    def record_hashes(self, state: TaskCacheState) -> None:
        """Let later tasks share what is filled and whole."""

    def free(self, state: TaskCacheState) -> None:
        """Give the task's slots back; what was recorded stays cached."""


class PagedStrategy:
    """Pages of `page_size` tokens, shared by equal prefixes through a `RadixCache`."""

    def __init__(self, allocator: KvCacheAllocator, page_size: int) -> None:
        raise NotImplementedError


def _unused() -> tuple[object, ...]:
    return (UsageError, PageAllocator, RadixCache)
