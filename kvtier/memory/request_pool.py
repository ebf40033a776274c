"""ReqToTokenPool: the table [request row, position] -> slot.

The master is host numpy, so that plans need no device; `table` is its mirror on the device, for attention.
May import numpy, torch and the ground floor; single-threaded. Always true: what no request has written holds
the hold slot, which is never a real slot (W20); behind a `sync` the mirror is what the master was.
"""

from __future__ import annotations

import numpy as np
import torch

from kvtier.errors import UsageError
from kvtier.memory.indices import Int32
from kvtier.memory.owner import ThreadOwner


class ReqToTokenPool:
    """`max_requests` rows of `max_length` positions; `hold_slot` is `MemoryManager.HOLD_TOKEN_MEMINDEX`.

    `host`: int32 [max_requests, max_length]; read it, write by `write`. `table`: the same on the device. On
    the CPU both are one memory. On another `device`, or over an engine's own `table` (int32, contiguous: one
    that a CUDA graph knows, say), it is a mirror, and `sync` brings it up to date: once a step, before the
    launch.
    """

    def __init__(
        self,
        max_requests: int,
        max_length: int,
        hold_slot: int,
        owner: ThreadOwner | None = None,
        *,
        device: str | torch.device = "cpu",
        table: torch.Tensor | None = None,
    ) -> None:
        if max_requests < 1 or max_length < 1 or hold_slot < 0:
            raise UsageError(
                f"max_requests={max_requests}, max_length={max_length}, hold_slot={hold_slot}: expected 1 or "
                "more rows and positions, and 0 or more as the hold slot"
            )
        shape = (max_requests, max_length)
        if table is not None and (
            tuple(table.shape) != shape or table.dtype != torch.int32 or not table.is_contiguous()
        ):
            raise UsageError(
                f"table: {table.dtype} {tuple(table.shape)}, strides {table.stride()}; expected torch.int32 "
                f"{shape}, contiguous"
            )
        self.owner = owner or ThreadOwner()
        self.max_requests = max_requests
        self.max_length = max_length
        self.hold_slot = hold_slot
        self.host: Int32 = np.full(shape, hold_slot, np.int32)
        if table is None and torch.device(device).type == "cpu":
            self.table: torch.Tensor = torch.from_numpy(self.host)
            self.mirrored = False
        else:
            self.table = torch.empty(shape, dtype=torch.int32, device=device) if table is None else table
            self.table.fill_(hold_slot)
            self.mirrored = True
        self._stale: dict[int, tuple[int, int]] = {}  # row -> from, to: what the mirror lacks
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
        self._put(row, 0, self._used[row], self.hold_slot)
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
        self._put(row, start, end, slots)
        self._used[row] = max(self._used[row], end)

    def sync(self) -> torch.Tensor:
        """`table`, brought up to date on the current stream: one copy and one write for all changes.

        Waits for nothing. What was launched on that stream before still reads the old positions, what is
        launched after it the new ones. The master may be changed at once: the copy has its own memory.
        """
        self.owner.check("ReqToTokenPool.sync")
        if self._stale:
            flat = np.concatenate(
                [
                    np.arange(row * self.max_length + a, row * self.max_length + b)
                    for row, (a, b) in self._stale.items()
                ]
            )
            self._stale.clear()
            pinned = self.table.device.type == "cuda"
            # torch keeps pinned memory from being reused before the copies out of it are done.
            staged = torch.empty((2, len(flat)), dtype=torch.int64, pin_memory=pinned)
            staged[0] = torch.from_numpy(flat)
            staged[1] = torch.from_numpy(self.host.reshape(-1)[flat])
            places, slots = staged.to(self.table.device, non_blocking=True)
            self.table.view(-1).index_copy_(0, places, slots.int())
        return self.table

    def move_hold_slot(self, hold_slot: int) -> None:
        """The hold slot is another one, after a resize. UsageError while a row is in use."""
        self.owner.check("ReqToTokenPool.move_hold_slot")
        if len(self._free) != self.max_requests:
            raise UsageError(
                f"move_hold_slot: {self.max_requests - len(self._free)} rows are in use; free them first"
            )
        self.hold_slot = hold_slot
        for row in range(self.max_requests):
            self._put(row, 0, self.max_length, hold_slot)

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

    def _put(self, row: int, start: int, end: int, slots: Int32 | int) -> None:
        self.host[row, start:end] = slots
        if self.mirrored and start < end:
            first, last = self._stale.get(row, (start, end))
            self._stale[row] = min(first, start), max(last, end)

    def _check_row(self, row: int) -> None:
        if not 0 <= row < self.max_requests or not self._taken[row]:
            raise UsageError(f"row {row} is not in use (rows 0 .. {self.max_requests - 1})")
