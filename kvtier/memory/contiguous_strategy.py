"""ContiguousStrategy: each task has one fixed range of slots, and shares nothing.

For attention kernels that want a request's KV in one piece, and for engines whose prompts have nothing in
common. May import the rest of `memory/`; single-threaded. Always true: range `r` is slots r * max_tokens ..
(r + 1) * max_tokens - 1; it belongs to one task, and is given to the next one only when that task has ended
and every copy that reads or writes the range is final.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.indices import Int32
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import TaskCacheState


class ContiguousStrategy:
    """Ranges of `max_tokens` slots, each for one task: no task is longer than its range."""

    ranges: int

    def __init__(self, allocator: KvCacheAllocator, max_tokens: int) -> None:
        self.owner = allocator.owner
        self.allocator = allocator
        self.capacity = max_tokens
        self.check_size(allocator.size)
        self.claim()

    def check_size(self, new_size: int) -> None:
        if not 1 <= self.capacity <= new_size:
            raise UsageError(f"max_tokens={self.capacity}: expected 1 .. {new_size}, the allocator's slots")

    def claim(self) -> None:
        self.allocator.claim(f"ContiguousStrategy(max_tokens={self.capacity})")
        self.ranges = self.allocator.size // self.capacity
        self._free = list(range(self.ranges - 1, -1, -1))
        slots = self.ranges * self.capacity
        self._reads: Int32 = np.zeros(slots, np.int32)  # copies that read the slot
        self._written: npt.NDArray[np.bool_] = np.zeros(slots, np.bool_)  # by a copy

    def unclaim(self) -> None:
        self.allocator.unclaim()

    @property
    def free_slots(self) -> int:
        return len(self._free) * self.capacity

    def alloc(self, state: TaskCacheState, prompt_ids: array[int], match_limit: int | None = None) -> bool:
        if not self._free:
            return False
        self._check_fits(len(prompt_ids))
        state.pages = np.array([self._free.pop()], np.int32)
        state.length = len(prompt_ids)
        state.tokens = array("i", prompt_ids)
        return True

    def extend(self, state: TaskCacheState, pos: int, tokens: array[int]) -> bool:
        if pos != state.length:
            raise UsageError(
                f"extend at position {pos}: the task has {state.length} positions, without a gap (W9)"
            )
        self._check_fits(pos + len(tokens))
        state.length = pos + len(tokens)
        state.tokens.extend(tokens)
        return True

    def _check_fits(self, length: int) -> None:
        if length > self.capacity:
            raise UsageError(f"{length} tokens: a task's range has {self.capacity} slots")

    def slots(self, state: TaskCacheState, start: int, stop: int) -> Int32:
        first = _range(state) * self.capacity
        return np.arange(first + start, first + stop, dtype=np.int32)

    def check_writable(self, state: TaskCacheState, start: int, stop: int) -> None:
        self._check_own(self.slots(state, start, stop), "write")

    def _check_own(self, slots: Int32, what: str) -> None:
        written = self._written[slots]
        if written.any():
            raise UsageError(f"{what}: slot {slots[written.argmax()]} is written by a copy=True")

    def write_indices(self, state: TaskCacheState, pool: ReqToTokenPool, start: int = 0) -> None:
        pool.write(state.req_idx, start, self.slots(state, start, state.length))

    def record_hashes(self, state: TaskCacheState) -> None:
        """Nothing is shared, so there is nothing to record."""

    def free(self, state: TaskCacheState) -> None:
        _range(state)
        state.ended = True
        self._reclaim(state)

    def begin_copy(self, state: TaskCacheState, start: int, stop: int, writes: bool) -> Int32:
        slots = self.slots(state, start, stop)
        if writes:
            self._check_own(slots, "begin_write")
            self._written[slots] = True
        else:
            self._reads[slots] += 1
        state.copies += 1
        return slots

    def end_copy(self, state: TaskCacheState, pages: Int32, writes: bool) -> None:
        if writes:
            self._written[pages] = False
        else:
            self._reads[pages] -= 1
        state.copies -= 1
        self._reclaim(state)

    def _reclaim(self, state: TaskCacheState) -> None:
        if state.ended and not state.copies:
            self._free.append(_range(state))

    def flush(self) -> int:
        return 0

    def stats(self) -> dict[str, int]:
        return {
            "slots_free": self.free_slots,
            "copying": int(np.count_nonzero(self._written | (self._reads > 0))),
            "ranges": self.ranges,
            "ranges_free": len(self._free),
        }

    def check(self, states: Iterable[TaskCacheState], copies: Iterable[Int32]) -> None:
        held = np.zeros(len(self._reads), np.int32)
        for slots in copies:
            np.add.at(held, slots, 1)
        if not np.array_equal(held, self._reads + self._written):
            raise RuntimeError("slots that copies read or write are not those that are marked")
        taken = [_range(state) for state in states]
        lingering = set((np.flatnonzero(held) // self.capacity).tolist()) - set(taken)
        if sorted([*self._free, *taken, *lingering]) != list(range(self.ranges)):
            raise RuntimeError(
                f"ranges {sorted(self._free)} are free, tasks have {sorted(taken)}, copies of tasks that "
                f"ended hold {sorted(lingering)}: not each of {self.ranges} once"
            )


def _range(state: TaskCacheState) -> int:
    if not len(state.pages):
        raise UsageError("this task has no slots")
    return int(state.pages[0])
