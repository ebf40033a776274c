"""A state machine over the prefix index, against a naive one."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.memory import (
    PageAllocator,
    Prefix,
    RadixCache,
)
from tests.memory.naive import PAGE, SELDOM, SPACES, TOKENS, Chain, NaiveIndex, heads

SIZE = 12


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


TestRadixMachine = RadixMachine.TestCase
