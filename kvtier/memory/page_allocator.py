"""PageAllocator: device pages with reference counts, a cached mark, and copies under way.

May import numpy and the ground floor; single-threaded. Always true: a page is free exactly when nothing
refers to it, it is not cached, and no copy reads or writes it; only free pages are given out. Every call
takes many pages as one int32 array and costs O(1) a page at any size (W23).

A page is cached in one of two ways. `free(pages, keep_cached=True)` keeps it for an engine with an index of
its own: idle ones are evicted here, least recently used first, and the engine gives the tail of a chain back
before its head (W1). `keep` is for an index that knows the chains and chooses victims itself (`RadixCache`):
its pages are never evicted here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.memory.indices import Int32, check_range, int32_1d
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.page_lru import PageLru

Index = npt.NDArray[np.intp]


class PageAllocator:
    """Pages 0 .. pages - 1, all free at first."""

    def __init__(self, pages: int, owner: ThreadOwner | None = None) -> None:
        if pages < 1:
            raise UsageError(f"pages={pages}: expected one page or more")
        self.owner = owner or ThreadOwner()
        self.pages = pages
        self._top = 0  # _stack[_top:] are the free pages
        self._stack: Int32 = np.arange(pages, dtype=np.int32)
        self._refs: Int32 = np.zeros(pages, np.int32)
        self._reads: Int32 = np.zeros(pages, np.int32)  # copies that read the page (offloads)
        self._writes: Int32 = np.zeros(pages, np.int32)  # 1 while a copy writes the page (a load)
        self._cached: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)
        self._indexed: npt.NDArray[np.bool_] = np.zeros(pages, np.bool_)  # cached by `keep`
        self._lru = PageLru(pages)  # the idle ones among the others
        self._cached_count = 0
        self._copying_count = 0
        self._mark: Int32 = np.zeros(pages, np.int32)  # scratch: finds a page that is named twice

    @property
    def free_pages(self) -> int:
        """How many pages `alloc` can give now."""
        return self.pages - self._top

    @property
    def cached_pages(self) -> int:
        """How many pages are cached, referenced or not."""
        return self._cached_count

    @property
    def evictable_pages(self) -> int:
        """How many pages `evict` can free now."""
        return len(self._lru)

    @property
    def copying_pages(self) -> int:
        """How many pages a copy reads or writes."""
        return self._copying_count

    def alloc(self, count: int) -> Int32 | None:
        """`count` free pages with one reference each, as a new int32 array; None if fewer are free.

        Never evicts: the caller does so first, and hears which pages went.
        """
        self.owner.check("PageAllocator.alloc")
        if count < 0:
            raise UsageError(f"alloc({count}): expected 0 or more pages")
        end = self._top + count
        if end > self.pages:
            return None
        pages: Int32 = self._stack[self._top : end].copy()
        self._refs[pages] = 1
        self._top = end
        return pages

    def inc_ref(self, pages: Any) -> None:
        """One more reference to each page. UsageError that names it for a free page (W12)."""
        self.owner.check("PageAllocator.inc_ref")
        pages = self._known(pages, "inc_ref")
        dead = (self._refs[pages] == 0) & ~self._cached[pages]
        if dead.any():
            raise UsageError(f"inc_ref: page {pages[dead.argmax()]} is not in use and not cached")
        self._refs[pages] += 1
        self._lru.remove(pages)

    def free(self, pages: Any, keep_cached: bool = False) -> None:
        """Drop one reference to each page; what nobody needs any more is free.

        `keep_cached`: the pages hold KV that may be asked for again. They stay cached, the last one named as
        the youngest, until `evict` or `drop` takes them. UsageError that names the page, and nothing changed,
        where a page has no reference (W10), does not exist (W11), or is to be cached while a copy writes it.
        A page that is cached stays so; one that a copy still reads or writes is free when that copy ends.
        """
        self.owner.check("PageAllocator.free")
        pages = self._known(pages, "free")
        unreferenced = self._refs[pages] == 0
        if unreferenced.any():
            raise UsageError(f"free: page {pages[unreferenced.argmax()]} has no reference (double free)")
        if keep_cached:
            written = self._writes[pages] > 0
            if written.any():
                raise UsageError(f"free: page {pages[written.argmax()]} cannot be cached: a copy writes it")
            self._cached_count += int(np.count_nonzero(~self._cached[pages]))
            self._cached[pages] = True
        self._refs[pages] -= 1
        self._reclaim(pages)

    def touch(self, pages: Any) -> None:
        """Cached pages were used: the idle ones become the youngest, the last one named the very youngest."""
        self.owner.check("PageAllocator.touch")
        pages = self._known(pages, "touch")
        absent = ~self._cached[pages]
        if absent.any():
            raise UsageError(f"touch: page {pages[absent.argmax()]} is not cached")
        self._lru.add(pages[self._lru.contains(pages)])

    def evict(self, count: int) -> Int32 | None:
        """Free the `count` least recently used idle cached pages; answers which, oldest first (W13).

        None, and nothing changed, when fewer can go (W3). Pages that an index keeps are not among them.
        """
        self.owner.check("PageAllocator.evict")
        if count < 0:
            raise UsageError(f"evict({count}): expected 0 or more pages")
        if count > len(self._lru):
            return None
        victims = self._lru.pop(count)
        self._uncache(victims.astype(np.intp))
        return victims

    def ref_count(self, page: int) -> int:
        """References to `page`."""
        return int(self._refs[self._known([page], "ref_count")[0]])

    def begin_read(self, pages: Any) -> None:
        """A copy reads these pages from now on: none is reused before `end_read` (W26-28)."""
        self.owner.check("PageAllocator.begin_read")
        pages = self._known(pages, "begin_read")
        dead = (self._refs[pages] == 0) & ~self._cached[pages]
        if dead.any():
            raise UsageError(f"begin_read: page {pages[dead.argmax()]} is not in use and not cached")
        self._copying_count += int(np.count_nonzero(self._reads[pages] + self._writes[pages] == 0))
        self._reads[pages] += 1
        self._lru.remove(pages)

    def end_read(self, pages: Any) -> None:
        """The copy that read these pages is final."""
        self.owner.check("PageAllocator.end_read")
        pages = self._known(pages, "end_read")
        idle = self._reads[pages] == 0
        if idle.any():
            raise UsageError(f"end_read: no copy reads page {pages[idle.argmax()]}")
        self._reads[pages] -= 1
        self._copying_count -= int(np.count_nonzero(self._reads[pages] + self._writes[pages] == 0))
        self._reclaim(pages)

    def begin_write(self, pages: Any) -> None:
        """A copy writes these pages from now on; each must be one request's own (W6)."""
        self.owner.check("PageAllocator.begin_write")
        pages = self._known(pages, "begin_write")
        self._check_own(pages, "begin_write")
        self._copying_count += int(np.count_nonzero(self._reads[pages] == 0))
        self._writes[pages] = 1

    def end_write(self, pages: Any) -> None:
        """The copy that wrote these pages is final, well or not."""
        self.owner.check("PageAllocator.end_write")
        pages = self._known(pages, "end_write")
        idle = self._writes[pages] == 0
        if idle.any():
            raise UsageError(f"end_write: no copy writes page {pages[idle.argmax()]}")
        self._writes[pages] = 0
        self._copying_count -= int(np.count_nonzero(self._reads[pages] == 0))
        self._reclaim(pages)

    def check_writable(self, pages: Any) -> None:
        """UsageError that names the page where one is shared, cached, free, or written by a copy (W6)."""
        self.owner.check("PageAllocator.check_writable")
        self._check_own(self._known(pages, "write"), "write")

    def _check_own(self, pages: Index, what: str) -> None:
        wrong = (self._refs[pages] != 1) | self._cached[pages] | (self._writes[pages] > 0)
        if wrong.any():
            page = pages[wrong.argmax()]
            raise UsageError(
                f"{what}: page {page} is not one request's own to write: {self._refs[page]} references, "
                f"cached={bool(self._cached[page])}, written by a copy={bool(self._writes[page])}"
            )

    # What a prefix index (RadixCache) calls.

    def keep(self, pages: Any) -> None:
        """The index keeps these pages: without a reference too they are not free, until it drops them."""
        pages = self._known(pages, "keep")
        wrong = (self._refs[pages] == 0) | self._cached[pages] | (self._writes[pages] > 0)
        if wrong.any():
            page = pages[wrong.argmax()]
            raise UsageError(
                f"keep: page {page} cannot be cached: {self._refs[page]} references, "
                f"cached={bool(self._cached[page])}, being written={bool(self._writes[page])}"
            )
        self._cached[pages] = self._indexed[pages] = True
        self._cached_count += len(pages)

    def drop(self, pages: Any) -> int:
        """These pages are cached no longer; answers how many are free by that."""
        pages = self._known(pages, "drop")
        absent = ~self._cached[pages]
        if absent.any():
            raise UsageError(f"drop: page {pages[absent.argmax()]} is not cached")
        self._lru.remove(pages)
        return self._uncache(pages)

    def _uncache(self, pages: Index) -> int:
        self._cached[pages] = self._indexed[pages] = False
        self._cached_count -= len(pages)
        return self._reclaim(pages)

    def is_cached(self, page: int) -> bool:
        """Whether `page` is cached."""
        return bool(self._cached[self._known([page], "is_cached")[0]])

    def is_busy(self, page: int) -> bool:
        """Whether a task refers to `page`, or a copy reads or writes it."""
        return bool(self._refs[page] or self._reads[page] or self._writes[page])

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken. O(pages)."""
        self.owner.check("PageAllocator.check")
        free = np.zeros(self.pages, np.bool_)
        free[self._stack[self._top :]] = True
        if int(free.sum()) != self.free_pages:
            raise RuntimeError("a page is in the free stack twice")
        in_use = (self._refs > 0) | self._cached | (self._reads > 0) | (self._writes > 0)
        wrong = free == in_use
        if wrong.any():
            page = int(wrong.argmax())
            raise RuntimeError(f"page {page}: free={bool(free[page])}, but in use={bool(in_use[page])}")
        if (self._refs < 0).any() or (self._reads < 0).any() or (self._writes < 0).any():
            raise RuntimeError("a count is negative")
        if (self._cached & (self._writes > 0)).any():
            raise RuntimeError("a cached page is being written")
        copying = (self._reads > 0) | (self._writes > 0)
        if int(copying.sum()) != self._copying_count or int(self._cached.sum()) != self._cached_count:
            raise RuntimeError("the counts of cached pages or of pages being copied are wrong")
        self._lru.check()
        evictable = self._cached & ~self._indexed & (self._refs == 0) & ~copying
        if not np.array_equal(self._lru.contains(np.arange(self.pages)), evictable):
            raise RuntimeError("pages that could be evicted are not those in the queue")

    def check_counts(self, refs: Int32, copies: Int32) -> None:
        """Raise RuntimeError where a page's counts are not `refs` and `copies`, those of its holders."""
        wrong = (self._refs != refs) | (self._reads + self._writes != copies)
        if wrong.any():
            page = int(wrong.argmax())
            raise RuntimeError(
                f"page {page}: {self._refs[page]} references and {self._reads[page] + self._writes[page]} "
                f"copies, but its holders count {refs[page]} and {copies[page]}"
            )

    def _known(self, pages: Any, what: str) -> Index:
        """`pages` as an index, which reads and writes with least work: each existing and named once."""
        numbers = int32_1d(pages, "pages")
        check_range(numbers, self.pages, f"{what}: page")
        known: Index = numbers.astype(np.intp)
        if len(known) > 1:
            order = np.arange(len(known), dtype=np.int32)
            self._mark[known] = order
            repeated = self._mark[known] != order
            if repeated.any():
                raise UsageError(f"{what}: page {known[repeated.argmax()]} is named twice in one call")
        return known

    def _reclaim(self, pages: Index) -> int:
        """Put those of `pages` that nothing needs on the free stack, in their order; answers how many.

        Those that are only cached, by no index, become the youngest that may be evicted.
        """
        busy = (self._refs[pages] > 0) | (self._reads[pages] > 0) | (self._writes[pages] > 0)
        cached = self._cached[pages]
        idle = pages[~(busy | cached)]
        self._stack[self._top - len(idle) : self._top] = idle
        self._top -= len(idle)
        if cached.any():
            self._lru.add(pages[cached & ~busy & ~self._indexed[pages]])
        return len(idle)
