"""PagedStrategy: device pages, shared by equal prefixes.

May import the rest of `memory/`; single-threaded. Always true: slot = page * page_size + offset; a task's
pages in front are shared and never written, those behind are its own; a page that a copy reads or writes is
not reused before that copy is final, whatever became of its task.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from kvtier.errors import UsageError
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.indices import Int32
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import TaskCacheState


class PagedStrategy:
    """Pages of `page_size` tokens (1 included), shared by equal prefixes through a `RadixCache`."""

    pages: PageAllocator
    cache: RadixCache
    capacity: int

    def __init__(self, allocator: KvCacheAllocator, page_size: int) -> None:
        self.owner = allocator.owner
        self.allocator = allocator
        self.page_size = page_size
        self._offsets: Int32 = np.arange(max(page_size, 0), dtype=np.int32)
        self._counts: dict[str, int] = {}
        self.check_size(allocator.size)
        self.claim()

    def check_size(self, new_size: int) -> None:
        if not 1 <= self.page_size <= new_size:
            raise UsageError(f"page_size={self.page_size}: expected 1 .. {new_size}, the allocator's slots")

    def claim(self) -> None:
        self.allocator.claim(f"PagedStrategy(page_size={self.page_size})")
        self.pages = PageAllocator(self.allocator.size // self.page_size, self.owner)
        self.cache = RadixCache(self.pages, self.page_size)
        self.cache.counts.update(self._counts)
        self.capacity = self.pages.pages * self.page_size

    def unclaim(self) -> None:
        self._counts = self.cache.counts
        self.allocator.unclaim()

    @property
    def free_slots(self) -> int:
        return (self.pages.free_pages + self.cache.evictable_pages) * self.page_size

    def alloc(self, state: TaskCacheState, prompt_ids: array[int], match_limit: int | None = None) -> bool:
        length = len(prompt_ids)
        prefix, shared = self.cache.lookup(prompt_ids, limit=match_limit, namespace=state.namespace)
        own = self._take(-(-length // self.page_size) - len(shared))
        if own is None:
            self.pages.free(shared)
            self.cache.release(prefix)
            return False
        state.prefix = prefix
        state.pages = np.concatenate((shared, own))
        state.length = length
        state.cached = state.filled = len(shared) * self.page_size
        state.recorded = len(shared)
        state.tokens = array("i", prompt_ids)
        return True

    def extend(self, state: TaskCacheState, pos: int, tokens: array[int]) -> bool:
        if pos != state.length:
            raise UsageError(
                f"extend at position {pos}: the task has {state.length} positions, without a gap (W9)"
            )
        length = pos + len(tokens)
        missing = -(-length // self.page_size) - len(state.pages)
        if missing:
            own = self._take(missing)
            if own is None:
                return False
            state.pages = np.concatenate((state.pages, own))
        state.length = length
        state.tokens.extend(tokens)
        return True

    def _take(self, count: int) -> Int32 | None:
        """`count` new pages, after evicting what they need; None, and nothing changed, when too few."""
        short = count - self.pages.free_pages
        if short > 0 and self.cache.evict(short) is None:
            return None
        return self.pages.alloc(count)

    def slots(self, state: TaskCacheState, start: int, stop: int) -> Int32:
        first = start // self.page_size
        pages = state.pages[first : -(-stop // self.page_size)]
        slots: Int32 = (pages[:, None] * np.int32(self.page_size) + self._offsets).ravel()
        skipped = first * self.page_size
        part: Int32 = slots[start - skipped : stop - skipped]
        return part

    def check_writable(self, state: TaskCacheState, start: int, stop: int) -> None:
        self.pages.check_writable(self._pages_of(state, start, stop))

    def write_indices(self, state: TaskCacheState, pool: ReqToTokenPool, start: int = 0) -> None:
        pool.write(state.req_idx, start, self.slots(state, start, state.length))

    def record_hashes(self, state: TaskCacheState) -> None:
        whole = state.filled // self.page_size
        if whole <= state.recorded:
            return
        tokens = np.array(state.tokens[: whole * self.page_size], np.int32)
        self.cache.record(_prefix(state), tokens, state.pages[:whole])
        state.recorded = whole

    def free(self, state: TaskCacheState) -> None:
        self.pages.free(state.pages)
        state.ended = True
        if not state.copies:
            self.cache.release(_prefix(state))

    def begin_copy(self, state: TaskCacheState, start: int, stop: int, writes: bool) -> Int32:
        pages = self._pages_of(state, start, stop)
        if writes:
            self.pages.begin_write(pages)
        else:
            self.pages.begin_read(pages)
        state.copies += 1
        return pages

    def end_copy(self, state: TaskCacheState, pages: Int32, writes: bool) -> None:
        if writes:
            self.pages.end_write(pages)
        else:
            self.pages.end_read(pages)
        state.copies -= 1
        # A task that ended meanwhile left its pin, so that what is being copied was never evictable.
        if state.ended and not state.copies:
            self.cache.release(_prefix(state))

    def flush(self) -> int:
        return self.cache.flush()

    def stats(self) -> dict[str, int]:
        return {
            **self.cache.counts,
            "slots_free": self.free_slots,
            "copying": self.pages.copying_pages,
            "pages": self.pages.pages,
            "pages_free": self.pages.free_pages,
            "pages_cached": self.pages.cached_pages,
            "pages_evictable": self.cache.evictable_pages,
        }

    def check(self, states: Iterable[TaskCacheState], copies: Iterable[Int32]) -> None:
        self.pages.check()
        self.cache.check()
        refs = np.zeros(self.pages.pages, np.int32)
        copying = np.zeros(self.pages.pages, np.int32)
        for state in states:
            np.add.at(refs, state.pages, 1)
        for pages in copies:
            np.add.at(copying, pages, 1)
        self.pages.check_counts(refs, copying)

    def _pages_of(self, state: TaskCacheState, start: int, stop: int) -> Int32:
        return state.pages[start // self.page_size : -(-stop // self.page_size)].copy()


def _prefix(state: TaskCacheState) -> Prefix:
    if state.prefix is None:
        raise UsageError("this task has no slots")
    return state.prefix
