"""Which thread owns the memory of an engine (W4, W5).

Everything in `memory/` is single-threaded: no locks, and no look-up that another thread can make
false before it is used. One `ThreadOwner` is shared by all parts of one engine's memory, so that the
whole of it changes hands at once. Imports the ground floor only.
"""

from __future__ import annotations

import threading

from kvtier.errors import WrongThreadError

_current = threading.get_ident


class ThreadOwner:
    """The thread that may call; at first the one that made this object."""

    def __init__(self) -> None:
        self._ident = _current()
        self._name = threading.current_thread().name

    def check(self, what: str) -> None:
        """WrongThreadError where the calling thread is not the owner; `what` was called."""
        if _current() != self._ident:
            raise WrongThreadError(
                f"{what} was called from thread {threading.current_thread().name!r}, but this memory belongs "
                f"to thread {self._name!r}: post a message to it, or let the new thread call adopt() first"
            )

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner must not be inside a call."""
        self._ident = _current()
        self._name = threading.current_thread().name
