"""How the threads beside an engine's own share its cores. Standard library only."""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """This thread, and those it starts, do not push others off a core at the moment when they are woken.

    Who wakes them is the engine's thread: it would stand still in its call for as long as their slice lasts,
    milliseconds, whenever no core is idle. They get their full share of the machine all the same. Does
    nothing where the host does not let it.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
