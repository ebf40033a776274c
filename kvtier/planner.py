"""Planner: decides for one engine what is loaded and what is stored, and holds the leases.

May import the client, `wire.plan` and the ground floor; never torch, never zmq. One object belongs to
one engine and one thread. Always true: no call waits longer than it was told to; whatever the sidecar does
is a result, never an exception; a lease is given back exactly once, and only when no rank copies under it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from kvtier.config import Options
from kvtier.keys import PageChain
from kvtier.tasks import Hit, Int32, LoadTask, OffloadTask, Task


class Planner:
    """One per engine. Calls raise only for the caller's mistakes, and before anything has changed."""

    def __init__(self, client: Any, ranks: int = 1, options: Options = Options()) -> None: ...

    def ask(self, request: str, chain: PageChain) -> None:
        """Send the look-up of a request that has arrived; waits for nothing, may do nothing."""

    def lookup(
        self, request: str, chain: PageChain, computed: int, wait_s: float = 0.001, limit: int | None = None
    ) -> Hit | None:
        """What the host has of `chain` from token `computed` on; None = not known yet, ask again next step.

        At most `chain.tokens - 1` tokens are offered in all (or `limit`, where that is less). Blocks for at most `wait_s`.
        None is given for `Options.lookup_ms` in all, then it is a miss.
        """
        raise NotImplementedError

    def load(self, hit: Hit, units: npt.ArrayLike) -> LoadTask:
        """Bring the hit to the device: one unit for each finest unit of the hit, in token order."""
        raise NotImplementedError

    def offload(self, request: str, chain: PageChain, units: npt.ArrayLike, start: int = 0) -> OffloadTask:
        """Store what became whole: `units` hold the KV of tokens from `start` (a page boundary) on."""
        raise NotImplementedError

    def cancel(self, request: str) -> None:
        """Give up the request's look-ups, hits and what is not copying yet; what copies runs on."""

    def forget(self, request: str) -> None:
        """The request has ended: its look-ups and hits go; its tasks run on and come back."""

    def plan(self) -> Int32:
        """What the movers are to begin, for `Mover.apply`; every step, also when empty."""
        raise NotImplementedError

    def update(self, progress: Sequence[Any]) -> list[Task]:
        """Take in the progress of each rank and the sidecar's answers; the tasks that became final, in order."""
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        raise NotImplementedError

    def close(self, timeout_s: float = 5.0) -> None:
        """Give back what can be given back, within `timeout_s`."""
