"""How a task's token positions get their slots: the strategy protocol, and pages with a shared prefix cache.

May import numpy and the ground floor; single-threaded. Always true: slot = page * page_size + offset; a task
writes only pages that are its own; a failed call changes nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtier.errors import UsageError
from kvtier.memory.allocator import Int32, KvCacheAllocator
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool


@dataclass
class TaskCacheState:
    """One task (a request) on the device.

    `req_idx`: its row in `ReqToTokenPool`. `length`: positions that have slots. `cached`: tokens whose KV the
    device had when the task came. `filled`: tokens, from the first on, whose KV is known to be in their
    slots. `recorded`: how many of its pages were offered to the prefix cache. `copies`: loads and offloads of
    its pages that are not final. `ended`: freed. `pages`: its device pages in token order.
    """

    req_idx: int
    namespace: bytes = b""
    length: int = 0
    cached: int = 0
    filled: int = 0
    recorded: int = 0
    copies: int = 0
    ended: bool = False
    prefix: Prefix | None = None
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: array[int] = field(default_factory=lambda: array("i"))


class AllocationStrategy(Protocol):
    """Who gets which slots. A strategy claims its whole allocator: slots come from it only."""

    capacity: int
    """Tokens that one task can have at most."""

    owner: ThreadOwner
    """The allocator's."""

    def alloc(self, state: TaskCacheState, prompt_ids: array[int], match_limit: int | None = None) -> bool:
        """Slots for a prompt; fills the state. False, and nothing changed, when there is no room.

        At most `min(len(prompt_ids) - 1, match_limit)` tokens are shared with others.
        """
        ...

    def extend(self, state: TaskCacheState, pos: int, tokens: array[int]) -> bool:
        """Slots for `tokens` from position `pos` (== state.length) on. False, nothing changed, if full."""
        ...

    def slots(self, state: TaskCacheState, start: int, stop: int) -> Int32:
        """The slots of positions start .. stop - 1, as a new array."""
        ...

    def check_writable(self, state: TaskCacheState, start: int, stop: int) -> None:
        """UsageError where the task may not write positions start .. stop - 1 (W6)."""
        ...

    def write_indices(self, state: TaskCacheState, pool: ReqToTokenPool, start: int = 0) -> None:
        """Write the slots of positions `start` .. into the task's row, at once (W25)."""
        ...

    def record_hashes(self, state: TaskCacheState) -> None:
        """Let later tasks share what is filled and whole: the pages' tokens, where others hash."""
        ...

    def free(self, state: TaskCacheState) -> None:
        """Give the task's slots back; what was recorded stays cached."""
        ...

    def begin_copy(self, state: TaskCacheState, start: int, stop: int, writes: bool) -> Int32:
        """A copy reads or writes these positions: what it touches is not reused before `end_copy`.

        The pages that are held; UsageError, and nothing changed, where a copy that writes may not.
        """
        ...

    def end_copy(self, state: TaskCacheState, pages: Int32, writes: bool) -> None:
        """That copy is final, well or not; the task may have ended meanwhile."""
        ...

    def flush(self) -> int:
        """Forget what is shared; answers how many pages are free by that."""
        ...

    def stats(self) -> dict[str, int]:
        """Counts of pages."""
        ...

    def check(self, states: Iterable[TaskCacheState], copies: Iterable[Int32]) -> None:
        """Raise where an invariant is broken; `states` are all tasks, `copies` all pages under copy."""
        ...


class PagedStrategy:
    """Pages of `page_size` tokens (1 included), shared by equal prefixes through a `RadixCache`."""

    def __init__(self, allocator: KvCacheAllocator, page_size: int) -> None:
        if page_size < 1 or page_size > allocator.size:
            raise UsageError(f"page_size={page_size}: expected 1 .. {allocator.size}, the allocator's slots")
        allocator.claim(f"PagedStrategy(page_size={page_size})")
        self.owner = allocator.owner
        self.page_size = page_size
        self.pages = PageAllocator(allocator.size // page_size, allocator.owner)
        self.cache = RadixCache(self.pages, page_size)
        self.capacity = self.pages.pages * page_size
        self._offsets: Int32 = np.arange(page_size, dtype=np.int32)

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
            "pages": self.pages.pages,
            "pages_free": self.pages.free_pages,
            "pages_cached": self.pages.cached_pages,
            "pages_evictable": self.cache.evictable_pages,
            "pages_copying": self.pages.copying_pages,
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
