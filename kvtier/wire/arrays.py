"""int32 arrays of units and plans, in memory that is used again.

A fresh array of more than some 100 KiB is mapped by the kernel page by page as it is first written, which
costs ten times what writing it does. Imports numpy and the standard library only.

Always true: an array that is handed out shares memory with no other that anybody can still reach.
"""

from __future__ import annotations

import sys

import numpy as np
import numpy.typing as npt

LARGE_WORDS = 1 << 14
"""Smaller arrays come from the allocator, which has such memory at hand."""
KEPT_WORDS = 1 << 21
"""The most that is kept, in all: 8 MiB."""


class Arrays:
    """Hands out arrays, and keeps the memory of those that nobody has any more.

    Every view of an array refers to the array that owns the memory, so the owner's reference count tells
    whether there is one. `empty` belongs to one thread; views may be dropped in any.
    """

    def __init__(self, kept_words: int = KEPT_WORDS) -> None:
        # Counts are exact only where the interpreter has its lock.
        self._room = kept_words if getattr(sys, "_is_gil_enabled", lambda: True)() else 0
        self._owners = [np.empty(0, np.int32)]
        self._alone = self._counts()[0][0]  # what is counted when there is no view
        self._owners.clear()

    def _counts(self) -> list[tuple[int, int]]:
        """Of each owner: how many references there are, and its words."""
        return [(sys.getrefcount(owner), len(owner)) for owner in self._owners]

    def empty(self, words: int) -> npt.NDArray[np.int32]:
        """int32[words] with whatever it holds; the caller's until the last view of it is gone."""
        if words < LARGE_WORDS:
            return np.empty(words, np.int32)
        for at, (count, size) in enumerate(self._counts()):
            if count == self._alone and words <= size <= 2 * words:
                return self._owners[at][:words]
        size = 1 << (words - 1).bit_length()
        if size > self._room:
            self._drop()
        if size > self._room:
            return np.empty(words, np.int32)
        self._room -= size
        self._owners.append(np.empty(size, np.int32))
        return self._owners[-1][:words]

    def _drop(self) -> None:
        """Let go of what nobody uses."""
        used = [count != self._alone for count, _ in self._counts()]
        self._room += sum(len(owner) for owner, use in zip(self._owners, used, strict=True) if not use)
        self._owners = [owner for owner, use in zip(self._owners, used, strict=True) if use]
