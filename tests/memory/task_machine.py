"""A state machine over `TaskCacheManager` with content: KV whose value names its whole prefix.

Copies move their bytes only when they end, as late as they like: also after the task's end. What differs
between strategies (who shares, what fits) is in the hooks, which a subclass has for its strategy.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.errors import UsageError
from kvtier.memory import AllocationStrategy, CopyHold, MemoryManager, ReqToTokenPool, TaskCacheManager
from tests.memory.naive import PAGE, SELDOM, SPACES, TOKENS


class Copy:
    """A load or an offload under way: what it moves, and what it must find in the end."""

    def __init__(self, hold: CopyHold, name: int, slots: Any, start: int, values: list[int]) -> None:
        self.hold, self.name, self.slots, self.start, self.values = hold, name, slots, start, values


class TaskMachine(RuleBasedStateMachine):
    ROWS, LENGTH = 4, 7 * PAGE
    SIZES = (9 * PAGE + 1,)

    def __init__(self) -> None:
        super().__init__()
        self.manager = MemoryManager(self.SIZES[0], torch.int64, head_num=1, head_dim=1, layer_num=2)
        hold = self.manager.HOLD_TOKEN_MEMINDEX
        self.pool = ReqToTokenPool(
            self.ROWS,
            self.LENGTH,
            hold,
            self.manager.owner,
            table=torch.empty((self.ROWS, self.LENGTH), dtype=torch.int32),
        )
        self.strategy = self.strategy_over(self.manager)
        self.tasks = TaskCacheManager(self.manager, self.pool, self.strategy)
        self.tokens: dict[int, list[int]] = {}
        self.spaces: dict[int, bytes] = {}
        self.copies: list[Copy] = []
        self.names = 0

    # -- hooks -------------------------------------------------------------------------------------

    def strategy_over(self, manager: MemoryManager) -> AllocationStrategy:
        raise NotImplementedError

    def expected(self, space: bytes, tokens: list[int], limit: int | None) -> tuple[int, bool]:
        """How many tokens a new task finds cached, and whether it fits."""
        raise NotImplementedError

    def may_grow(self, name: int, length: int) -> bool:
        """Whether there is room for the task to have `length` tokens."""
        raise NotImplementedError

    def began(self, name: int, cached: int) -> None: ...

    def was_filled(self, name: int, length: int) -> None: ...

    def ends(self, name: int) -> None: ...

    def emptied(self) -> None:
        """A flush, or a resize, took what was cached."""

    # -- content -----------------------------------------------------------------------------------

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

    def idle(self) -> list[int]:
        return [name for name in sorted(self.tokens) if not self.loading(name)]

    # -- rules -------------------------------------------------------------------------------------

    @rule(tokens=TOKENS.filter(bool), space=SPACES, limit=st.none() | st.integers(0, 6 * PAGE))
    def begin(self, tokens: list[int], space: bytes, limit: int | None) -> None:
        cached, fits = self.expected(space, tokens, limit)
        name = self.names = self.names + 1
        state = self.tasks.task_alloc(name, tokens, namespace=space, match_limit=limit)
        assert (state is not None) == (fits and len(self.tokens) < self.ROWS)
        if state is not None:
            assert state.cached == cached
            self.tokens[name], self.spaces[name] = list(tokens), space
            self.began(name, cached)

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
        fits = self.may_grow(name, length)
        slots = self.tasks.task_extend(name, tokens)
        assert (slots is not None) == fits
        if slots is not None:
            self.tokens[name] += tokens
            assert slots.tolist() == self.tasks.slots(name)[length - len(tokens) :].tolist()

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        filled, length = self.tasks.state(name).filled, len(self.tokens[name])
        if filled < length:
            self.compute_to(name, data.draw(st.integers(filled + 1, length)))

    def compute_to(self, name: int, stop: int) -> None:
        filled = self.tasks.state(name).filled
        if filled < stop:
            values = self.kv(self.spaces[name], self.tokens[name], filled, stop)
            self.write(self.tasks.write_slots(name, filled, stop), values)
            self.fill(name, stop)

    def fill(self, name: int, length: int) -> None:
        self.tasks.task_cached(name, length)
        self.was_filled(name, length)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.idle()))
        filled, length = self.tasks.state(name).filled, len(self.tokens[name])
        if filled < length:
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
        self.copies.append(Copy(hold, name, self.tasks.slots(name, start, stop), start, values))

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
        self.ends(name)
        self.tasks.task_free(name)
        del self.tokens[name], self.spaces[name]

    @rule(now=SELDOM)
    def flush(self, now: bool) -> None:
        if now:
            self.tasks.flush()
            self.emptied()

    @rule(now=SELDOM, data=st.data())
    def resize(self, now: bool, data: st.DataObject) -> None:
        size = data.draw(st.sampled_from(self.SIZES))
        if self.tokens or self.copies:
            with pytest.raises(UsageError, match="tasks run"):
                self.tasks.resize_mem(size)
        elif now:
            self.tasks.resize_mem(size)
            self.emptied()

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.tasks.check()
        assert torch.equal(self.pool.sync(), torch.from_numpy(self.pool.host))
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
