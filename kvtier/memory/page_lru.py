"""PageLru: the order in which idle cached pages were last used.

May import numpy. A queue with holes, in one array: an entry is live while its page's place points at it, so
taking a page out, or moving it to the young end, touches nothing but the page's own place. Holes are squeezed
out when the array is full, which every entry pays for once. Always true: each member has one live entry.
Every call takes many pages as one array and costs O(1) a page, on the average, at any size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.memory.indices import Int32

_ABSENT = -1


class PageLru:
    """Pages 0 .. pages - 1, none of them a member at first; `len` is how many are."""

    def __init__(self, pages: int) -> None:
        self._entries: Int32 = np.empty(2 * pages + 64, np.int32)
        self._place: npt.NDArray[np.int64] = np.full(pages, _ABSENT, np.int64)
        self._head = 0  # the oldest entry that may be live
        self._tail = 0  # where the next one goes
        self._members = 0

    def __len__(self) -> int:
        return self._members

    def add(self, pages: npt.NDArray[np.intp]) -> None:
        """Make `pages`, all different, the youngest, the last of them the very youngest; members move."""
        self.remove(pages)
        if self._tail + len(pages) > len(self._entries):
            self._squeeze()
        end = self._tail + len(pages)
        self._entries[self._tail : end] = pages
        self._place[pages] = np.arange(self._tail, end)
        self._tail = end
        self._members += len(pages)

    def remove(self, pages: npt.NDArray[np.intp]) -> None:
        """Take `pages`, all different, out, those that are members."""
        if not self._members:
            return
        self._members -= int(np.count_nonzero(self._place[pages] != _ABSENT))
        self._place[pages] = _ABSENT

    def contains(self, pages: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        """Which of `pages` are members."""
        members: npt.NDArray[np.bool_] = self._place[pages] != _ABSENT
        return members

    def pop(self, count: int) -> Int32:
        """Take the `count` oldest members out, oldest first; there must be as many."""
        found, missing = [], count
        while missing:
            end = min(self._head + missing, self._tail)
            entries = self._entries[self._head : end]
            live = entries[self._place[entries] == np.arange(self._head, end)]
            self._place[live] = _ABSENT
            found.append(live)
            missing -= len(live)
            self._head = end
        self._members -= count
        return np.concatenate(found) if found else np.empty(0, np.int32)

    def _squeeze(self) -> None:
        entries = self._entries[self._head : self._tail]
        live = entries[self._place[entries] == np.arange(self._head, self._tail)]
        self._entries[: len(live)] = live
        self._place[live] = np.arange(len(live))
        self._head, self._tail = 0, len(live)

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken. O(pages)."""
        members = np.flatnonzero(self._place != _ABSENT)
        places = self._place[members]
        if len(members) != self._members or not np.array_equal(self._entries[places], members):
            raise RuntimeError(f"{self._members} members counted, {len(members)} there, or places are wrong")
        if len(places) and not self._head <= places.min() <= places.max() < self._tail:
            raise RuntimeError("a member's entry is outside the queue")
