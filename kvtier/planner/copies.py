"""What the movers have: copies in lanes, and how far every rank is.

Always true: a copy leaves here once, when it has finished on all ranks; the copies of a lane leave in
the order in which they were planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtier.errors import UsageError
from kvtier.planner.records import Record
from kvtier.tasks import Int32, LoadTask, OffloadTask
from kvtier.wire.messages import NO_FRAMES, NO_GENS, Frames, Gens
from kvtier.wire.plan import LANES, Command, Copy, Kind, Progress, lane_of


@dataclass(slots=True, eq=False)
class Job:
    """One task with all that a mover needs. `number`: its lease's, 0 while there is none; `attachment`: under
    which.
    """

    task: LoadTask | OffloadTask
    record: Record
    nbytes: int
    number: int = 0
    attachment: int = 0
    frames: Frames = field(default_factory=lambda: NO_FRAMES)
    gens: Gens = field(default_factory=lambda: NO_GENS)
    units: Int32 = field(default_factory=lambda: NO_FRAMES)
    first: int = 0
    seq: int = 0
    ns: bytes = b""
    keys: bytes = b""
    asked_epoch: bool = False

    @property
    def kind(self) -> Kind:
        """Which way it goes."""
        return Kind.LOAD if isinstance(self.task, LoadTask) else Kind.OFFLOAD


class Copies:
    """Copies that were put into a plan and are not final yet; `ranks` movers work on each."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._lanes: tuple[deque[Job], ...] = tuple(deque() for _ in range(LANES))
        self._seqs = [0] * LANES
        self._done = [(0,) * LANES] * ranks
        self._failed = [0] * ranks
        self._failures: dict[int, str] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lanes))

    def begin(self, job: Job) -> Command:
        """`job` goes to the movers: the command for the plan."""
        lane = lane_of(job.kind, job.nbytes)
        self._seqs[lane] += 1
        job.seq = self._seqs[lane]
        self._lanes[lane].append(job)
        return Copy(
            task=job.task.id,
            kind=job.kind,
            lane=lane,
            seq=job.seq,
            frames=job.frames,
            gens=job.gens,
            units=job.units,
            first=job.first,
        )

    def jobs(self) -> list[Job]:
        """All that are under way."""
        return [job for lane in self._lanes for job in lane]

    def finished(self, progress: Sequence[Progress]) -> list[tuple[Job, str]]:
        """What has finished on all ranks since the last call, with the reason if it failed on any."""
        if len(progress) != self.ranks:
            raise UsageError(
                f"progress of {len(progress)} ranks: expected {self.ranks}, in the order of ranks"
            )
        if not len(self):
            return []
        for rank, one in enumerate(progress):
            seen = one.read(self._failed[rank])
            for task, reason in seen.failures:
                self._failures.setdefault(task, reason.name.lower())
            if seen.lost:
                self._fail_newly_done(rank, seen.done)
            self._done[rank], self._failed[rank] = seen.done, seen.failed
        out = []
        for lane, jobs in enumerate(self._lanes):
            done = min(ranks[lane] for ranks in self._done)
            while jobs and jobs[0].seq <= done:
                job = jobs.popleft()
                out.append((job, self._failures.pop(job.task.id, "")))
        if not len(self):
            self._failures.clear()
        return out

    def _fail_newly_done(self, rank: int, done: tuple[int, ...]) -> None:
        """More copies failed than the ring holds: whatever has just finished may be one of them."""
        for lane, jobs in enumerate(self._lanes):
            for job in jobs:
                if self._done[rank][lane] < job.seq <= done[lane]:
                    self._failures.setdefault(job.task.id, "unknown")
