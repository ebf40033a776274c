"""TaskCacheManager: one task's life on the device, from prompt to end.

May import the rest of `memory/`; single-threaded: the thread of the `MemoryManager` owns all of it, others
post messages (W5). Always true: a task's slots hold its own tokens; a call that fails changes nothing.

A request's life in an engine:

    state = tasks.task_alloc(rid, prompt)            # None: no room now, try again after an end
    tasks.slots(rid, state.cached, n)                # where the rest goes; int32, for Worker.load too
    hold = tasks.hold_load(rid, first, last)         # these pages outlive the task until the load is final
    ...  load is final: tasks.release(hold); if it succeeded: tasks.task_cached(rid, last)
    ...  else compute the same tokens into the same slots
    tasks.task_cached(rid, length)                   # after computing: whole pages become shareable
    tasks.task_extend(rid, token)                    # one more position, before it is computed
    hold = tasks.hold_offload(rid, first, last); ...; tasks.release(hold)
    tasks.task_free(rid)                             # at the end, on abort and on preemption
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtier.errors import UsageError
from kvtier.memory.indices import Int32, packed_tokens
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import AllocationStrategy, TaskCacheState


@dataclass(eq=False)
class CopyHold:
    """Device pages, or slots, that a copy reads (offload) or writes (load): not reused until `release`."""

    state: TaskCacheState
    pages: Int32
    writes: bool


_COUNTS = ("tasks_begun", "tokens_asked", "tokens_hit", "refused")


class TaskCacheManager:
    """Tasks by id (any hashable) over one `MemoryManager`, a slot table and a strategy.

    After each call that changes it, the strategy's `free_slots` is what the allocator's `free_count` says.
    """

    def __init__(
        self, manager: MemoryManager, req_pool: ReqToTokenPool, strategy: AllocationStrategy
    ) -> None:
        if req_pool.hold_slot != manager.HOLD_TOKEN_MEMINDEX:
            raise UsageError(
                f"the slot table's hold slot is {req_pool.hold_slot}, the manager's is "
                f"{manager.HOLD_TOKEN_MEMINDEX}"
            )
        if not manager.owner is req_pool.owner is strategy.owner:
            raise UsageError(
                "manager, slot table and strategy need one ThreadOwner: give manager.owner to each"
            )
        self.manager = manager
        self.req_pool = req_pool
        self.strategy = strategy
        self._owner = manager.owner
        self._tasks: dict[Hashable, TaskCacheState] = {}
        self._holds: set[CopyHold] = set()
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._publish()

    def __len__(self) -> int:
        """How many tasks there are."""
        return len(self._tasks)

    def task_alloc(
        self, task_id: Hashable, prompt_ids: Any, *, namespace: bytes = b"", match_limit: int | None = None
    ) -> TaskCacheState | None:
        """Slots for the whole prompt; its known prefix is shared, `state.cached` says how many tokens.

        At most `min(len(prompt_ids) - 1, match_limit)` tokens are shared, in whole device pages: an engine
        that starts its last chunk at a fixed position gives that as `match_limit`, so it never writes a
        shared page. None, and nothing changed, when there is no room or no row. UsageError for an empty
        prompt, one that could never fit, or an id in use (W7, W8).
        """
        self._owner.check("task_alloc")
        tokens = packed_tokens(prompt_ids)
        longest = min(self.req_pool.max_length, self.strategy.capacity)
        if task_id in self._tasks:
            raise UsageError(f"task_alloc: task {task_id!r} is running already; free it first")  # W7
        if not 1 <= len(tokens) <= longest:  # W8
            raise UsageError(
                f"task_alloc: task {task_id!r} has {len(tokens)} tokens, expected 1 .. {longest} "
                f"({self.req_pool.max_length} positions in the slot table, {self.strategy.capacity} slots)"
            )
        if match_limit is not None and match_limit < 0:
            raise UsageError(f"task_alloc: match_limit={match_limit}, expected 0 or more")
        state = TaskCacheState(req_idx=-1, namespace=namespace)
        if not self.req_pool.free_rows or not self.strategy.alloc(state, tokens, match_limit):
            self._counts["refused"] += 1
            return None
        row = self.req_pool.alloc()
        if row is None:
            raise RuntimeError("the slot table has no row, though it had one a moment ago")
        state.req_idx = row
        self.strategy.write_indices(state, self.req_pool)
        self._tasks[task_id] = state
        self._counts["tasks_begun"] += 1
        self._counts["tokens_asked"] += state.length
        self._counts["tokens_hit"] += state.cached
        self._publish()
        return state

    def task_extend(self, task_id: Hashable, tokens: Any, pos: int | None = None) -> Int32 | None:
        """Slots for one more token, or several, at `pos` (default, and only, the task's length: W9).

        The new positions' slots; None, and nothing changed, without room. UsageError where there never could
        be room (W8).
        """
        self._owner.check("task_extend")
        state = self._state(task_id)
        more = packed_tokens([tokens] if isinstance(tokens, int) else tokens)
        start = state.length
        if pos is not None and pos != start:  # W9
            raise UsageError(f"task_extend: task {task_id!r} has {start} positions, the next is not {pos}")
        if start + len(more) > min(self.req_pool.max_length, self.strategy.capacity):  # W8
            raise UsageError(
                f"task_extend: task {task_id!r} would have {start + len(more)} tokens, the slot table has "
                f"{self.req_pool.max_length} positions, and a task at most {self.strategy.capacity} slots"
            )
        if not self.strategy.extend(state, start, more):
            self._counts["refused"] += 1
            return None
        self.strategy.write_indices(state, self.req_pool, start)
        self._publish()
        return self.strategy.slots(state, start, state.length)

    def task_cached(self, task_id: Hashable, length: int) -> None:
        """The KV of the first `length` tokens is in its slots: whole pages of it are shareable now.

        Generated tokens too, so that the next turn of a chat hits. Cheap where no page became whole.
        UsageError where a load that writes one of the pages is not final.
        """
        self._owner.check("task_cached")
        state = self._state(task_id)
        if not 0 <= length <= state.length:
            raise UsageError(f"task_cached: task {task_id!r} has {state.length} tokens, not {length}")
        if length <= state.filled:
            return
        self.strategy.check_writable(state, state.filled, length)
        state.filled = length
        self.strategy.record_hashes(state)
        self._publish()

    def task_free(self, task_id: Hashable) -> None:
        """End of the task. Shared pages stay cached; those under a `CopyHold` wait for its release."""
        self._owner.check("task_free")
        state = self._state(task_id)
        self.strategy.free(state)
        self.req_pool.free(state.req_idx)
        del self._tasks[task_id]
        self._publish()

    def state(self, task_id: Hashable) -> TaskCacheState:
        """The task's state: read it, change nothing in it."""
        self._owner.check("state")
        return self._state(task_id)

    def slots(self, task_id: Hashable, start: int = 0, stop: int | None = None) -> Int32:
        """Slots of positions start .. stop - 1 (default: all) as a new int32 array."""
        self._owner.check("slots")
        state, start, stop = self._range(task_id, start, stop)
        return self.strategy.slots(state, start, stop)

    def write_slots(self, task_id: Hashable, start: int, stop: int | None = None) -> Int32:
        """As `slots`, for computing into them: UsageError where a page is shared or being loaded (W6)."""
        self._owner.check("write_slots")
        state, start, stop = self._range(task_id, start, stop)
        self.strategy.check_writable(state, start, stop)
        return self.strategy.slots(state, start, stop)

    def hold_load(self, task_id: Hashable, start: int, stop: int) -> CopyHold:
        """A load writes positions start .. stop - 1: their pages are not shared or reused until `release`."""
        self._owner.check("hold_load")
        state, start, stop = self._range(task_id, start, stop)
        if start < state.filled:
            raise UsageError(
                f"hold_load: positions {start} .. {stop - 1} of task {task_id!r}: the first {state.filled} "
                "are filled already, and valid KV is never overwritten"
            )
        return self._hold(state, start, stop, writes=True)

    def hold_offload(self, task_id: Hashable, start: int, stop: int) -> CopyHold:
        """An offload reads positions start .. stop - 1, all of them filled: not reused until `release`."""
        self._owner.check("hold_offload")
        state, start, stop = self._range(task_id, start, stop)
        if stop > state.filled:
            raise UsageError(
                f"hold_offload: positions {start} .. {stop - 1} of task {task_id!r}: only the first "
                f"{state.filled} are filled"
            )
        return self._hold(state, start, stop, writes=False)

    def release(self, hold: CopyHold) -> None:
        """The copy is final, well or not."""
        self._owner.check("release")
        if hold not in self._holds:
            raise UsageError(
                f"release: this hold on {len(hold.pages)} pages is not open; was it released before?"
            )
        self.strategy.end_copy(hold.state, hold.pages, hold.writes)
        self._holds.remove(hold)
        self._publish()

    def flush(self) -> int:
        """Forget the prefix cache; answers how many pages are free by that.

        Running tasks keep their pages, and none of what they have is recorded afterwards.
        """
        self._owner.check("flush")
        freed = self.strategy.flush()
        self._publish()
        return freed

    def resize_mem(self, new_size: int) -> None:
        """Buffers for `new_size` tokens: empty, the prefix cache too; the slot table follows the hold slot.

        UsageError, and nothing changed, while tasks run or copies are not final. Where the buffers cannot be
        made (see `MemoryManager.resize_mem`), all is as before, but empty.
        """
        self._owner.check("resize_mem")
        if self._tasks or self._holds:
            raise UsageError(
                f"resize_mem({new_size}): {len(self._tasks)} tasks run and {len(self._holds)} copies are not "
                "final; end them first"
            )
        self.strategy.check_size(new_size)
        self.strategy.unclaim()
        try:
            self.manager.resize_mem(new_size)
        finally:
            self.strategy.claim()
            self.req_pool.move_hold_slot(self.manager.HOLD_TOKEN_MEMINDEX)
            self._publish()

    def adopt(self) -> None:
        """Make the calling thread the owner of the manager and all its parts."""
        self._owner.adopt()

    def stats(self) -> dict[str, int]:
        """Counts of pages, tasks and tokens."""
        self._owner.check("stats")
        return {
            **self._counts,
            "tasks": len(self._tasks),
            "copies": len(self._holds),
            **self.strategy.stats(),
        }

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken."""
        self._owner.check("check")
        self.req_pool.check()
        self.strategy.check(self._tasks.values(), [hold.pages for hold in self._holds])
        for task_id, state in self._tasks.items():
            row = self.req_pool.host[state.req_idx, : state.length]
            if not np.array_equal(row, self.strategy.slots(state, 0, state.length)):
                raise RuntimeError(f"task {task_id!r}: its row in the slot table is not where its pages are")
            if len(state.tokens) != state.length or not 0 <= state.cached <= state.filled <= state.length:
                raise RuntimeError(f"task {task_id!r}: {state.cached=} {state.filled=} {state.length=}")

    def _publish(self) -> None:
        self.manager.allocator.publish(self.strategy.free_slots)

    def _hold(self, state: TaskCacheState, start: int, stop: int, writes: bool) -> CopyHold:
        hold = CopyHold(state, self.strategy.begin_copy(state, start, stop, writes), writes)
        self._holds.add(hold)
        return hold

    def _state(self, task_id: Hashable) -> TaskCacheState:
        state = self._tasks.get(task_id)
        if state is None:
            raise UsageError(f"task {task_id!r} is not running")
        return state

    def _range(self, task_id: Hashable, start: int, stop: int | None) -> tuple[TaskCacheState, int, int]:
        state = self._state(task_id)
        stop = state.length if stop is None else stop
        if not 0 <= start < stop <= state.length:
            raise UsageError(
                f"positions {start} .. {stop - 1} of task {task_id!r}: it has 0 .. {state.length - 1}"
            )
        return state, start, stop
