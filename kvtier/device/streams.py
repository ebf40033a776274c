"""Streams and events of the CPU: a stream is a thread, or the calling thread itself.

Imports `device.base` and the standard library.

Always true: a stream does its work in order, one thing at a time; what stands behind work that failed
does not run, and its events fail with the same error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvtier.device.base import DeviceError, Event
from kvtier.errors import UsageError


class CpuEvent:
    """An event that is fired by hand, once."""

    def __init__(self) -> None:
        self._fired = threading.Event()
        self._lock = threading.Lock()
        self._calls: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def fire(self, error: BaseException | None = None) -> None:
        """What it stands for is done, or came to nothing by `error`. Later calls change nothing."""
        with self._lock:
            if self._fired.is_set():
                return
            self._error = error
            self._fired.set()
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def query(self) -> bool:
        fired = self._fired.is_set()
        if fired and self._error is not None:
            raise DeviceError(f"the work before this event failed: {self._error!r}") from self._error
        return fired

    def synchronize(self, timeout_s: float | None = None) -> bool:
        self._fired.wait(timeout_s)
        return self.query()

    def then(self, call: Callable[[], None]) -> None:
        with self._lock:
            if not self._fired.is_set():
                self._calls.append(call)
                return
        call()


_FIRED = CpuEvent()
_FIRED.fire()


def fired() -> CpuEvent:
    """An event that has fired; always the same one."""
    return _FIRED


class CallerStream:
    """The calling thread as a stream: what it has submitted is done already.

    `wait` blocks the thread itself; DeviceError after `timeout_s`, which means that something is stuck.
    """

    def __init__(self, timeout_s: float = 120.0) -> None:
        self._timeout_s = timeout_s
        self._error: Exception | None = None

    def run(self, work: Callable[[], object]) -> None:
        if self._error is None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - handed to whoever waits for this stream
                self._error = error

    def record(self) -> CpuEvent:
        if self._error is None:
            return fired()
        event = CpuEvent()
        event.fire(self._error)
        return event

    def wait(self, event: Event) -> None:
        if not event.synchronize(self._timeout_s):
            raise DeviceError(f"an event that this thread waits for has not fired in {self._timeout_s} s")

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self.record().query()


class CpuStream:
    """One thread that does what is submitted, in order.

    After work has raised, nothing more runs: events fire with the error, `synchronize` raises it.
    `close` ends the thread; work that has not begun by then is dropped, and its events fail.
    """

    def __init__(self, name: str = "kvtier-stream") -> None:
        self._wake = threading.Condition()
        self._queue: deque[Callable[[], object] | CpuEvent | _Wait] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], object]) -> None:
        self._submit(work)

    def record(self) -> CpuEvent:
        event = CpuEvent()
        self._submit(event)
        return event

    def wait(self, event: Event) -> None:
        self._submit(_Wait(event))

    def synchronize(self, timeout_s: float | None = None) -> bool:
        return self.record().synchronize(timeout_s)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End the thread; False when what it does took longer than `timeout_s`."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _submit(self, item: Callable[[], object] | CpuEvent | _Wait) -> None:
        with self._wake:
            if self._closed:
                raise UsageError("this stream is closed")
            self._queue.append(item)
            self._wake.notify_all()

    def _loop(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    break
                item = self._queue.popleft()
            if isinstance(item, CpuEvent):
                item.fire(self._error)
            elif self._error is None:
                try:
                    self._do(item)
                except Exception as error:  # noqa: BLE001 - handed to whoever waits for this stream
                    self._error = error
        dropped = self._error or DeviceError("the stream was closed before this was reached")
        for item in self._queue:
            if isinstance(item, CpuEvent):
                item.fire(dropped)

    def _do(self, item: Callable[[], object] | _Wait) -> None:
        if not isinstance(item, _Wait):
            item()
            return
        item.event.then(self._poke)
        with self._wake:
            self._wake.wait_for(lambda: self._closed or item.fired())
        if not item.event.query():
            raise DeviceError("the stream was closed while it waited for an event")

    def _poke(self) -> None:
        with self._wake:
            self._wake.notify_all()


@dataclass(frozen=True)
class _Wait:
    event: Event

    def fired(self) -> bool:
        try:
            return self.event.query()
        except DeviceError:
            return True  # the failure is raised by the query after the wait
