"""State machines over tasks on each strategy, against naive models and with content (see task_machine.py)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from hypothesis.stateful import invariant

from kvtier.memory import ContiguousStrategy, CopyHold, MemoryManager, PagedStrategy
from tests.memory.naive import PAGE, Chain, NaiveIndex, heads
from tests.memory.task_machine import TaskMachine


class PagedMachine(TaskMachine):
    """Shared prefixes against `NaiveIndex`; every page is somewhere; victims are childless and unpinned."""

    SIZES = (9 * PAGE + 1, 7 * PAGE, 11 * PAGE)
    strategy: PagedStrategy

    def __init__(self) -> None:
        self.model = NaiveIndex()
        self.shared: dict[int, int] = {}  # pages that a task pins
        self.stale: set[int] = set()  # tasks begun before a flush
        self.pinned_by_copies: dict[CopyHold, set[Chain]] = {}  # of tasks that have ended
        super().__init__()

    def strategy_over(self, manager: MemoryManager) -> PagedStrategy:
        strategy = PagedStrategy(manager.allocator, PAGE)
        self.watch(strategy)
        return strategy

    def watch(self, strategy: PagedStrategy) -> None:
        evict = strategy.cache.evict

        def watched(count: int) -> Any:
            victims = evict(count)
            if victims is not None:
                self.model.remove(victims.tolist(), self.pinned())
            return victims

        strategy.cache.evict = watched  # type: ignore[method-assign]

    def pinned(self) -> set[Chain]:
        chains: set[Chain] = set()
        for name, tokens in self.tokens.items():
            if name not in self.stale:
                chains |= heads(self.spaces[name], tokens, self.shared[name])
        open_holds = {copy.hold for copy in self.copies}
        for hold, held in self.pinned_by_copies.items():
            chains |= held if hold in open_holds else set()
        return chains

    def room(self, matched: set[Chain] = frozenset()) -> int:  # type: ignore[assignment]
        """Pages that can be had: free ones, and cached ones that nobody pins."""
        pinned = self.pinned() | matched
        return self.strategy.pages.free_pages + sum(chain not in pinned for chain in self.model.pages)

    def expected(self, space: bytes, tokens: list[int], limit: int | None) -> tuple[int, bool]:
        most = len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit)
        found = self.model.longest(space, tokens, most)
        needed = -(-len(tokens) // PAGE) - len(found)
        return len(found) * PAGE, needed <= self.room(heads(space, tokens, len(found)))

    def may_grow(self, name: int, length: int) -> bool:
        return -(-length // PAGE) - len(self.tasks.state(name).pages) <= self.room()

    def began(self, name: int, cached: int) -> None:
        found = self.model.longest(self.spaces[name], self.tokens[name], cached)
        assert self.tasks.state(name).pages[: len(found)].tolist() == found
        self.shared[name] = cached // PAGE

    def was_filled(self, name: int, length: int) -> None:
        if name not in self.stale and length // PAGE > self.shared[name]:
            self.shared[name] = length // PAGE
            pages = self.tasks.state(name).pages[: length // PAGE].tolist()
            self.model.record(self.spaces[name], self.tokens[name], pages)

    def ends(self, name: int) -> None:
        chains = heads(self.spaces[name], self.tokens[name], self.shared.pop(name))
        for copy in self.copies:
            if copy.name == name and name not in self.stale:
                self.pinned_by_copies[copy.hold] = chains
        self.stale.discard(name)

    def emptied(self) -> None:
        self.model.pages.clear()
        self.stale |= set(self.tokens)
        self.pinned_by_copies.clear()
        if "evict" not in vars(self.strategy.cache):  # a resize made a new index
            self.watch(self.strategy)

    @invariant()
    def every_page_is_somewhere(self) -> None:
        cached = set(self.model.pages.values())
        assert self.strategy.pages.cached_pages == len(cached)
        assert all(self.strategy.cache.has_page(page) for page in cached)
        used = {int(page) for name in self.tokens for page in self.tasks.state(name).pages}
        copied = {int(page) for copy in self.copies for page in copy.hold.pages}
        pages = self.strategy.pages
        assert pages.free_pages + len(used | copied | cached) == pages.pages
        assert self.strategy.free_slots == self.room() * PAGE


class ContiguousMachine(TaskMachine):
    """Ranges against sets of names: a range is free when neither a task nor a copy has it."""

    SIZES = (3 * TaskMachine.LENGTH + 3, 2 * TaskMachine.LENGTH, 4 * TaskMachine.LENGTH)
    strategy: ContiguousStrategy

    def strategy_over(self, manager: MemoryManager) -> ContiguousStrategy:
        return ContiguousStrategy(manager.allocator, self.LENGTH)

    def free_ranges(self) -> int:
        holders = set(self.tokens) | {copy.name for copy in self.copies}
        return self.manager.size // self.LENGTH - len(holders)

    def expected(self, space: bytes, tokens: list[int], limit: int | None) -> tuple[int, bool]:
        return 0, self.free_ranges() > 0

    def may_grow(self, name: int, length: int) -> bool:
        return True

    @invariant()
    def each_task_has_one_run(self) -> None:
        assert self.strategy.free_slots == self.free_ranges() * self.LENGTH
        taken = set()
        for name, tokens in self.tokens.items():
            slots = self.tasks.slots(name).tolist()
            assert slots == list(range(slots[0], slots[0] + len(tokens)))
            assert slots[0] % self.LENGTH == 0
            taken.add(slots[0])
        assert len(taken) == len(self.tokens)


TestPagedMachine = PagedMachine.TestCase
TestContiguousMachine = ContiguousMachine.TestCase
