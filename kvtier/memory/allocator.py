"""KvCacheAllocator: which token slots of a KV buffer are free.

A stack of slot numbers in host memory. May import numpy, torch and the ground floor; single-threaded.
Always true: the slots at and above the stack's top are the free ones, each exactly once; what `alloc` gave
out stays as it is for as long as its holder keeps it and, in pinned memory, a while longer (`ASYNC_SLOTS`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvtier.errors import UsageError
from kvtier.memory.indices import HandOut, Int32, check_range, first_repeated, int32_1d
from kvtier.memory.owner import ThreadOwner

_log = logging.getLogger(__name__)


class KvCacheAllocator:
    """Token slots 0 .. size - 1. The hold slot (index `size`) is not among them and is never given out.

    `pinned`: give indices out in page-locked memory; by default where there is CUDA. `free_count`: 8 writable
    bytes, aligned to 8 (shared memory, say), in which another process can read as an int64 how many slots can
    be had now: it is written after every change, in one store, and stays the caller's. `device_frees` counts
    frees of tensors on another device, each of which waits for that device.
    """

    def __init__(
        self,
        size: int,
        owner: ThreadOwner | None = None,
        *,
        pinned: bool | None = None,
        free_count: Any = None,
    ) -> None:
        self.owner = owner or ThreadOwner()
        self.device_frees = 0
        self._claimed_by: str | None = None
        pinned = torch.cuda.is_available() if pinned is None else pinned
        # Memory that is not pinned has no reader but those who hold the array: a plain copy does.
        self._copy: Callable[[Int32], Int32] = HandOut(pinned).copy if pinned else np.ndarray.copy
        self._count = _int64(bytearray(8) if free_count is None else free_count)
        self._reset(size)

    def _reset(self, size: int) -> None:
        if size < 1:
            raise UsageError(f"size={size}: expected one slot or more")
        self.size = size
        self._top = 0  # as many slots are in use; _stack[_top:] are the free ones
        self._stack: Int32 = np.arange(size, dtype=np.int32)
        # A sparse set: slot s is free where _at[s] >= _top and _stack[_at[s]] == s. So alloc touches
        # nothing per slot, and a double free is seen without a pass over all slots (W10).
        self._at: Int32 = np.arange(size, dtype=np.int32)
        self._count[0] = size

    @property
    def can_use_mem_size(self) -> int:
        """How many slots `alloc` can give now; 0 once a strategy has claimed them all."""
        return 0 if self._claimed_by is not None else self.size - self._top

    @property
    def used(self) -> int:
        """How many slots are in use; all, once a strategy has claimed them."""
        return self.size - self.can_use_mem_size

    def alloc(self, need_size: int) -> Int32:
        """`need_size` free slots as an int32 array on the host.

        The array is the caller's own and never changes while it, or a tensor of it, is held. Dropped, a
        pinned one stays as it is until `ASYNC_SLOTS` (262,144) more slots have been given out, so an
        asynchronous copy to the device may still read it. UsageError, and nothing changed, when fewer slots
        are left (ask `can_use_mem_size` first).
        """
        self.owner.check("KvCacheAllocator.alloc")
        end = self._top + need_size
        if end > self.size or need_size < 0 or self._claimed_by is not None:
            raise UsageError(self._why_not(need_size))
        slots = self._copy(self._stack[self._top : end])
        self._top = end
        self._count[0] = self.size - end
        return slots

    def alloc_runs(self, need_size: int, run: int) -> Int32:
        """As `alloc`, in runs: each `run` slots follow one another, the first a multiple of `run`.

        For kernels that address pages. `need_size` is a multiple of `run`, so that the rest of the last page
        is the caller's too. O(size), vectorised. UsageError, and nothing changed, when too few whole runs are
        free (`free_runs` says how many are).
        """
        self.owner.check("KvCacheAllocator.alloc_runs")
        if need_size < 0 or self._claimed_by is not None:
            raise UsageError(self._why_not(need_size))
        if run < 1 or need_size % run:
            raise UsageError(f"alloc_runs({need_size}, run={run}): expected a multiple of run, 1 or more")
        whole = self._whole_runs(run)
        if len(whole) * run < need_size:
            raise UsageError(
                f"alloc_runs({need_size}, run={run}): {need_size // run} whole runs needed, {len(whole)} "
                f"left (of {self.size - self._top} free slots; slots given out one by one break runs)"
            )
        firsts = np.multiply(whole[: need_size // run], run, dtype=np.int32)
        slots: Int32 = (firsts[:, None] + np.arange(run, dtype=np.int32)).ravel()
        # They change places with what lies where the stack's top will be.
        top = self._top + need_size
        above = self._at[slots]
        above = above[above >= top]
        is_chosen = np.zeros(self.size, np.bool_)
        is_chosen[slots] = True
        below = self._stack[self._top : top]
        moved = below[~is_chosen[below]]
        self._stack[above] = moved
        self._at[moved] = above
        self._stack[self._top : top] = slots
        self._at[slots] = np.arange(self._top, top, dtype=np.int32)
        self._top = top
        self._count[0] = self.size - top
        return self._copy(slots)

    def free_runs(self, run: int) -> int:
        """How many whole runs of `run` slots `alloc_runs` can give now. O(size), vectorised."""
        self.owner.check("KvCacheAllocator.free_runs")
        if run < 1:
            raise UsageError(f"free_runs({run}): expected 1 or more")
        return 0 if self._claimed_by is not None else len(self._whole_runs(run))

    def _whole_runs(self, run: int) -> Int32:
        is_free = np.zeros(self.size, np.bool_)
        is_free[self._stack[self._top :].astype(np.intp)] = True
        runs = is_free[: self.size // run * run].reshape(-1, run).all(axis=1)
        return np.flatnonzero(runs).astype(np.int32)

    def _why_not(self, need_size: int) -> str:
        if need_size < 0:
            return f"alloc({need_size}): expected 0 or more slots"
        if self._claimed_by is not None:
            return (
                f"alloc({need_size}): all {self.size} slots belong to {self._claimed_by}; allocate through it"
            )
        return f"alloc({need_size}): {need_size} slots needed, {self.size - self._top} of {self.size} left"

    def free(self, free_index: Any) -> None:
        """Give slots back: a tensor, an int array or a list, in any order.

        UsageError that names the slot, and nothing changed, for a slot that does not exist, is free
        already, or is named twice. A tensor on another device is copied to the host first, which waits
        for that device: allowed, counted in `device_frees`, warned of once.
        """
        self.owner.check("KvCacheAllocator.free")
        slots = self._host_slots(free_index)
        if self._claimed_by is not None:
            raise UsageError(f"free: all {self.size} slots belong to {self._claimed_by}; free through it")
        if not len(slots):
            return
        check_range(slots, self.size, "slot")
        index = slots.astype(np.intp)  # once, not in each of the reads and writes
        at = self._at.take(index, mode="clip")
        double = (at >= self._top) & (self._stack.take(at, mode="clip") == slots)
        if double.any():
            raise UsageError(f"free: slot {slots[double.argmax()]} is free already (double free)")
        top = self._top - len(slots)
        if top >= 0:
            # Where a slot comes twice, the later place wins and the earlier one does not read back.
            places = np.arange(top, self._top, dtype=np.int32)
            self._at[index] = places
            wrong = self._at.take(index, mode="clip") != places
        if top < 0 or wrong.any():
            raise UsageError(f"free: slot {first_repeated(slots)} is named twice in one call (double free)")
        self._stack[top : self._top] = slots
        self._top = top
        self._count[0] = self.size - top

    def free_all(self) -> None:
        """Make all slots free. UsageError once a strategy has claimed them: free its tasks instead."""
        self.owner.check("KvCacheAllocator.free_all")
        if self._claimed_by is not None:
            raise UsageError(
                f"free_all: all {self.size} slots belong to {self._claimed_by}; free its tasks instead"
            )
        self._reset(self.size)

    def resize(self, new_size: int) -> None:
        """Slots 0 .. new_size - 1 from now on, all free. UsageError while any slot is in use or claimed."""
        self.owner.check("KvCacheAllocator.resize")
        if self._claimed_by is not None:
            raise UsageError(
                f"resize({new_size}): the slots belong to {self._claimed_by}; resize through its task manager"
            )
        if self._top:
            raise UsageError(
                f"resize({new_size}): {self._top} of {self.size} slots are in use; free them first"
            )
        self._reset(new_size)

    def claim(self, claimed_by: str) -> None:
        """Take all slots for a strategy: from now on they come from it only."""
        self.owner.check("KvCacheAllocator.claim")
        if self._claimed_by is not None:
            raise UsageError(f"claim: {claimed_by} wants slots that belong to {self._claimed_by} already")
        if self._top:
            raise UsageError(f"claim: {claimed_by} needs all {self.size} slots, but {self._top} are in use")
        self._claimed_by = claimed_by
        self._count[0] = 0

    def unclaim(self) -> None:
        """The strategy that claimed the slots needs them no longer; all are free."""
        self.owner.check("KvCacheAllocator.unclaim")
        if self._claimed_by is None:
            raise UsageError("unclaim: nobody has claimed the slots")
        self._claimed_by = None
        self._count[0] = self.size

    def publish(self, can_be_had: int) -> None:
        """For whoever claimed the slots: write into `free_count` how many slots can be had from it now."""
        self._count[0] = can_be_had

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken. O(size)."""
        self.owner.check("KvCacheAllocator.check")
        free = self._stack[self._top :]
        if not 0 <= self._top <= self.size or len(np.unique(free)) != len(free):
            raise RuntimeError(f"free stack broken: top {self._top} of {self.size}, or a slot is in it twice")
        if not np.array_equal(self._at[free], np.arange(self._top, self.size)):
            raise RuntimeError("a free slot's place does not point at it")

    def _host_slots(self, free_index: Any) -> Int32:
        if isinstance(free_index, torch.Tensor):
            if free_index.device.type != "cpu":
                self.device_frees += 1
                if self.device_frees == 1:
                    _log.warning(
                        "free() of a tensor on %s waits for that device each time; keep the host copy that "
                        "alloc() gave you and free that",
                        free_index.device,
                    )
            free_index = free_index.detach().cpu().numpy()
        return int32_1d(free_index, "slots")


def _int64(memory: Any) -> memoryview:
    """The first 8 bytes of `memory` as one int64; UsageError where they cannot be written in one store."""
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous or view.nbytes < 8:
        raise UsageError(
            f"free_count: expected 8 writable bytes or more, got {view.nbytes}, readonly={view.readonly}"
        )
    count = view.cast("B")[:8].cast("q")
    if np.frombuffer(count, np.int64).ctypes.data % 8:
        raise UsageError("free_count: the memory's address must be a multiple of 8")
    return count
