"""State machines over every part of `memory/`, each against a naive model; the last one with content."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import UsageError
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.task_cache import CopyHold, TaskCacheManager

SIZE = 12
PAGE = 2
SELDOM = st.sampled_from([False] * 12 + [True])
FORMS = st.sampled_from([list, np.array, lambda s: np.array(s, np.int64), lambda s: torch.tensor(s)])


class AllocatorMachine(RuleBasedStateMachine):
    """KvCacheAllocator against a set."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = KvCacheAllocator(SIZE)
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
        assert self.slots.can_use_mem_size == self.slots.size - len(self.used)
        for given, then in self.given:
            assert given.tolist() == then


class PageMachine(RuleBasedStateMachine):
    """PageAllocator against counters."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PageAllocator(SIZE)
        self.refs: Counter[int] = Counter()
        self.reads: Counter[int] = Counter()
        self.writes: set[int] = set()
        self.cached: set[int] = set()

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

    @rule(pages=PAGES)
    def free(self, pages: list[int]) -> None:
        if self.attempt(self.pages.free, pages, lambda p: self.refs[p]):
            self.refs.subtract(pages)

    @rule(pages=PAGES)
    def keep(self, pages: list[int]) -> None:
        if self.attempt(
            lambda p: self.pages.keep(np.array(p, np.int32)),
            pages,
            lambda p: self.refs[p] and p not in self.cached and p not in self.writes,
        ):
            self.cached |= set(pages)

    @rule(pages=PAGES)
    def drop(self, pages: list[int]) -> None:
        before = self.pages.free_pages
        freed: list[int] = []
        if self.attempt(
            lambda p: freed.append(self.pages.drop(np.array(p, np.int32))), pages, lambda p: p in self.cached
        ):
            self.cached -= set(pages)
            assert freed == [self.pages.free_pages - before]

    @rule(pages=PAGES)
    def begin_read(self, pages: list[int]) -> None:
        if self.attempt(self.pages.begin_read, pages, lambda p: self.refs[p] or p in self.cached):
            self.reads.update(pages)

    @rule(pages=PAGES)
    def end_read(self, pages: list[int]) -> None:
        if self.attempt(self.pages.end_read, pages, lambda p: self.reads[p]):
            self.reads.subtract(pages)

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
        assert self.pages.copying_pages == len(self.writes | {p for p in range(SIZE) if self.reads[p]})


Chain = tuple[bytes, tuple[int, ...]]

# Prompts that share heads: a part of one of three texts, and a few tokens of their own.
TEXTS = ([0] * 6 * PAGE, [1] * 6 * PAGE, [0, 1] * 3 * PAGE)
TOKENS = st.builds(
    lambda text, length, own: (text[:length] + own)[: 6 * PAGE],
    st.sampled_from(TEXTS),
    st.integers(0, 6 * PAGE),
    st.lists(st.integers(0, 1), max_size=3),
)
SPACES = st.sampled_from([b"", b"x"])


class NaiveIndex:
    """The prefix index as a dict from each chain (all tokens from the first on) to its page."""

    def __init__(self) -> None:
        self.pages: dict[Chain, int] = {}

    def longest(self, space: bytes, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * PAGE <= most:
            page = self.pages.get((space, tuple(tokens[: (len(found) + 1) * PAGE])))
            if page is None:
                break
            found.append(page)
        return found

    def record(self, space: bytes, tokens: list[int], pages: list[int]) -> int:
        new = 0
        for index, page in enumerate(pages):
            chain = (space, tuple(tokens[: (index + 1) * PAGE]))
            if chain not in self.pages:
                self.pages[chain] = page
                new += 1
        return new

    def remove(self, victims: list[int], pinned: set[Chain]) -> None:
        """Take victims out; they must be childless and unpinned once those behind them are gone."""
        chains = {page: chain for chain, page in self.pages.items()}
        for page in sorted(victims, key=lambda page: -len(chains[page][1])):
            chain = chains[page]
            assert chain not in pinned
            del self.pages[chain]
        for space, tokens in self.pages:
            assert len(tokens) == PAGE or (space, tokens[:-PAGE]) in self.pages, "a page is unreachable (W1)"


def heads(space: bytes, tokens: list[int], pages: int) -> set[Chain]:
    return {(space, tuple(tokens[: (index + 1) * PAGE])) for index in range(pages)}


class RadixMachine(RuleBasedStateMachine):
    """RadixCache against `NaiveIndex`."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(SIZE)
        self.cache = RadixCache(self.allocator, PAGE)
        self.model = NaiveIndex()
        self.tasks: list[
            tuple[Prefix, list[int], list[int], list[int]]
        ] = []  # prefix, tokens, pages, [shared]
        self.stale: list[tuple[Prefix, list[int]]] = []

    def pinned(self) -> set[Chain]:
        chains: set[Chain] = set()
        for prefix, tokens, _, shared in self.tasks:
            chains |= heads(prefix.namespace, tokens, shared[0])
        return chains

    @rule(tokens=TOKENS, space=SPACES)
    def whole_life(self, tokens: list[int], space: bytes) -> None:
        before = len(self.tasks)
        self.lookup(tokens, space, None)
        if len(self.tasks) > before:
            self.record_part(len(self.tasks) - 1, len(self.tasks[-1][2]))
            self.end_of(len(self.tasks) - 1)

    @rule(tokens=TOKENS, space=SPACES, limit=st.none() | st.integers(-1, 6 * PAGE))
    def lookup(self, tokens: list[int], space: bytes, limit: int | None) -> None:
        most = len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit)
        expected = self.model.longest(space, tokens, most)
        prefix, pages = self.cache.lookup(tokens, limit=limit, namespace=space)
        assert pages.tolist() == expected
        own = self.allocator.alloc(len(tokens) // PAGE - len(pages))
        if own is None:
            self.allocator.free(pages)
            self.cache.release(prefix)
        else:
            self.tasks.append((prefix, tokens, expected + own.tolist(), [len(expected)]))

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def record(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.tasks) - 1))
        self.record_part(index, data.draw(st.integers(0, len(self.tasks[index][2]))))

    def record_part(self, index: int, count: int) -> None:
        prefix, tokens, pages, shared = self.tasks[index]
        new = self.cache.record(prefix, tokens[: count * PAGE], np.array(pages[:count], np.int32))
        if count > shared[0]:
            assert new == self.model.record(prefix.namespace, tokens, pages[:count])
            shared[0] = count
        else:
            assert new == 0

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_of(data.draw(st.integers(0, len(self.tasks) - 1)))

    def end_of(self, index: int) -> None:
        prefix, _, pages, _ = self.tasks.pop(index)
        self.allocator.free(pages)
        self.cache.release(prefix)

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def end_of_one_begun_before_a_flush(self, data: st.DataObject) -> None:
        prefix, pages = self.stale.pop(data.draw(st.integers(0, len(self.stale) - 1)))
        tokens = [1] * len(pages) * PAGE
        assert self.cache.record(prefix, tokens, np.array(pages, np.int32)) == 0
        self.allocator.free(pages)
        self.cache.release(prefix)

    @rule(count=st.integers(0, SIZE))
    def evict(self, count: int) -> None:
        pinned = self.pinned()
        evictable = [chain for chain in self.model.pages if chain not in pinned]
        assert self.cache.evictable_pages == len(evictable)
        victims = self.cache.evict(count)
        if count > len(evictable):
            assert victims is None
            return
        assert victims is not None
        assert len(set(victims.tolist())) == count
        self.model.remove(victims.tolist(), pinned)

    @rule(now=SELDOM)
    def flush(self, now: bool) -> None:
        if not now:
            return
        in_use = {page for _, _, pages, _ in self.tasks for page in pages}
        freed = self.cache.flush()
        assert freed == len(set(self.model.pages.values()) - in_use)
        self.model.pages.clear()
        self.stale += [(prefix, pages) for prefix, _, pages, _ in self.tasks]
        self.tasks.clear()

    @invariant()
    def agrees(self) -> None:
        self.allocator.check()
        self.cache.check()
        cached = set(self.model.pages.values())
        assert all(self.cache.has_page(page) == (page in cached) for page in range(SIZE))
        used = {page for _, _, pages, _ in self.tasks for page in pages}
        used |= {page for _, pages in self.stale for page in pages}
        assert self.allocator.free_pages == SIZE - len(cached | used)


class Copy:
    """A load or an offload under way: what it moves, and what it must find in the end."""

    def __init__(
        self, hold: CopyHold, name: int, slots: Any, start: int, values: list[int], chains: set[Chain]
    ) -> None:
        self.hold, self.name, self.slots, self.start, self.values = hold, name, slots, start, values
        self.chains = chains  # cached pages that it pins


class ManagerMachine(RuleBasedStateMachine):
    """TaskCacheManager over all parts, with KV whose value names its whole prefix.

    Copies move their bytes only when they end, as late as they like: also after the task's end.
    """

    ROWS, LENGTH, PAGES = 4, 7 * PAGE, 9

    def __init__(self) -> None:
        super().__init__()
        self.manager = MemoryManager(self.PAGES * PAGE + 1, torch.int64, head_num=1, head_dim=1, layer_num=2)
        self.pool = ReqToTokenPool(
            self.ROWS, self.LENGTH, self.manager.HOLD_TOKEN_MEMINDEX, self.manager.owner
        )
        self.strategy = PagedStrategy(self.manager.allocator, PAGE)
        self.tasks = TaskCacheManager(self.manager, self.pool, self.strategy)
        self.model = NaiveIndex()
        self.tokens: dict[int, list[int]] = {}
        self.spaces: dict[int, bytes] = {}
        self.shared: dict[int, int] = {}  # pages that the task pins
        self.stale: set[int] = set()  # begun before a flush
        self.copies: list[Copy] = []
        self.names = 0
        evict = self.strategy.cache.evict

        def watched(count: int) -> Any:
            victims = evict(count)
            if victims is not None:
                self.model.remove(victims.tolist(), self.pinned())
            return victims

        self.strategy.cache.evict = watched  # type: ignore[method-assign]

    # -- the model ---------------------------------------------------------------------------------

    def pinned(self) -> set[Chain]:
        chains: set[Chain] = set()
        for name, tokens in self.tokens.items():
            if name not in self.stale:
                chains |= heads(self.spaces[name], tokens, self.shared[name])
        for copy in self.copies:
            chains |= copy.chains
        return chains

    def room(self, matched: set[Chain] = frozenset()) -> int:  # type: ignore[assignment]
        """Pages that can be had: free ones, and cached ones that nobody pins."""
        pinned = self.pinned() | matched
        return self.strategy.pages.free_pages + sum(chain not in pinned for chain in self.model.pages)

    @staticmethod
    def kv(space: bytes, tokens: list[int], start: int, stop: int) -> list[int]:
        return [hash((space, tuple(tokens[: position + 1]))) for position in range(start, stop)]

    def write(self, slots: Any, values: list[int]) -> None:
        self.manager.kv_buffer[:, torch.from_numpy(slots).long(), 0, 0] = torch.tensor(values)
        self.manager.kv_buffer[:, torch.from_numpy(slots).long(), 1, 0] = -torch.tensor(values)

    def read(self, slots: Any) -> list[int]:
        index = torch.from_numpy(slots).long()
        first, last = self.manager.kv_buffer[0, index, 0, 0], self.manager.kv_buffer[1, index, 1, 0]
        assert (first == -last).all()
        return [int(value) for value in first]

    def loading(self, name: int) -> bool:
        return any(copy.name == name and copy.hold.writes for copy in self.copies)

    def fill(self, name: int, length: int) -> None:
        self.tasks.task_cached(name, length)
        if name not in self.stale and length // PAGE > self.shared[name]:
            self.shared[name] = length // PAGE
            pages = self.tasks.state(name).pages[: length // PAGE].tolist()
            self.model.record(self.spaces[name], self.tokens[name], pages)

    # -- rules -------------------------------------------------------------------------------------

    @rule(tokens=TOKENS.filter(bool), space=SPACES, limit=st.none() | st.integers(0, 6 * PAGE))
    def begin(self, tokens: list[int], space: bytes, limit: int | None) -> None:
        most = len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit)
        expected = self.model.longest(space, tokens, most)
        needed = -(-len(tokens) // PAGE) - len(expected)
        fits = needed <= self.room(heads(space, tokens, len(expected))) and self.pool.free_rows > 0
        before = dict(self.model.pages)
        name = self.names = self.names + 1
        state = self.tasks.task_alloc(name, tokens, namespace=space, match_limit=limit)
        assert (state is not None) == fits
        if state is None:
            assert self.model.pages == before
            return
        assert state.cached == len(expected) * PAGE
        assert state.pages[: len(expected)].tolist() == expected
        self.tokens[name], self.spaces[name], self.shared[name] = list(tokens), space, len(expected)

    @rule(tokens=TOKENS.filter(bool), space=SPACES)
    def whole_life(self, tokens: list[int], space: bytes) -> None:
        self.begin(tokens, space, None)
        if self.names in self.tokens:
            self.compute_to(self.names, len(tokens))
            self.end_of(self.names)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=3))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        length = len(self.tokens[name]) + len(tokens)
        if length > self.LENGTH:
            with pytest.raises(UsageError, match="positions"):
                self.tasks.task_extend(name, tokens)
            return
        needed = -(-length // PAGE) - len(self.tasks.state(name).pages)
        fits = needed <= self.room()
        slots = self.tasks.task_extend(name, tokens)
        assert (slots is not None) == fits
        if slots is not None:
            self.tokens[name] += tokens
            assert slots.tolist() == self.tasks.slots(name)[length - len(tokens) :].tolist()

    @precondition(lambda self: any(not self.loading(name) for name in self.tokens))
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in sorted(self.tokens) if not self.loading(name)]))
        filled, length = self.tasks.state(name).filled, len(self.tokens[name])
        if filled == length:
            return
        stop = data.draw(st.integers(filled + 1, length))
        self.compute_to(name, stop)

    def compute_to(self, name: int, stop: int) -> None:
        filled = self.tasks.state(name).filled
        if filled < stop:
            values = self.kv(self.spaces[name], self.tokens[name], filled, stop)
            self.write(self.tasks.write_slots(name, filled, stop), values)
            self.fill(name, stop)

    @precondition(lambda self: any(not self.loading(name) for name in self.tokens))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name in sorted(self.tokens) if not self.loading(name)]))
        filled, length = self.tasks.state(name).filled, len(self.tokens[name])
        if filled == length:
            return
        stop = data.draw(st.integers(filled + 1, length))
        self.begin_copy(name, filled, stop, self.tasks.hold_load(name, filled, stop))

    @precondition(lambda self: any(self.tasks.state(name).filled for name in self.tokens))
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        names = [name for name in sorted(self.tokens) if self.tasks.state(name).filled]
        name = data.draw(st.sampled_from(names))
        stop = data.draw(st.integers(1, self.tasks.state(name).filled))
        start = data.draw(st.integers(0, stop - 1))
        self.begin_copy(name, start, stop, self.tasks.hold_offload(name, start, stop))

    def begin_copy(self, name: int, start: int, stop: int, hold: CopyHold) -> None:
        values = self.kv(self.spaces[name], self.tokens[name], start, stop)
        self.copies.append(Copy(hold, name, self.tasks.slots(name, start, stop), start, values, set()))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), good=st.booleans())
    def copy_ends(self, data: st.DataObject, good: bool) -> None:
        copy = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        if copy.hold.writes:
            self.write(copy.slots, copy.values if good else [1] * len(copy.values))
        else:
            assert self.read(copy.slots) == copy.values, "an offload read what was not its task's"
        self.tasks.release(copy.hold)
        with pytest.raises(UsageError, match="not open"):
            self.tasks.release(copy.hold)
        if copy.hold.writes and good and copy.name in self.tokens:
            self.fill(copy.name, copy.start + len(copy.values))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_of(data.draw(st.sampled_from(sorted(self.tokens))))

    def end_of(self, name: int) -> None:
        chains = heads(self.spaces[name], self.tokens[name], self.shared[name])
        for copy in self.copies:
            if copy.name == name and name not in self.stale:
                copy.chains = chains
        self.tasks.task_free(name)
        for kept in (self.tokens, self.spaces, self.shared):
            del kept[name]  # type: ignore[attr-defined]
        self.stale.discard(name)

    @rule(now=SELDOM)
    def flush(self, now: bool) -> None:
        if not now:
            return
        self.tasks.flush()
        self.model.pages.clear()
        self.stale |= set(self.tokens)
        for copy in self.copies:
            copy.chains = set()

    @invariant()
    def agrees(self) -> None:
        self.tasks.check()
        cached = set(self.model.pages.values())
        assert self.strategy.pages.cached_pages == len(cached)
        assert all(self.strategy.cache.has_page(page) for page in cached)
        hold = self.manager.HOLD_TOKEN_MEMINDEX
        for name, tokens in self.tokens.items():
            state = self.tasks.state(name)
            slots = self.tasks.slots(name)
            assert list(state.tokens) == tokens
            assert hold not in slots
            assert len(set(slots.tolist())) == len(tokens)
            values = self.read(slots[: state.filled])
            assert values == self.kv(self.spaces[name], tokens, 0, state.filled), (
                "a slot holds another's token"
            )

    @invariant()
    def every_page_is_somewhere(self) -> None:
        used = {int(page) for name in self.tokens for page in self.tasks.state(name).pages}
        copied = {int(page) for copy in self.copies for page in copy.hold.pages}
        lost = (
            self.PAGES - self.strategy.pages.free_pages - len(used | copied | set(self.model.pages.values()))
        )
        assert lost == 0


TestAllocatorMachine = AllocatorMachine.TestCase
TestPageMachine = PageMachine.TestCase
TestRadixMachine = RadixMachine.TestCase
TestManagerMachine = ManagerMachine.TestCase
