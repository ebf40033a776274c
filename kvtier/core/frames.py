"""The frames that nobody uses, and how many there are in all. Standard library only."""

from __future__ import annotations

from array import array

from kvtier.errors import UsageError


class FreeFrames:
    """A stack of free frames. `limit`: frames below it exist by now; it only rises, up to `total`.

    Lower frames are handed out first while the pool grows: those are mapped by everybody (R28).
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UsageError(f"frames={total}: expected 1 or more")
        self.total = total
        self.limit = 0
        self._free = array("i")

    def __len__(self) -> int:
        return len(self._free)

    def frames(self) -> array[int]:
        """A copy of all free frames."""
        return self._free[:]

    def grow(self, limit: int) -> None:
        """Frames below `limit` exist from now on."""
        if not self.limit <= limit <= self.total:
            raise UsageError(f"limit={limit}: expected {self.limit} to {self.total}")
        self._free = array("i", range(limit - 1, self.limit - 1, -1)) + self._free
        self.limit = limit

    def give(self, frames: array[int]) -> None:
        """Put frames back."""
        self._free.extend(frames)

    def take(self, count: int) -> array[int]:
        """Up to `count` frames."""
        free = self._free
        if count <= 0:
            return array("i")
        taken = free[-count:]
        del free[-count:]
        taken.reverse()
        return taken

    def take_below(self, count: int, mark: int) -> array[int]:
        """Up to `count` frames below `mark`. O(free frames): for groups that have not mapped all yet."""
        good = [frame for frame in self._free if frame < mark]
        taken = array("i", good[-count:] if count > 0 else [])
        if taken:
            chosen = set(taken)
            self._free = array("i", [frame for frame in self._free if frame not in chosen])
        return taken
