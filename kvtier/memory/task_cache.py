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

from kvtier.memory.allocator import Int32
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import AllocationStrategy, TaskCacheState


@dataclass(eq=False)
class CopyHold:
    """Pages that a copy reads (offload) or writes (load): none is reused before `release`."""

    pages: Int32
    writes: bool
    released: bool = False


class TaskCacheManager:
    """Tasks by id (any hashable) over one `MemoryManager`, a slot table and a strategy."""

    def __init__(
        self, manager: MemoryManager, req_pool: ReqToTokenPool, strategy: AllocationStrategy
    ) -> None:
        raise NotImplementedError

    def task_alloc(
        self, task_id: Hashable, prompt_ids: Any, *, namespace: bytes = b"", match_limit: int | None = None
    ) -> TaskCacheState | None:
        """Slots for the whole prompt; its known prefix is shared, `state.cached` says how many tokens.

        At most `min(len(prompt_ids) - 1, match_limit)` tokens are shared, in whole device pages: an engine
        that starts its last chunk at a fixed position gives that as `match_limit`, so it never writes a
        shared page. None, and nothing changed, when there is no room or no row. UsageError for an empty
        prompt, one that could never fit, or an id in use (W7, W8).
        """
        raise NotImplementedError

    def task_extend(self, task_id: Hashable, tokens: Any, pos: int | None = None) -> Int32 | None:
        """Slots for one more token, or several, at `pos` (default, and only, the task's length: W9).

        The new positions' slots; None, and nothing changed, without room.
        """
        raise NotImplementedError

    def task_cached(self, task_id: Hashable, length: int) -> None:
        """The KV of the first `length` tokens is in its slots: whole pages of it are shareable now.

        Generated tokens too, so that the next turn of a chat hits. Cheap where no page became whole.
        UsageError where a load that writes one of the pages is not final.
        """
        raise NotImplementedError

    def task_free(self, task_id: Hashable) -> None:
        """End of the task. Shared pages stay cached; those under a `CopyHold` wait for its release."""
        raise NotImplementedError

    def state(self, task_id: Hashable) -> TaskCacheState:
        """The task's state: read it, change nothing in it."""
        raise NotImplementedError

    def slots(self, task_id: Hashable, start: int = 0, stop: int | None = None) -> Int32:
        """Slots of positions start .. stop - 1 (default: all) as a new int32 array."""
        raise NotImplementedError

    def write_slots(self, task_id: Hashable, start: int, stop: int | None = None) -> Int32:
        """As `slots`, for computing into them: UsageError where a page is shared or being loaded (W6)."""
        raise NotImplementedError

    def hold_load(self, task_id: Hashable, start: int, stop: int) -> CopyHold:
        """A load writes positions start .. stop - 1: their pages are not shared or reused until `release`."""
        raise NotImplementedError

    def hold_offload(self, task_id: Hashable, start: int, stop: int) -> CopyHold:
        """An offload reads positions start .. stop - 1, all of them filled: not reused until `release`."""
        raise NotImplementedError

    def release(self, hold: CopyHold) -> None:
        """The copy is final, well or not."""
        raise NotImplementedError

    def flush(self, namespace: bytes | None = None) -> int:
        """Forget the prefix cache; answers how many pages are free by that.

        Running tasks keep their pages, and none of what they have is recorded afterwards.
        """
        raise NotImplementedError

    def adopt(self) -> None:
        """Make the calling thread the owner of the manager and all its parts."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """Counts of pages, tasks and tokens."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken."""
        raise NotImplementedError
