"""How far a mover is: one number for each lane, and a short ring of what failed.

An int64 array that may lie in shared memory, with one writer and any number of readers, without a lock: tasks
of a lane finish in order, so one number covers any number of tasks. Imports numpy and the ground floor only.

Always true: a reader that sees a task's sequence number done also sees that it failed, or is told that
it has missed failures.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import UsageError


class Lane(enum.IntEnum):
    """The queues of a mover; each is first in, first out, and none waits for another."""

    SHORT_LOADS = 0
    LONG_LOADS = 1
    OFFLOADS = 2


LANES = len(Lane)


class Reason(enum.IntEnum):
    """Why a copy came to nothing. The numbers travel in `Progress`."""

    CANCELLED = 1
    """Taken back before it had begun."""
    AWAY = 2
    """The sidecar was gone, so nothing new was begun (R24)."""
    OTHER_POOL = 3
    """The plan is for a pool that this mover has not attached to."""
    NOT_MAPPED = 4
    """A frame lies beyond what this mover has mapped (R28)."""
    CHANGED = 5
    """A frame was given to somebody else while it was read (R31); a protocol violation."""
    BAD = 6
    """The command does not fit the buffers: a unit out of range, too many frames or too few."""
    BROKEN = 7
    """The device failed: the copy itself, or the work that it had to wait for."""
    CLOSED = 8
    """The mover was closed before the copy began."""


FAILURES = 64
"""Places in the ring of failed copies; all but one can be relied on at any time."""
_RING = LANES + 1
PROGRESS_WORDS = _RING + 2 * FAILURES


class Failure(NamedTuple):
    """One task that came to nothing."""

    task: int
    reason: Reason


class Seen(NamedTuple):
    """What one reading of `Progress` showed.

    `done[lane]`: every task of the lane with this `seq` or a lower one has finished. `failures`: those
    that failed since the last reading. `lost`: more have failed than the ring holds, so any task that was
    newly done may be one of them and must be taken as failed. `failed`: to be given to the next reading.
    """

    done: tuple[int, ...]
    failures: list[Failure]
    lost: bool
    failed: int


class Progress:
    """A mover's counters over an int64 array of `PROGRESS_WORDS`; one writer, any number of readers.

    Words: `done` of each lane, the count of failures, then the ring of (task, reason).
    """

    def __init__(self, words: npt.NDArray[np.int64] | None = None) -> None:
        if words is None:
            words = np.zeros(PROGRESS_WORDS, np.int64)
        if words.shape != (PROGRESS_WORDS,) or words.dtype != np.int64:
            raise UsageError(
                f"progress is {PROGRESS_WORDS} words of int64, got {words.shape} of {words.dtype}"
            )
        self.words = words

    def finish(self, lane: Lane, seq: int) -> None:
        """Everything in `lane` up to `seq` has finished. Writer only."""
        self.words[lane] = seq

    def fail(self, task: int, reason: Reason) -> None:
        """`task` came to nothing; to be said *before* its `finish`. Writer only."""
        count = int(self.words[LANES])
        at = _RING + 2 * (count % FAILURES)
        self.words[at] = task
        self.words[at + 1] = reason
        self.words[LANES] = count + 1  # last: a reader that sees the count sees the entry

    def read(self, failed: int = 0) -> Seen:
        """What is done now, and what failed since the reading that returned `failed`."""
        # Done before failures: a task's failure is written first, so it is in what is read after.
        done = tuple(self.words[:LANES].tolist())
        count = int(self.words[LANES])
        if count == failed:
            return Seen(done, [], False, count)
        ring = self.words[_RING:].tolist()
        # The entry before the ring's oldest may be under the writer's hand, after the count was read too.
        begin = max(failed, int(self.words[LANES]) - FAILURES + 1, 0)
        failures = [
            Failure(ring[2 * (at % FAILURES)], Reason(ring[2 * (at % FAILURES) + 1]))
            for at in range(begin, count)
        ]
        return Seen(done, failures, begin > failed, count)
