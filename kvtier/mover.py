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

from os import PathLike

import numpy as np
import numpy.typing as npt

from kvtier.device.base import Copier, KVBuffers, Stream
from kvtier.wire.plan import Progress


class Mover:
    """See the module. Belongs to the engine's thread: `mark`, `apply`, `wait`, `close` are called by one thread.

    `copier`: how bytes are moved; by default the one for the buffers' device. `progress_words`: an int64 array of
    `PROGRESS_WORDS`, perhaps in shared memory, to report to; by default the mover's own.
    GeometryError when the sidecar refuses the layout; an absent sidecar is no error.
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
    ) -> None:
        raise NotImplementedError

    @property
    def attached(self) -> bool:
        """Is there a sidecar, and its pool mapped? Without it, copies fail with AWAY."""
        raise NotImplementedError

    @property
    def units(self) -> int:
        """Units that a plan may name: 0 .. units - 1."""
        raise NotImplementedError

    def mark(self, stream: Stream | None = None) -> None:
        """The edge: copies applied from now on wait for what was launched on `stream` until now.

        None is the calling thread's current stream; on the CPU, that thread itself.
        """
        raise NotImplementedError

    def apply(self, plan: npt.NDArray[np.int32]) -> None:
        """Queue what `plan` says, bound to the last `mark`. Copies `plan`, never waits.

        ProtocolError, and nothing queued, for what is no plan; UsageError for copies without any `mark`, or
        when closed. A copy that cannot be made is a failed task, not an exception.
        """
        raise NotImplementedError

    def wait(self, task: int, stream: Stream | None = None) -> None:
        """What is submitted to `stream` from now on begins only when `task` has finished or failed.

        None: the calling thread itself waits. A task that has finished, or is unknown, is not waited for.
        What was computed on a load that then proves failed is void: see `progress`.
        """
        raise NotImplementedError

    def progress(self) -> Progress:
        """What has finished and what has failed; live, and readable from any thread."""
        raise NotImplementedError

    def wait_progress(self, timeout_s: float) -> bool:
        """Block until a task has finished since the last call, at most `timeout_s`: for an idle engine."""
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> bool:
        """Begin nothing more, let what has begun run out, detach. False when that took longer than `timeout_s`.

        Then frames stay with the session until this process is dead (R11), and the mapping with the thread.
        """
        raise NotImplementedError
