"""ReqToTokenPool: the table [request row, position] -> slot.

The master is host numpy; `table` is its torch mirror for attention. On the CPU both are one memory. May
import numpy, torch and the ground floor; single-threaded. Always true: what no request has written
holds the hold slot, which is never a real slot (W20).
"""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import UsageError
from kvtier.memory.allocator import Int32
from kvtier.memory.owner import ThreadOwner


class ReqToTokenPool:
    """`max_requests` rows of `max_length` positions; `hold_slot` is `MemoryManager.HOLD_TOKEN_MEMINDEX`.

    `host`: int32 [max_requests, max_length]; `table`: the same on the device. Read both; write by `write`.
    """

    def __init__(
        self, max_requests: int, max_length: int, hold_slot: int, owner: ThreadOwner | None = None
    ) -> None:
        if max_requests < 1 or max_length < 1 or hold_slot < 0:
            raise UsageError(
                f"max_requests={max_requests}, max_length={max_length}, hold_slot={hold_slot}: expected 1 or "
                "more rows and positions, and 0 or more as the hold slot"
            )
        self.owner = owner or ThreadOwner()
        self.max_requests = max_requests
        self.max_length = max_length
        self.hold_slot = hold_slot
        self.host: Int32 = np.full((max_requests, max_length), hold_slot, np.int32)
        self.table: torch.Tensor = torch.from_numpy(self.host)  # the CPU's mirror is the master itself
        self._free = list(range(max_requests - 1, -1, -1))
        self._used = [0] * max_requests  # positions written, so that free() clears no more than these
        self._taken = [False] * max_requests

    @property
    def free_rows(self) -> int:
        """How many rows `alloc` can give."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A row, all of it the hold slot; None when none is free."""
        self.owner.check("ReqToTokenPool.alloc")
        if not self._free:
            return None
        row = self._free.pop()
        self._taken[row] = True
        return row

    def free(self, row: int) -> None:
        """Give `row` back; its positions become the hold slot. UsageError where it is not in use."""
        self.owner.check("ReqToTokenPool.free")
        self._check_row(row)
        self.host[row, : self._used[row]] = self.hold_slot
        self._used[row] = 0
        self._taken[row] = False
        self._free.append(row)

    def write(self, row: int, start: int, slots: Int32) -> None:
        """Positions `start` .. of `row` are at `slots`: one vectorised write (W25).

        UsageError, and nothing written, where they do not fit the row (W8) or leave a gap before them (W9).
        """
        self.owner.check("ReqToTokenPool.write")
        self._check_row(row)
        end = start + len(slots)
        if end > self.max_length:
            raise UsageError(f"row {row}: position {end - 1} is past the table's {self.max_length} positions")
        if not 0 <= start <= self._used[row]:
            raise UsageError(
                f"row {row}: write at {start} leaves a gap, {self._used[row]} positions are known"
            )
        self.host[row, start:end] = slots
        self._used[row] = max(self._used[row], end)

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken. O(rows * length)."""
        self.owner.check("ReqToTokenPool.check")
        if sorted(self._free) != [row for row, taken in enumerate(self._taken) if not taken]:
            raise RuntimeError("free rows and rows in use do not make up the table")
        for row, used in enumerate(self._used):
            if (self.host[row, used:] != self.hold_slot).any() or (
                self.host[row, :used] == self.hold_slot
            ).any():
                raise RuntimeError(f"row {row}: {used} positions are known, but its hold slots say otherwise")

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_requests or not self._taken[row]:
            raise UsageError(f"row {row} is not in use (rows 0 .. {self.max_requests - 1})")
