"""How the threads beside an engine's own share its cores, and its interpreter. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os

# A PyDLL's functions keep the interpreter's lock.
_eventfd_write = ctypes.PyDLL(None, use_errno=True).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


def give_way() -> None:
    """This thread, and those it starts, do not push others off a core at the moment when they are woken.

    Who wakes them is the engine's thread: it would stand still in its call for as long as their slice lasts,
    milliseconds, whenever no core is idle. They get their full share of the machine all the same. Does
    nothing where the host does not let it.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def ring(bell: int) -> None:
    """Make the eventfd `bell` readable, as `os.eventfd_write`, without letting go of the interpreter.

    Whoever wakes up takes the interpreter when it is next free: not now, when the caller would stand still
    until it gets it back. Never blocks on a non-blocking `bell`.
    """
    if _eventfd_write(bell, 1) and ctypes.get_errno() != errno.EAGAIN:  # EAGAIN: it is full, so it rings
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
