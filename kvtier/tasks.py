"""What an engine gets back from a planner: hits, and the tasks that copy.

Values only: imports nothing of kvtier but the ground floor. Always true: a task's state moves along
QUEUED -> COPYING -> DONE | FAILED or QUEUED -> DONE | FAILED | CANCELLED, never back, and each task
comes back exactly once from `Planner.update` or `Worker.step`, also one that was final when it was made.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class TaskState(enum.Enum):
    """Where a task is. QUEUED: nothing is copied yet. COPYING: it is with the movers."""

    QUEUED = "queued"
    COPYING = "copying"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = frozenset((TaskState.DONE, TaskState.FAILED, TaskState.CANCELLED))


@dataclass(eq=False)
class Task:
    """One asynchronous copy. Until `final` its units (`units`, the task's own array) may not be freed or
    rewritten.

    `id` is unique within its planner, `request` the engine's name for the request, `pages` how many pages of
    the pool the copy touches. `reason` says in one word why a task is not DONE, or why an offload took fewer
    pages than were offered; empty otherwise.
    """

    id: int
    request: str
    units: Int32 = field(repr=False)
    pages: int
    state: TaskState = TaskState.QUEUED
    reason: str = ""
    _waiter: Callable[[int, Any], None] | None = field(default=None, repr=False)

    @property
    def final(self) -> bool:
        """Whether the task has ended on all ranks; the engine may use, free or rewrite its units."""
        return self.state in FINAL

    def wait(self, stream: Any = None) -> None:
        """Make `stream` wait, on the device, for this copy; the host is not blocked where streams are real.

        On the CPU device without a stream the calling thread itself waits. Whether the copy failed is known
        only when the task is final. Does nothing for a final task, and for one that is made by a bare
        `Planner`.
        """
        if not self.final and self._waiter is not None:
            self._waiter(self.id, stream)


@dataclass(eq=False)
class LoadTask(Task):
    """Host -> device: tokens [first, first + tokens) of the request. FAILED: none of them may be used."""

    first: int = 0
    tokens: int = 0


@dataclass(eq=False)
class OffloadTask(Task):
    """Device -> host: pages [start_page, start_page + pages) of the request.

    DONE with fewer pages than were offered, or with none, has a `reason`; the rest is tried again by the
    request's next `offload`. FAILED: nothing is promised.
    """

    start_page: int = 0


@dataclass(frozen=True, eq=False)
class Hit:
    """What a load would bring: tokens [first, first + tokens), from the position that the caller has computed
    on.

    `tokens` is a multiple of the finest unit; 0 has a `reason`. A hit of more than 0 holds a lease until
    `load`, `cancel`, `forget` or the request's next `lookup`; after that it is void.
    """

    first: int
    tokens: int
    reason: str = ""
    request: str = field(default="", repr=False)
