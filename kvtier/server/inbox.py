"""What other threads want of the loop: asked here, done there.

The loop owns all state, so whoever else wants to see or change any of it hands in an action. Standard library
only. Always true: an action runs on the loop's thread, once or never; one that was given up before the loop
took it up is never run.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class NotDoneError(Exception):
    """The action was not run: the loop was too busy for too long, or has ended."""


class Inbox:
    """`ring` wakes the loop, which then calls `run`. `ask` is for every thread but the loop's."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._waiting: deque[tuple[concurrent.futures.Future[Any], Callable[[float], Any]]] = deque()
        self._closed = False

    def ask(self, action: Callable[[float], _T], timeout_s: float) -> _T:
        """Have the loop run `action(now)`; what it returns or raises. NotDoneError if it did not in time."""
        future: concurrent.futures.Future[_T] = concurrent.futures.Future()
        with self._lock:
            if self._closed:
                raise NotDoneError("the sidecar is ending")
            self._waiting.append((future, action))
            self._ring()
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.cancel():
                raise NotDoneError(
                    f"the sidecar's loop did not answer within {timeout_s:g} s: nothing was done"
                ) from None
        except concurrent.futures.CancelledError:
            raise NotDoneError("the sidecar is ending: nothing was done") from None
        return future.result(timeout_s)  # it is being run right now

    def run(self, failed: Callable[[], None]) -> None:
        """Run what is waiting. On the loop's thread. `failed` is called after an action that raised."""
        while self._waiting:
            future, action = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action(time.monotonic()))
            except Exception as error:
                log.exception("what an operator asked for failed unexpectedly; checking the core")
                future.set_exception(error)
                failed()

    def close(self) -> None:
        """The loop has ended: whoever waits, or asks later, is told so."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popleft()[0].cancel()
