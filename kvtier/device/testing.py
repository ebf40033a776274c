"""A device whose copies and whose compute happen when the test says: the controllable double.

With it a test shows that a stream edge is there (and fails when it is taken out), holds a load open while
other requests go on, or lets a copy fail. Imports `device.cpu` and `device.base`.

Always true: a held copy moves no byte before it is let go, and then waits for its `after` like every other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from kvtier.device.base import Event, KVBuffers, Piece, Stream
from kvtier.device.cpu import CpuCopier, CpuEvent, CpuStream, fired
from kvtier.errors import UsageError


class HeldCopy:
    """One submitted piece. The test ends it once, by `finish` or `fail`, from any thread."""

    def __init__(self, copier: CpuCopier, piece: Piece, after: Event) -> None:
        self.piece = piece
        self.after = after
        self.event = CpuEvent()
        self._copier = copier

    def finish(self) -> None:
        """Move the bytes, as soon as `after` has fired."""
        self.after.then(self._move)

    def fail(self, error: BaseException | None = None) -> None:
        """Move nothing; the event fires with an error."""
        self.event.fire(error or RuntimeError("the test lets this copy fail"))

    def _move(self) -> None:
        try:
            self._copier.copy(self.piece, fired())
        except Exception as error:  # noqa: BLE001 - handed to whoever waits for the event
            self.event.fire(error)
            return
        self.event.fire()


class HeldCopier:
    """A copier for CPU buffers whose copies wait for the test, as a device's queue would hold them.

    `hold=False` begins with copies that run through. `held` lists what was submitted and has not been
    let go, in order.
    """

    host_waits = False

    def __init__(self, buffers: KVBuffers, *, hold: bool = True) -> None:
        self._copier = CpuCopier(buffers)
        self.piece_units = self._copier.piece_units
        self._changed = threading.Condition()
        self._hold = hold
        self._held: deque[HeldCopy] = deque()
        self.submitted = 0
        """Pieces that were ever submitted."""

    def copy(self, piece: Piece, after: Event) -> CpuEvent:
        copy = HeldCopy(self._copier, piece, after)
        with self._changed:
            self.submitted += 1
            hold = self._hold
            if hold:
                self._held.append(copy)
            self._changed.notify_all()
        if not hold:
            copy.finish()
        return copy.event

    def current_stream(self) -> Stream:
        return self._copier.current_stream()

    @property
    def held(self) -> list[HeldCopy]:
        """What is held now, oldest first."""
        with self._changed:
            return list(self._held)

    def wait_held(self, count: int, timeout_s: float = 5.0) -> list[HeldCopy]:
        """Wait until at least `count` copies are held; UsageError when they do not come in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise UsageError(f"{len(self._held)} copies are held after {timeout_s} s, expected {count}")
            return list(self._held)

    def wait_submitted(self, count: int, timeout_s: float = 5.0) -> bool:
        """Wait until `count` pieces were ever submitted; False when they were not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.submitted >= count, timeout_s)

    def finish(self, count: int | None = None) -> None:
        """Let the oldest `count` held copies go (None: all that are held)."""
        self._let_go(count, HeldCopy.finish)

    def fail(self, count: int | None = None) -> None:
        """Let the oldest `count` held copies fail (None: all that are held)."""
        self._let_go(count, HeldCopy.fail)

    def hold(self) -> None:
        """Hold what is submitted from now on."""
        with self._changed:
            self._hold = True

    def let_go(self) -> None:
        """Run what is held, and hold nothing any more."""
        with self._changed:
            self._hold = False
        self.finish()

    def _let_go(self, count: int | None, end: Callable[[HeldCopy], None]) -> None:
        with self._changed:
            number = len(self._held) if count is None else count
            if number > len(self._held):
                raise UsageError(f"{len(self._held)} copies are held, asked to end {number}")
            copies = [self._held.popleft() for _ in range(number)]
        for copy in copies:
            end(copy)


class HeldStream(CpuStream):
    """A compute stream that stands still between `hold` and `let_go`: compute of any length."""

    def __init__(self, name: str = "held-stream") -> None:
        super().__init__(name)
        self._gate = fired()

    def hold(self) -> None:
        """Work submitted from now on waits for `let_go`."""
        self._gate = CpuEvent()
        self.wait(self._gate)

    def let_go(self) -> None:
        """Go on."""
        self._gate.fire()
