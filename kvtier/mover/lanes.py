"""The queues of a mover, and the copies under way. No thread, clock or socket of its own.

Used by one thread, the copy thread. Imports device, wire and the ground floor.

Always true:
- The copies of a lane begin and finish in the order in which they came; lanes do not wait for one another,
  and take turns piece by piece.
- `Progress` says that a copy has finished only after its last byte is in place, and, of a load, after its
  frames were found to be those that were leased (R31).
- A copy that has begun is never taken back; its frames and units stay in use until its last event.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Copier, DeviceError, Event, KVBuffers, Page, Piece, check_units
from kvtier.device.cpu import CpuEvent
from kvtier.wire.plan import Copy, Kind, Lane, Progress, Reason

MAX_FLYING = 8
"""Pieces of one lane that a device has before the next is submitted."""

TURN = {Lane.SHORT_LOADS: 4, Lane.LONG_LOADS: 1, Lane.OFFLOADS: 1}
"""Pieces that a lane may begin before the next lane has its turn: short loads go ahead, none is shut out."""

log = logging.getLogger(__name__)


class Frames(Protocol):
    """Where lanes get at the pool."""

    def refuse(self, copy: Copy, pool: int) -> Reason | None:
        """Why `copy`, planned for the pool with this tag, must not begin now; None when it may."""
        ...

    def page(self, frame: int, write: bool) -> Page:
        """This rank's shard of one frame."""
        ...

    def gens(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """The generations of `frames` now."""
        ...


class Job:
    """A copy in its lane, planned for the pool with tag `pool`.

    `edge`: what it waits for; `event` fires when it has finished or failed.
    """

    __slots__ = (
        "begun",
        "cancelled",
        "copy",
        "edge",
        "event",
        "failure",
        "flying",
        "pieces",
        "pool",
        "watched",
    )

    def __init__(self, copy: Copy, pool: int, edge: Event) -> None:
        self.copy = copy
        self.pool = pool
        self.edge = edge
        self.event = CpuEvent()
        self.begun = False
        self.cancelled = False
        self.watched = False
        self.failure: Reason | None = None
        self.flying: deque[Event] = deque()
        self.pieces: Iterator[Piece] = iter(())


class Lanes:
    """`wake` is called, from any thread, when `advance` may get further than it did."""

    def __init__(
        self,
        buffers: KVBuffers,
        copier: Copier,
        frames: Frames,
        progress: Progress,
        wake: Callable[[], None],
        finished: Callable[[Job], None],
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._buffers = buffers
        self._copier = copier
        self._frames = frames
        self._progress = progress
        self._wake = wake
        self._finished = finished
        # Older first: what was submitted whole, then what waits, whose first may be submitted in part.
        self._flying: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._waiting: dict[Lane, deque[Job]] = {lane: deque() for lane in Lane}
        self._unit_bytes = buffers.layout.shard_bytes[buffers.shard] // buffers.page_units

    def add(self, job: Job) -> None:
        """`job` goes to the end of its lane."""
        self._waiting[job.copy.lane].append(job)

    def cancel(self, task: int) -> None:
        """Take `task` back if it has not begun (else this changes nothing); it finishes in its turn."""
        for waiting in self._waiting.values():
            for job in waiting:
                if job.copy.task == task:
                    job.cancelled = True

    def refuse_waiting(self, reason: Reason) -> None:
        """Everything that has not begun fails for `reason`, in its turn."""
        for waiting in self._waiting.values():
            for job in waiting:
                if not job.begun and job.failure is None:
                    job.failure = reason

    @property
    def running(self) -> bool:
        """Has a copy begun that has not finished?"""
        return any(self._flying.values()) or any(
            waiting and waiting[0].begun for waiting in self._waiting.values()
        )

    @property
    def empty(self) -> bool:
        """Is there nothing at all?"""
        return not any(self._flying.values()) and not any(self._waiting.values())

    def jobs(self) -> list[Job]:
        """All that has not finished, lane by lane, older first."""
        return [job for lane in Lane for job in (*self._flying[lane], *self._waiting[lane])]

    def advance(self) -> bool:
        """Give every lane its turn; False when none could do anything.

        So a short load that comes meanwhile waits for one piece of each other lane at most.
        """
        worked = False
        for lane, turn in TURN.items():
            if self._waiting[lane] or self._flying[lane]:
                while turn and self._step(lane):
                    worked = True
                    turn -= 1
        return worked

    def _step(self, lane: Lane) -> bool:
        worked = self._reap(lane)
        waiting = self._waiting[lane]
        if not waiting:
            return worked
        job = waiting[0]
        if not job.begun and not self._begin(job):
            return worked
        if job.failure is None:
            if len(job.flying) + sum(len(older.flying) for older in self._flying[lane]) >= MAX_FLYING:
                return worked
            piece = next(job.pieces, None)
            if piece is not None:
                self._submit(job, piece)
                return True
        waiting.popleft()
        self._flying[lane].append(job)
        self._reap(lane)
        return True

    def _begin(self, job: Job) -> bool:
        """False while the copy has to wait for its edge. It has begun, or failed, otherwise."""
        if job.failure is None and job.cancelled:
            job.failure = Reason.CANCELLED
        if job.failure is None and self._copier.host_waits:
            try:
                if not job.edge.query():
                    self._watch(job, job.edge)
                    return False
            except DeviceError:
                job.failure = Reason.BROKEN
        if job.failure is None:
            job.failure = self._frames.refuse(job.copy, job.pool)
        if job.failure is None:
            why = self._misfit(job.copy)
            if why:
                log.error("task %d is not copied: %s", job.copy.task, why)
                job.failure = Reason.BAD
        job.watched = False
        if job.failure is None:
            job.begun = True
            job.pieces = self._pieces(job.copy)
        return True

    def _submit(self, job: Job, piece: Piece) -> None:
        try:
            event = self._copier.copy(piece, job.edge)
        except Exception:
            log.exception("a piece of task %d could not be copied", job.copy.task)
            job.failure = Reason.BROKEN
            return
        if not self._has_fired(job, event):
            job.flying.append(event)

    def _reap(self, lane: Lane) -> bool:
        """Finish what has fired, in order."""
        flying, worked = self._flying[lane], False
        if not flying and self._waiting[lane]:
            self._drop_fired(self._waiting[lane][0])
        while flying:
            job = flying[0]
            self._drop_fired(job)
            if job.flying:
                break
            flying.popleft()
            self._finish(job)
            worked = True
        return worked

    def _drop_fired(self, job: Job) -> None:
        while job.flying:
            if not self._has_fired(job, job.flying[0]):
                self._watch(job, job.flying[0])
                return
            job.flying.popleft()
            job.watched = False

    def _has_fired(self, job: Job, event: Event) -> bool:
        try:
            return event.query()
        except DeviceError:
            log.exception("a piece of task %d was not copied", job.copy.task)
            job.failure = job.failure or Reason.BROKEN
            return True

    def _watch(self, job: Job, event: Event) -> None:
        """Be woken when `event` fires; once for each event that a job stands at."""
        if not job.watched:
            job.watched = True
            event.then(self._wake)

    def _finish(self, job: Job) -> None:
        copy = job.copy
        if copy.kind == Kind.LOAD and job.failure is None:
            changed = self._frames.gens(copy.frames) != copy.gens
            if changed.any():
                job.failure = Reason.CHANGED
                self.counters["protocol_violations"] += 1
                log.error(
                    "task %d: frames %s were given to others while they were loaded (protocol violation)",
                    copy.task,
                    copy.frames[changed][:8].tolist(),
                )
        self.settle(job)

    def settle(self, job: Job) -> None:
        """`job` is over: say so in `Progress` (a failure first), then to those who wait."""
        copy, name = job.copy, job.copy.kind.name.lower()
        if job.failure is not None:
            self._progress.fail(copy.task, job.failure)
            self.counters[f"{name}s_failed_{job.failure.name.lower()}"] += 1
        else:
            self.counters[f"{name}s"] += 1
            self.counters[f"{name}_bytes"] += len(copy.units) * self._unit_bytes
        self._progress.finish(copy.lane, copy.seq)
        job.event.fire()
        self._finished(job)

    def _misfit(self, copy: Copy) -> str:
        finest = self._buffers.unit_tokens
        if copy.first % finest:
            return f"it begins at token {copy.first} of a page: expected a multiple of {finest}"
        return check_units(self._buffers, copy.first // finest, copy.units, len(copy.frames))

    def _pieces(self, copy: Copy) -> Iterator[Piece]:
        """The pieces of `copy`, in token order; of an offload only from frames of this replica's turn."""
        load, most, page_units = copy.kind == Kind.LOAD, self._copier.piece_units, self._buffers.page_units
        begin, position = 0, copy.first // self._buffers.unit_tokens
        while begin < len(copy.units):
            number, inside = divmod(position, page_units)
            # A piece ends where a whole number of pieces ends in the page, so that coarse rows stay whole.
            count = min(most - inside % most, page_units - inside, len(copy.units) - begin)
            frame = int(copy.frames[number])
            if load or frame % self._buffers.replicas == self._buffers.replica:
                page = self._frames.page(frame, not load)
                yield Piece(load, page, inside, copy.units[begin : begin + count])
            begin, position = begin + count, position + count
