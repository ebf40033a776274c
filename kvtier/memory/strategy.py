"""How a task's token positions get their slots: a task's state, and the protocol of strategies.

May import numpy and the ground floor; single-threaded. Always true of every strategy, and held by one suite
of tests (`tests/memory/test_strategy_contract.py`): a slot belongs to one task, or is shared and then never
written; a task writes only slots that are its own; a failed call changes nothing. `paged_strategy.py` shares
equal prefixes, `contiguous_strategy.py` gives each task a fixed range.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.indices import Int32
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.radix_cache import Prefix
from kvtier.memory.request_pool import ReqToTokenPool


@dataclass
class TaskCacheState:
    """One task (a request) on the device.

    `req_idx`: its row in `ReqToTokenPool`. `length`: positions that have slots. `cached`: tokens whose KV the
    device had when the task came. `filled`: tokens, from the first on, whose KV is known to be in their
    slots. `recorded`: how many of its pages were offered to the prefix cache. `copies`: loads and offloads of
    its pages that are not final. `ended`: freed. `pages`: its device pages in token order (its one range,
    where a task has a range).
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

    allocator: KvCacheAllocator

    @property
    def free_slots(self) -> int:
        """Slots that tasks to come can have now, those of cached pages that could be evicted included."""
        ...

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

        What is held, as numbers of the strategy's own (device pages, or slots); UsageError, and nothing
        changed, where a copy that writes may not.
        """
        ...

    def end_copy(self, state: TaskCacheState, pages: Int32, writes: bool) -> None:
        """That copy is final, well or not; the task may have ended meanwhile."""
        ...

    def flush(self) -> int:
        """Forget what is shared; answers how many pages are free by that."""
        ...

    def stats(self) -> dict[str, int]:
        """Counts, "slots_free" and "copying" among them."""
        ...

    def check_size(self, new_size: int) -> None:
        """UsageError where the strategy could not work over `new_size` slots."""
        ...

    def unclaim(self) -> None:
        """Let the allocator go, for a resize; no task may be there. Nothing else is called before `claim`."""
        ...

    def claim(self) -> None:
        """Take the whole allocator, at the size that it has now, with nothing cached."""
        ...

    def check(self, states: Iterable[TaskCacheState], copies: Iterable[Int32]) -> None:
        """Raise where an invariant is broken; `copies`: what each copy under way holds."""
        ...
