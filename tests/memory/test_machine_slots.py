"""State machines over the token allocator and the page allocator, each against a naive model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import UsageError
from kvtier.memory import (
    KvCacheAllocator,
    PageAllocator,
)
from tests.memory.naive import SELDOM

SIZE = 12
FORMS = st.sampled_from([list, np.array, lambda s: np.array(s, np.int64), lambda s: torch.tensor(s)])


class AllocatorMachine(RuleBasedStateMachine):
    """KvCacheAllocator against a set."""

    def __init__(self) -> None:
        super().__init__()
        self.count = np.zeros(1, np.int64)
        self.slots = KvCacheAllocator(SIZE, free_count=self.count.data)
        self.used: set[int] = set()
        self.given: list[tuple[Any, list[int]]] = []

    @rule(count=st.integers(-1, SIZE + 2))
    def alloc(self, count: int) -> None:
        if 0 <= count <= self.slots.size - len(self.used):
            given = self.slots.alloc(count)
            assert given.dtype == np.int32
            assert len(set(given.tolist())) == count
            assert not self.used & set(given.tolist())
            self.used |= set(given.tolist())
            self.given.append((given, given.tolist()))
        else:
            with pytest.raises(UsageError, match=str(count)):
                self.slots.alloc(count)

    @rule(runs=st.integers(0, 4), run=st.integers(1, 4))
    def alloc_runs(self, runs: int, run: int) -> None:
        free = set(range(self.slots.size)) - self.used
        whole = [r for r in range(self.slots.size // run) if set(range(r * run, (r + 1) * run)) <= free]
        assert self.slots.free_runs(run) == len(whole)
        if runs > len(whole):
            with pytest.raises(UsageError, match=f"{runs} whole runs needed, {len(whole)} left"):
                self.slots.alloc_runs(runs * run, run)
            return
        given = self.slots.alloc_runs(runs * run, run)
        assert given.reshape(-1, run).tolist() == [list(range(a, a + run)) for a in given[::run]]
        assert {int(slot) // run for slot in given} <= set(whole)
        self.used |= set(given.tolist())
        self.given.append((given, given.tolist()))

    @rule(data=st.data(), form=FORMS)
    def free(self, data: st.DataObject, form: Any) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True)) if self.used else []
        self.slots.free(form(slots) if slots else slots)
        self.used -= set(slots)

    @rule(slots=st.lists(st.integers(-2, SIZE + 1), min_size=1, max_size=5))
    def free_what_may_be_wrong(self, slots: list[int]) -> None:
        if set(slots) <= self.used and len(set(slots)) == len(slots):
            self.slots.free(slots)
            self.used -= set(slots)
        else:
            with pytest.raises(UsageError, match="slot"):
                self.slots.free(slots)

    @rule(size=st.integers(1, SIZE))
    def resize(self, size: int) -> None:
        if self.used:
            with pytest.raises(UsageError, match="in use"):
                self.slots.resize(size)
        else:
            self.slots.resize(size)

    @rule(now=SELDOM)
    def free_all(self, now: bool) -> None:
        if not now:
            return
        self.slots.free_all()
        self.used.clear()

    @invariant()
    def agrees(self) -> None:
        self.slots.check()
        assert self.slots.can_use_mem_size == self.slots.size - len(self.used) == self.count[0]
        for given, then in self.given:
            assert given.tolist() == then


class PageMachine(RuleBasedStateMachine):
    """PageAllocator against counters, and a list of idle cached pages in the order of their last use."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(SIZE)
        self.refs: Counter[int] = Counter()
        self.reads: Counter[int] = Counter()
        self.writes: set[int] = set()
        self.cached: set[int] = set()
        self.indexed: set[int] = set()  # cached by an index, never evicted here
        self.lru: list[int] = []

    def settle(self, pages: list[int]) -> None:
        """These pages changed: which are idle and cached now, the last one the youngest."""
        for page in pages:
            idle = page in self.cached - self.indexed - self.writes and not self.refs[page] + self.reads[page]
            if not idle and page in self.lru:
                self.lru.remove(page)
            elif idle and page not in self.lru:
                self.lru.append(page)

    def busy(self, page: int) -> bool:
        return page in self.cached or bool(self.refs[page] or self.reads[page]) or page in self.writes

    def attempt(self, call: Any, pages: list[int], allowed: Any) -> bool:
        """Call it; it must succeed exactly when every page is allowed and named once."""
        if len(set(pages)) == len(pages) and all(0 <= page < SIZE and allowed(page) for page in pages):
            call(pages)
            return True
        with pytest.raises(UsageError, match="page"):
            call(pages)
        return False

    PAGES = st.lists(st.integers(-1, SIZE), max_size=4)

    @rule(count=st.integers(0, SIZE + 1))
    def alloc(self, count: int) -> None:
        free = [page for page in range(SIZE) if not self.busy(page)]
        given = self.pages.alloc(count)
        if count > len(free):
            assert given is None
            return
        assert given is not None
        assert len(given) == count
        assert set(given.tolist()) <= set(free)
        self.refs.update(given.tolist())

    @rule(pages=PAGES)
    def inc_ref(self, pages: list[int]) -> None:
        if self.attempt(self.pages.inc_ref, pages, lambda p: self.refs[p] or p in self.cached):
            self.refs.update(pages)
            self.settle(pages)

    @rule(pages=PAGES)
    def free(self, pages: list[int]) -> None:
        if self.attempt(self.pages.free, pages, lambda p: self.refs[p]):
            self.refs.subtract(pages)
            self.settle(pages)

    @rule(pages=PAGES)
    def free_and_keep(self, pages: list[int]) -> None:
        if self.attempt(
            lambda p: self.pages.free(p, keep_cached=True),
            pages,
            lambda p: self.refs[p] and p not in self.writes,
        ):
            self.refs.subtract(pages)
            self.cached |= set(pages)
            self.settle(pages)

    @rule(pages=PAGES)
    def touch(self, pages: list[int]) -> None:
        if self.attempt(self.pages.touch, pages, lambda p: p in self.cached):
            moved = [page for page in pages if page in self.lru]
            self.lru = [page for page in self.lru if page not in moved] + moved

    @rule(count=st.integers(0, 5))
    def evict(self, count: int) -> None:
        victims = self.pages.evict(count)
        if count > len(self.lru):
            assert victims is None
            return
        assert victims is not None
        assert victims.tolist() == self.lru[:count]
        self.cached -= set(self.lru[:count])
        self.lru = self.lru[count:]

    @rule(pages=PAGES)
    def keep(self, pages: list[int]) -> None:
        if self.attempt(
            lambda p: self.pages.keep(np.array(p, np.int32)),
            pages,
            lambda p: self.refs[p] and p not in self.cached and p not in self.writes,
        ):
            self.cached |= set(pages)
            self.indexed |= set(pages)

    @rule(pages=PAGES)
    def drop(self, pages: list[int]) -> None:
        before = self.pages.free_pages
        freed: list[int] = []
        if self.attempt(
            lambda p: freed.append(self.pages.drop(np.array(p, np.int32))), pages, lambda p: p in self.cached
        ):
            self.cached -= set(pages)
            self.indexed -= set(pages)
            self.settle(pages)
            assert freed == [self.pages.free_pages - before]

    @rule(pages=PAGES)
    def begin_read(self, pages: list[int]) -> None:
        if self.attempt(self.pages.begin_read, pages, lambda p: self.refs[p] or p in self.cached):
            self.reads.update(pages)
            self.settle(pages)

    @rule(pages=PAGES)
    def end_read(self, pages: list[int]) -> None:
        if self.attempt(self.pages.end_read, pages, lambda p: self.reads[p]):
            self.reads.subtract(pages)
            self.settle(pages)

    def own(self, page: int) -> bool:
        return self.refs[page] == 1 and page not in self.cached and page not in self.writes

    @rule(pages=PAGES)
    def begin_write(self, pages: list[int]) -> None:
        if self.attempt(self.pages.begin_write, pages, self.own):
            self.writes |= set(pages)

    @rule(pages=PAGES)
    def check_writable(self, pages: list[int]) -> None:
        self.attempt(self.pages.check_writable, pages, self.own)

    @rule(pages=PAGES)
    def end_write(self, pages: list[int]) -> None:
        if self.attempt(self.pages.end_write, pages, lambda p: p in self.writes):
            self.writes -= set(pages)

    @invariant()
    def agrees(self) -> None:
        self.pages.check()
        assert self.pages.free_pages == sum(not self.busy(page) for page in range(SIZE))
        assert [self.pages.ref_count(p) for p in range(SIZE)] == [self.refs[p] for p in range(SIZE)]
        assert [self.pages.is_cached(p) for p in range(SIZE)] == [p in self.cached for p in range(SIZE)]
        assert self.pages.cached_pages == len(self.cached)
        assert self.pages.evictable_pages == len(self.lru)
        assert self.pages.copying_pages == len(self.writes | {p for p in range(SIZE) if self.reads[p]})


TestAllocatorMachine = AllocatorMachine.TestCase
TestPageMachine = PageMachine.TestCase
