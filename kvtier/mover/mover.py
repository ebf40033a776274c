"""`Mover`: copies KV between one rank's device and the pool, beside the engine's own work.

One for each rank. It attaches as a mover of its group, maps the pool, and has one copy thread with a first
in, first out queue for each lane: short loads, long loads, offloads. What it is told comes as plans
(`wire.plan`), what it has done goes into `Progress`. Imports client, device, wire; never the planner.

Always true:
- A copy begins only after the event recorded by the last `mark()` before its `apply()` (what was launched
  until then is written, and old readers of reused units are done), and `wait()` holds a stream until
  a load's last byte is in place.
- A task's units, frames and arrays are touched by nothing of ours before it begins or after it has finished.
- A load is done only if its frames are still those that were leased (R31).
- While the sidecar is away nothing new begins, and what has begun runs on (R24).
"""

from __future__ import annotations

import os
import threading
import weakref
from os import PathLike
from types import TracebackType

import numpy as np
import numpy.typing as npt

from kvtier.client import CacheClient
from kvtier.config import default_run_dir
from kvtier.device.base import Copier, Event, KVBuffers, Stream
from kvtier.device.cpu import CpuCopier
from kvtier.errors import UsageError, WrongThreadError
from kvtier.mover.copying import CopyThread
from kvtier.mover.lanes import Job
from kvtier.wire.plan import Copy, Progress, decode


class Mover:
    """See the module. `mark`, `apply` and `wait` belong to the engine's thread, the first that calls one.

    `run_dir`: the sidecar's (default: `config.default_run_dir()`). `group`, `rank`, `ranks`: as the planner's
    client has them. `copier`: how bytes are moved; by default the one for the buffers' device.
    `progress_words`: an int64 array of `PROGRESS_WORDS`, perhaps in shared memory, to report to; by default
    the mover's own. `attach_timeout_s`: how long to wait here for the first attempt to attach.
    GeometryError when the sidecar refuses the layout; an absent sidecar is no error. In a forked child every
    call does nothing.
    """

    def __init__(
        self,
        buffers: KVBuffers,
        run_dir: str | PathLike[str] | None = None,
        group: str = "",
        rank: int = 0,
        ranks: int = 1,
        *,
        copier: Copier | None = None,
        progress_words: npt.NDArray[np.int64] | None = None,
        attach_timeout_s: float = 5.0,
    ) -> None:
        if not group:
            raise UsageError("a mover needs the group of its engine: the text that the planner attaches with")
        if not 0 <= rank < ranks:
            raise UsageError(f"rank={rank} of ranks={ranks}: expected 0 or more, and less")
        self.buffers = buffers
        self._copier = CpuCopier(buffers) if copier is None else copier
        self._progress = Progress(progress_words)
        self._edge: Event | None = None
        self._owner: int | None = None
        self._pid = os.getpid()
        self._closed = False
        self._seen = 0
        where = default_run_dir() if run_dir is None else run_dir

        def make_client() -> CacheClient:
            return CacheClient(
                os.fspath(where),
                layout=buffers.layout,
                group=group,
                ranks=ranks,
                role="mover",
                rank=rank,
                attach_timeout_s=attach_timeout_s,
                manual_release=True,
            )

        self._copying = CopyThread(buffers, self._copier, self._progress, make_client, f"kvtier-mover-{rank}")
        # A mover that is dropped, or left over when the interpreter ends, ends its thread and session too.
        weakref.finalize(self, _end_thread, self._copying, self._pid)
        self._copying.started.wait(attach_timeout_s + 1.0)
        if self._copying.refused is not None:
            self.close()
            raise self._copying.refused

    @property
    def attached(self) -> bool:
        """Is there a sidecar, and its pool mapped? Without it, copies fail with AWAY."""
        return self._copying.attached

    @property
    def units(self) -> int:
        """Units that a plan may name: 0 .. units - 1."""
        return self.buffers.units

    def mark(self, stream: Stream | None = None) -> None:
        """The edge: copies applied from now on wait for what was launched on `stream` until now.

        None is the calling thread's current stream; on the CPU, that thread itself.
        """
        if self._enter():
            self._edge = (self._copier.current_stream() if stream is None else stream).record()

    def apply(self, plan: npt.NDArray[np.int32], *, given: bool = False) -> None:
        """Queue what `plan` says, bound to the last `mark`. Never waits. Copies `plan`, unless it is `given`
        away: then nobody may write to it any more.

        ProtocolError, and nothing queued, for what is no plan; UsageError for copies without any `mark`, or
        when closed. A copy that cannot be made is a failed task, not an exception.
        """
        if not self._enter():
            return
        pool, commands = decode(plan if given else np.array(plan, copy=True))  # tasks own their arrays
        if not commands:
            return
        edge = self._edge
        if edge is None:
            raise UsageError("apply() before any mark(): nothing says what the copies have to wait for")
        orders = [Job(command, pool, edge) if isinstance(command, Copy) else command for command in commands]
        for order in orders:
            if isinstance(order, Job):
                self._copying.jobs[order.copy.task] = order
        self._copying.tell(orders)

    def wait(self, task: int, stream: Stream | None = None) -> None:
        """What is submitted to `stream` from now on begins only when `task` has finished or failed.

        None: the calling thread's current stream; on the CPU, that thread itself waits. A task that has
        finished, or is unknown, is not waited for. What was computed on a load that then proves failed is
        void: see `progress`.
        """
        if not self._enter():
            return
        job = self._copying.jobs.get(task)
        if job is not None:
            (self._copier.current_stream() if stream is None else stream).wait(job.event)

    def progress(self) -> Progress:
        """What has finished and what has failed; live, and readable from any thread."""
        return self._progress

    def wait_progress(self, timeout_s: float) -> bool:
        """Block until a task has finished since the last call, at most `timeout_s`: for an idle engine."""
        copying = self._copying
        with copying.change:
            came = copying.change.wait_for(lambda: copying.finished != self._seen, timeout_s)
            self._seen = copying.finished
        return came

    def stats(self) -> dict[str, int]:
        """Counters since the start: `loads`, `load_bytes`, `loads_failed_<reason>`, the same of offloads, and
        `protocol_violations` (R31), which must stay zero."""
        return {"protocol_violations": 0, **dict(self._copying.lanes.counters)}

    def close(self, timeout_s: float = 5.0) -> bool:
        """Begin nothing more, let what has begun run out, detach. False when `timeout_s` was over before.

        Then frames stay with the session until this process is dead (R11), and so does the mapping.
        """
        if os.getpid() != self._pid:
            return True
        self._closed = True
        return self._copying.close(timeout_s)

    def __enter__(self) -> Mover:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self) -> bool:
        """Checks who calls; False in a forked child, where there is no copy thread (R21)."""
        if os.getpid() != self._pid:
            return False
        if self._closed:
            raise UsageError("this mover is closed")
        me = threading.get_ident()
        if self._owner != me:
            if self._owner is not None:
                raise WrongThreadError(
                    "mark, apply and wait belong to the first thread that called one of them"
                )
            self._owner = me
        return True


def _end_thread(copying: CopyThread, pid: int) -> None:
    if os.getpid() == pid:
        copying.close(1.0)
