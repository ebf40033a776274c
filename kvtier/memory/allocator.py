"""KvCacheAllocator: which token slots of a KV buffer are free.

A stack of slot numbers in host memory. May import numpy, torch and the ground floor; single-threaded.
Always true: the slots at and above the stack's top are the free ones, each exactly once; `alloc` hands
out copies, so indices given out stay as they are for as long as their holder keeps them.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import UsageError
from kvtier.memory.owner import ThreadOwner

Int32 = npt.NDArray[np.int32]

_log = logging.getLogger(__name__)


class KvCacheAllocator:
    """Token slots 0 .. size - 1. The hold slot (index `size`) is not among them and is never given out.

    `device_frees` counts frees of tensors on another device, each of which waits for that device.
    """

    def __init__(self, size: int, owner: ThreadOwner | None = None) -> None:
        self.owner = owner or ThreadOwner()
        self.device_frees = 0
        self._claimed_by: str | None = None
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

    @property
    def can_use_mem_size(self) -> int:
        """How many slots `alloc` can give now; 0 once a strategy has claimed them all."""
        return 0 if self._claimed_by is not None else self.size - self._top

    @property
    def used(self) -> int:
        """How many slots are in use; all, once a strategy has claimed them."""
        return self.size - self.can_use_mem_size

    def alloc(self, need_size: int) -> Int32:
        """`need_size` free slots as a new int32 array on the host: the caller's own, never changed later.

        UsageError, and nothing changed, when fewer are left (ask `can_use_mem_size` first).
        """
        self.owner.check("KvCacheAllocator.alloc")
        end = self._top + need_size
        if end > self.size or need_size < 0 or self._claimed_by is not None:
            raise UsageError(self._why_not(need_size))
        slots: Int32 = self._stack[self._top : end].copy()
        self._top = end
        return slots

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
        at = self._at[slots]
        double = (at >= self._top) & (self._stack[at] == slots)
        if double.any():
            raise UsageError(f"free: slot {slots[double.argmax()]} is free already (double free)")
        top = self._top - len(slots)
        if top >= 0:
            # Where a slot comes twice, the later place wins and the earlier one does not read back.
            places = np.arange(top, self._top, dtype=np.int32)
            self._at[slots] = places
            wrong = self._at[slots] != places
        if top < 0 or wrong.any():
            raise UsageError(f"free: slot {_first_repeated(slots)} is named twice in one call (double free)")
        self._stack[top : self._top] = slots
        self._top = top

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
                f"resize({new_size}): the slots belong to {self._claimed_by}; resize before it is made"
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


def int32_1d(values: Any, what: str) -> Int32:
    """`values` as an int32 array of one dimension, without a copy where they are one already."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values
    array = np.asarray(values)
    if not array.size:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"{what}: expected integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < -(1 << 31) or array.max() >= 1 << 31:
        raise UsageError(f"{what}: {array.min()} .. {array.max()} do not all fit int32")
    return array.astype(np.int32)


def check_range(values: Int32, size: int, noun: str) -> None:
    """UsageError that names the first of `values` outside 0 .. size - 1 (W11: -1 is no index)."""
    # One comparison for both ends: a negative int32 is a huge uint32.
    if values.size and int(values.view(np.uint32).max() if values.flags.c_contiguous else 1 << 32) >= size:
        outside = (values < 0) | (values >= size)
        if outside.any():
            raise UsageError(f"{noun} {values[outside.argmax()]} does not exist: expected 0 .. {size - 1}")


def _first_repeated(values: Int32) -> int:
    seen: set[int] = set()
    for value in values.tolist():
        if value in seen:
            return int(value)
        seen.add(value)
    raise RuntimeError("no value is repeated")  # more slots given than are in use, all different: impossible
