"""Worker: what an engine embeds. A mover and a planner for one rank, stepped together.

May import planner, mover, client and below; needs torch through the buffers. One object belongs to one
thread. Always true: no call raises because of the sidecar, and none waits longer than its bound.

An engine's step, in this order:

    hit = worker.lookup(name, chain, computed)      # at admission; None: ask again in the next step
    task = worker.load(hit, units)                  # if hit.tokens and the request is admitted
    ... launch the forward pass of requests that wait for no task ...
    worker.offload(name, chain, units)              # after the launch
    for task in worker.step(): ...                  # once per step, also when idle: tasks that are final
"""

from __future__ import annotations

import secrets
import time
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy.typing as npt

from kvtier.client import CacheClient
from kvtier.config import Options, default_run_dir
from kvtier.keys import PageChain
from kvtier.mover import Mover
from kvtier.planner import Planner
from kvtier.tasks import Hit, LoadTask, OffloadTask, Task, TaskState
from kvtier.wire.messages import FlushReply
from kvtier.wire.plan import HEADER_WORDS

if TYPE_CHECKING:
    from kvtier.device.base import Copier, KVBuffers

DEFAULTS = Options()
LOOKUP_WAIT_S = 0.001
"""How long `Worker.lookup` waits for an answer: longer than a round trip, shorter than most engines' steps.
"""
ATTACH_WAIT_S = 2.0
"""How long the constructor waits for a sidecar that does not answer; one that is absent is not waited for."""
ENDS_WAIT_S = 0.25
"""How long `close` waits for the sidecar to acknowledge ends; detaching says them all once more."""
_SLICE_S = 0.001

SomeTask = TypeVar("SomeTask", bound=Task)


class Worker:
    """Mover + planner of one rank. Made without a sidecar it works too: everything is a miss until one comes.

    An engine's step: `lookup` and `load` at admission, the forward pass of requests that wait for no task,
    `offload` after its launch, `step` once (see the module for the lines). A request that ends is told by
    `forget`, one that is aborted by `cancel`. Rule numbers (R11 and so on) are those of docs/protocol.md.

    `run_dir`: where the sidecar is (default: `kvtier.config.default_run_dir()`). `group`: this start of the
    engine; random by default. `copier`: how bytes are moved (default: the one for the buffers' device).
    The constructor waits for a few seconds at most; a sidecar that is absent or stands still is logged, and
    tried again in the background. GeometryError, with the command that helps, when a sidecar is in use
    with another geometry: an engine that silently misses for ever would be worse. The thread of the first
    call owns the worker; WrongThreadError for others.
    """

    device_bytes: int = 0
    """Staging memory held on the device, in bytes; the CPU device needs none."""

    def __init__(
        self,
        buffers: KVBuffers,
        *,
        run_dir: str | PathLike[str] | None = None,
        options: Options = DEFAULTS,
        group: str | None = None,
        copier: Copier | None = None,
    ) -> None:
        where = Path(run_dir) if run_dir is not None else default_run_dir()
        name = group if group is not None else secrets.token_hex(8)
        self._client = CacheClient(
            where, layout=buffers.layout, group=name, ranks=1, attach_timeout_s=ATTACH_WAIT_S
        )
        try:
            self._mover = Mover(buffers, where, name, 0, 1, copier=copier, attach_timeout_s=ATTACH_WAIT_S)
        except BaseException:
            self._client.close()
            raise
        self._planner = Planner(self._client, 1, options, units=buffers.units)
        self._tasks: dict[int, Task] = {}
        self._closed = False

    @property
    def attached(self) -> bool:
        """Whether a sidecar is there, and its pool is mapped to copy to; it comes and goes by itself."""
        client = self._client
        return client.attached and client.complete and client.pool.frames > 0 and self._mover.attached

    def ask(self, request: str, chain: PageChain) -> None:
        """At the request's arrival: send its look-up, so that `lookup` can answer at once. Waits for nothing.

        The answer holds a lease until `lookup` and `load`, `cancel` or `forget`.
        """
        self._planner.ask(request, chain)

    def lookup(self, request: str, chain: PageChain, computed: int, limit: int | None = None) -> Hit | None:
        """What the host could bring of `chain` from token `computed` on (a multiple of the finest unit).

        None: not known yet, ask again in the next step (for `Options.lookup_ms` in all, then it is a miss).
        Waits for at most 1 ms. `limit`: offer no token at or beyond this position (default and most:
        `chain.tokens - 1`).
        """
        return self._planner.lookup(request, chain, computed, LOOKUP_WAIT_S, limit)

    def load(self, hit: Hit, units: npt.ArrayLike) -> LoadTask:
        """Copy the hit into `units` (one for each finest unit, in token order; copied here). Never blocks."""
        return self._kept(self._planner.load(hit, units))

    def offload(self, request: str, chain: PageChain, units: npt.ArrayLike, start: int = 0) -> OffloadTask:
        """Store whole pages not stored yet. Call after launching the forward that fills `units`. Never
        blocks.

        `units`: one for each finest unit from token `start` (a page boundary) on, only of tokens that have
        been launched; give all that the request has (a view of the slot table): only what is new is copied.
        What was left out (`task.pages`, `task.reason`) is taken by a later call.
        """
        return self._kept(self._planner.offload(request, chain, units, start))

    def cancel(self, request: str) -> None:
        """The request is aborted: what is queued is cancelled, copies under way run on and come back."""
        self._planner.cancel(request)

    def forget(self, request: str) -> None:
        """The request has ended: drop its look-ups. Its tasks run on and come back; its name is free."""
        self._planner.forget(request)

    def step(self, stream: Any = None) -> list[Task]:
        """Once per scheduler step, also when idle: begin what is due, and return the tasks that became final.

        `stream`: where the engine computes (None: the device's current stream; on the CPU: in this thread).
        Tasks come in the order in which they were made. Never blocks.
        """
        final = self._planner.update([self._mover.progress()])
        for task in final:
            self._tasks.pop(task.id, None)
        self._begin(stream)
        return final

    def wait(self, timeout_s: float) -> None:
        """For an engine with nothing to compute: return when a step may bring something, or after
        `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while not self._planner.due:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            if not self._planner.copying:
                self._client.wait(left_s)
                return
            if not self._planner.waiting:
                self._mover.wait_progress(left_s)
                return
            if self._mover.wait_progress(min(_SLICE_S, left_s)) or self._client.wait(0.0):
                return

    def wait_attached(self, timeout_s: float) -> bool:
        """Block until `attached`, at most `timeout_s`; whether it is. For a start that wants hits at once."""
        deadline = time.monotonic() + timeout_s
        while not self.attached:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._client.wait(min(0.01, left_s))  # the mover attaches in its own thread, without a bell here
            self._planner.poll()
        # What the mover has said before this round trip, the sidecar knows after it (R28).
        self._client.stats(min(max(deadline - time.monotonic(), 0.0), ENDS_WAIT_S))
        return True

    def flush(self, namespace: bytes = b"", timeout_s: float = 1.0) -> tuple[int, int] | None:
        """Make the sidecar forget one namespace (`PageChain.namespace`), or all of it: pages (freed, doomed).

        Doomed pages go when their copies end; both are found no more. None when it did not answer in time.
        """
        self._planner.poll()
        reply = self._client.flush(namespace, timeout_s)
        if not isinstance(reply.body, FlushReply):
            return None
        self._planner.flushed(namespace)
        return reply.body.freed, reply.body.doomed

    def stats(self) -> dict[str, int]:
        """Counters of this worker: tokens asked for, hit, loaded, stored, and why the rest was not."""
        return self._planner.stats() | {"attached": int(self.attached), "device_bytes": self.device_bytes}

    def close(self, timeout_s: float = 5.0) -> None:
        """End in bounded time: copies under way may finish, but are waited for no longer than `timeout_s`.

        Copies that have not ended by then keep their frames until this process is gone (R11).
        """
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        self._planner.stop()
        self._begin(None)
        while self._planner.copying:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._mover.wait_progress(left_s)
            self._planner.update([self._mover.progress()])
        quiet = not self._planner.copying
        self._planner.close(min(ENDS_WAIT_S, max(deadline - time.monotonic(), 0.0)))
        self._client.close(quiet, max(deadline - time.monotonic(), 0.01))
        self._mover.close(max(deadline - time.monotonic(), 0.01))

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, stream: Any) -> None:
        plan = self._planner.plan()
        if len(plan) > HEADER_WORDS:
            self._mover.mark(stream)
            self._mover.apply(plan, given=True)

    def _kept(self, task: SomeTask) -> SomeTask:
        task._waiter = self._wait
        self._tasks[task.id] = task
        return task

    def _wait(self, number: int, stream: Any) -> None:
        """A task's `wait`: what is still queued goes to the mover first."""
        task = self._tasks.get(number)
        if task is not None and task.state is TaskState.QUEUED:
            self._begin(stream)
        self._mover.wait(number, stream)
