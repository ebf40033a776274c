"""Arrays of slot and page numbers: their type, their checks, and the memory in which slots are given out.

May import numpy, torch and the ground floor. Always true: an array that `HandOut` has given out never changes
while anybody holds it, or a tensor made of it.
"""

from __future__ import annotations

import weakref
from array import array
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvtier.errors import UsageError

Int32 = npt.NDArray[np.int32]

ASYNC_SLOTS = 1 << 18
"""An array that nobody holds any more stays as it is until this many more slots have been given out."""

_MAX_BLOCKS = 16


class HandOut:
    """Copies of slot numbers, each the receiver's own, in blocks of host memory that a device can read.

    What `copy` returns may be the source of an asynchronous copy to the device. It never changes while the
    array, a view or a tensor of it is held. Held by nobody, it stays until `block_slots` more slots have been
    given out, so a step may drop the array as soon as it has submitted its copy. `pinned`: in page-locked
    memory, so that the copy does run beside the host. Arrays longer than a block, and all while
    `_MAX_BLOCKS` blocks are held by kept arrays, are plain copies, for which the driver waits.
    """

    def __init__(self, pinned: bool, block_slots: int = ASYNC_SLOTS) -> None:
        self.pinned = pinned
        self.block_slots = block_slots
        self._storage: Int32 | None = None  # under the block that is being filled
        self._block: Int32 | None = None  # all arrays given out of it keep this object alive
        self._at = block_slots + 1  # no block: nothing fits, not even an array of no slots
        self._full: list[tuple[Int32, weakref.ref[Int32]]] = []  # oldest first

    def copy(self, values: Int32) -> Int32:
        """`values` in an array that is the caller's own."""
        at = self._at
        end = at + len(values)
        if end > self.block_slots:
            return self._from_next(values)
        self._at = end
        given: Int32 = self._block[at:end]  # type: ignore[index]  # _at says that there is a block
        given[:] = values
        return given

    def _from_next(self, values: Int32) -> Int32:
        if len(values) > self.block_slots:
            return values.copy()
        if self._storage is not None and self._block is not None:
            self._full.append((self._storage, weakref.ref(self._block)))
        self._block, self._at = None, self.block_slots + 1
        self._storage = self._idle_storage()
        if self._storage is None:
            return values.copy()
        self._block = np.frombuffer(memoryview(self._storage), np.int32)  # a new object over the old memory
        self._at = 0
        return self.copy(values)

    def _idle_storage(self) -> Int32 | None:
        """Memory of the oldest block that nobody holds, but for the one filled last; or new memory.

        So a whole block was given out since: its arrays and the next one, which did not fit, are more than
        `block_slots` together.
        """
        for place, (storage, block) in enumerate(self._full[:-1]):
            if block() is None:
                del self._full[place]
                return storage
        if len(self._full) >= _MAX_BLOCKS:
            return None
        storage = torch.empty(self.block_slots, dtype=torch.int32, pin_memory=self.pinned).numpy()
        return storage


def int32_1d(values: Any, what: str) -> Int32:
    """`values`, many or one, as an int32 array of one dimension; no copy where they are that already."""
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return values
    array = np.asarray([values] if isinstance(values, int | np.integer) else values)
    if not array.size:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            f"{what}: expected integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    if array.min() < -(1 << 31) or array.max() >= 1 << 31:
        raise UsageError(f"{what}: {array.min()} .. {array.max()} do not all fit int32")
    return array.astype(np.int32)


def packed_tokens(tokens: Any) -> array[int]:
    """A copy of `tokens` (list, array or numpy) as int32; UsageError where they do not fit."""
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens[:]
    packed = array("i")
    packed.frombytes(int32_1d(tokens, "tokens").tobytes())
    return packed


def check_range(values: Int32, size: int, noun: str) -> None:
    """UsageError that names the first of `values` outside 0 .. size - 1 (W11: -1 is no index)."""
    # One comparison for both ends: a negative int32 is a huge uint32.
    if values.size and int(values.view(np.uint32).max() if values.flags.c_contiguous else 1 << 32) >= size:
        outside = (values < 0) | (values >= size)
        if outside.any():
            raise UsageError(f"{noun} {values[outside.argmax()]} does not exist: expected 0 .. {size - 1}")


def first_repeated(values: Int32) -> int:
    """The first of `values` that stands there twice; there must be one."""
    seen: set[int] = set()
    for value in values.tolist():
        if value in seen:
            return int(value)
        seen.add(value)
    raise RuntimeError("no value is repeated")
