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

from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kvtier.config import Options
from kvtier.keys import PageChain
from kvtier.tasks import Hit, LoadTask, OffloadTask, Task

if TYPE_CHECKING:
    from kvtier.device.base import KVBuffers

LOOKUP_WAIT_S = 0.001
"""How long `Worker.lookup` waits for an answer: a round trip is shorter than a step of most engines."""


class Worker:
    """Mover + planner of one rank. Made without a sidecar it works too: everything is a miss until one comes.

    `run_dir`: where the sidecar is (default: `kvtier.config.default_run_dir()`). `group`: this start of the engine;
    random by default.
    """

    device_bytes: int
    """Staging memory held on the device, in bytes."""

    def __init__(
        self,
        buffers: KVBuffers,
        *,
        run_dir: str | PathLike[str] | None = None,
        options: Options = Options(),
        group: str | None = None,
    ) -> None: ...

    @property
    def attached(self) -> bool:
        """Whether a sidecar is there now; it comes and goes by itself."""
        raise NotImplementedError

    def ask(self, request: str, chain: PageChain) -> None:
        """At the request's arrival: send its look-up. Waits for nothing; makes `lookup` answer at once later."""

    def lookup(
        self, request: str, chain: PageChain, computed: int, limit: int | None = None
    ) -> Hit | None:
        """What the host could bring of `chain` from token `computed` on (a multiple of the finest unit).

        None: not known yet, ask again in the next step (for `Options.lookup_ms` at most, then it is a miss). Waits
        for at most 1 ms. `limit`: offer no token at or beyond this position (default and most: `chain.tokens - 1`).
        """
        raise NotImplementedError

    def load(self, hit: Hit, units: npt.ArrayLike) -> LoadTask:
        """Copy the hit into `units` (one for each finest unit, in token order; copied here). Never blocks."""
        raise NotImplementedError

    def offload(self, request: str, chain: PageChain, units: npt.ArrayLike, start: int = 0) -> OffloadTask:
        """Store whole pages not stored yet. Call after launching the forward that fills `units`. Never blocks.

        `units`: one for each finest unit from token `start` (a page boundary) on, only of tokens that have been
        launched; give all that the request has (a view of the slot table): only what is new is copied.
        """
        raise NotImplementedError

    def cancel(self, request: str) -> None:
        """The request is aborted or preempted: queued tasks are cancelled, copies under way run on and come back."""

    def forget(self, request: str) -> None:
        """The request has ended: drop its look-ups; its tasks run on and come back. The name may be used again."""

    def step(self, stream: Any = None) -> list[Task]:
        """Once per scheduler step, also when idle: begin what is due, and return the tasks that became final.

        `stream`: where the engine computes (None: the device's current stream; on the CPU: in this thread).
        """
        raise NotImplementedError

    def wait(self, timeout_s: float) -> None:
        """For an engine with nothing to compute: return when a step may bring something, or after `timeout_s`."""

    def stats(self) -> dict[str, int]:
        """Counters of this worker: tokens asked for, hit, loaded, stored, and why the rest was not."""
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        """End in bounded time: copies under way finish or are waited for no longer than `timeout_s`."""

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
