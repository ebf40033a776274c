"""The copy thread: it owns the lanes, and the mover's session with the sidecar.

One for each mover. Everything that it is told comes through one inbox; a bell (an eventfd) wakes it. Imports
client, shm, device, wire.

Always true: what was told is answered in `Progress`, also when the thread itself fails; while the sidecar is
away nothing new begins, and the old pool is let go only when nothing runs on it (R24).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.client import CacheClient
from kvtier.client.scheduling import give_way, ring
from kvtier.device.base import Copier, KVBuffers, Page
from kvtier.errors import GeometryError, KVTierError
from kvtier.mover.lanes import Job, Lanes
from kvtier.shm.mapping import populate
from kvtier.wire.plan import Cancel, Copy, Progress, Reason, pool_tag

IDLE_S = 1.0
"""The bell and the session's descriptors wake the thread; this is only a bound."""
POLL_S = 0.02
"""While copies run, the session is looked at this often, and before each begin."""
POPULATE_BYTES = 1 << 20
"""What is faulted in at a time while there is nothing to copy. Meanwhile whoever else in this process needs
memory waits in the kernel."""

log = logging.getLogger(__name__)

Pages = npt.NDArray[np.uint8]

_ABANDONED: list[object] = []
"""Jobs whose copies were still running when their mover was closed: kept, so that their memory is (R11)."""


Order = Job | Cancel


class CopyThread:
    """`make_client` is called in the thread, which owns the client from then on.

    What others may read: `attached`; `refused` (why the sidecar would not have this layout), once `started`
    is set; `finished`, how many jobs have finished, changed under `change`; `jobs`, those that have not, by
    task (the engine's thread adds, this one takes away).
    """

    _client: CacheClient

    def __init__(
        self,
        buffers: KVBuffers,
        copier: Copier,
        progress: Progress,
        make_client: Callable[[], CacheClient],
        name: str,
    ) -> None:
        self.attached = False
        self.refused: KVTierError | None = None
        self.started = threading.Event()
        self.finished = 0
        self.change = threading.Condition()
        self.jobs: dict[int, Job] = {}
        self.lanes = Lanes(buffers, copier, self, progress, self.ring, self._on_finished)
        self._shard = buffers.shard
        self._make_client = make_client
        self._inbox: deque[Order] = deque()
        self._close_by: float | None = None
        self._quiet_end = False
        self._polled_s = 0.0
        # [chunk] -> uint8[frames, shard bytes], to read and to write; kept until the pool is let go.
        self._arrays: tuple[list[Pages], list[Pages]] = ([], [])
        self._unpopulated: deque[npt.NDArray[np.uint8]] = deque()
        self._seen_chunks = (0, 0)
        self._lock = threading.Lock()  # of the bell and whether there still is one
        self._burial = threading.Lock()  # of `Progress`, once the thread is ending
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- called by others ----------------------------------------------------------------------------

    def tell(self, orders: list[Order]) -> None:
        """Queue `orders`. Never waits. When the thread has ended, jobs fail at once."""
        with self._lock:
            alive = self._bell >= 0
            if alive:
                self._inbox.extend(orders)
        self.ring()
        if not alive:
            with self._burial:
                self._bury([order for order in orders if isinstance(order, Job)], Reason.BROKEN)

    def ring(self) -> None:
        """Wake the thread. Any thread, any time."""
        with self._lock:
            if self._bell >= 0:
                ring(self._bell)

    def close(self, timeout_s: float) -> bool:
        """See `Mover.close`."""
        self._close_by = time.monotonic() + timeout_s
        self.ring()
        self._thread.join(timeout_s + 0.1)
        return not self._thread.is_alive() and self._quiet_end

    # -- the thread ----------------------------------------------------------------------------------

    def _run(self) -> None:
        give_way()
        try:
            self._client = self._make_client()
            if isinstance(self._client.refused, GeometryError):
                self.refused = self._client.refused
                self._close_by = time.monotonic()
            self._attend()
            self.started.set()
            self._work()
        except KVTierError as error:
            if self.started.is_set():
                raise
            self.refused = error
        finally:
            self._end()

    def _work(self) -> None:
        """Until told to close, and what runs has finished or had its time."""
        silent = False  # the bell was cleared, and nothing was found to do since
        while True:
            while self._inbox:
                order = self._inbox.popleft()
                if isinstance(order, Job):
                    self.lanes.add(order)
                else:
                    self.lanes.cancel(order.task)
            closing = self._close_by
            if closing is not None:
                self.lanes.refuse_waiting(Reason.CLOSED)
            if time.monotonic() - self._polled_s > POLL_S:
                self._attend()
            if self.lanes.advance():
                silent = False
                continue
            if not silent:
                self._clear_bell()
                silent = True
                continue  # what rang before is looked at once more, what rings from now on is heard below
            silent = False
            if self._client.lost and not self.lanes.running:
                self._attend()  # lets the old pool go
            if closing is None:
                if not self._populate_some():
                    self._client.wait(IDLE_S, self._bell)
                    self._polled_s = 0.0
            elif not self.lanes.running or time.monotonic() >= closing:
                return
            else:
                self._client.wait(closing - time.monotonic(), self._bell)

    def _end(self) -> None:
        """The thread's last act, however it came to it."""
        running = self.lanes.running
        with self._burial:  # what is told from now on is buried after what is here
            with self._lock:
                bell, self._bell = self._bell, -1
            os.close(bell)
            jobs = self.lanes.jobs() + [order for order in self._inbox if isinstance(order, Job)]
            if running:
                # Their frames and units are in use until their events fire: never reported as finished.
                _ABANDONED.append(jobs)
            else:
                self._bury(jobs, Reason.CLOSED if self._close_by is not None else Reason.BROKEN)
        self.attached = False
        self._unpopulated.clear()
        client = getattr(self, "_client", None)
        if client is not None:
            left = 1.0 if self._close_by is None else self._close_by - time.monotonic()
            client.close(quiet=not running, timeout_s=min(1.0, max(left, 0.05)))
        self._quiet_end = not running
        self.started.set()

    def _bury(self, jobs: list[Job], reason: Reason) -> None:
        for job in jobs:
            job.failure = job.failure or reason
            self.lanes.settle(job)

    def _clear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)

    def _on_finished(self, job: Job) -> None:
        self.jobs.pop(job.copy.task, None)
        with self.change:
            self.finished += 1
            self.change.notify_all()

    def _attend(self) -> None:
        """Look at the session: has the sidecar gone, is there a new one, are there new chunks?"""
        client = self._client
        client.poll()
        self._polled_s = time.monotonic()
        if client.lost:
            self._unpopulated.clear()
            self.lanes.refuse_waiting(Reason.AWAY)
            if not self.lanes.running:
                self._arrays = ([], [])
                client.release()
        self.attached = client.attached and client.pool.frames > 0
        if client.attached and (client.attachment_no, client.pool.chunks) != self._seen_chunks:
            if client.attachment_no != self._seen_chunks[0]:
                self._arrays = ([], [])
            self._seen_chunks = (client.attachment_no, client.pool.chunks)
            for chunk in range(len(self._arrays[0]), client.pool.chunks):
                for write, arrays in enumerate(self._arrays):
                    arrays.append(client.pool.shard(chunk, self._shard, write=bool(write)))
                flat = self._arrays[True][chunk].reshape(-1)
                for begin in range(0, len(flat), POPULATE_BYTES):
                    self._unpopulated.append(flat[begin : begin + POPULATE_BYTES])

    def _populate_some(self) -> bool:
        """Fault a part of the pool in while there is nothing else to do; False when nothing is left.

        The first copy to or from an 8 MiB page would else pay for 2,000 faults.
        """
        if not self._unpopulated:
            return False
        if not populate(self._unpopulated.popleft(), write=True):
            self._unpopulated.clear()  # an old kernel: pages are faulted in as they are used
        return True

    # -- the pool, for the lanes ---------------------------------------------------------------------

    def refuse(self, copy: Copy, pool: int) -> Reason | None:
        """See `lanes.Frames`."""
        self._attend()
        client = self._client
        if not client.attached:
            return Reason.AWAY
        if pool_tag(client.pool_id) != pool:
            return Reason.OTHER_POOL
        if len(copy.frames) and int(copy.frames.max()) >= client.pool.frames:
            return Reason.NOT_MAPPED
        return None

    def page(self, frame: int, write: bool) -> Page:
        """See `lanes.Frames`."""
        # As PoolView.page, without its checks: `refuse` has seen that the frame is mapped.
        arrays = self._arrays[write]
        chunk, within = divmod(frame, len(arrays[0]))
        page: Page = arrays[chunk][within]
        return page

    def gens(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """See `lanes.Frames`."""
        return self._client.gens(frames)
