"""Fault W23: what one page costs does not grow with the allocator. Array elements are counted, not time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from kvtier.memory import PageAllocator


def _size(value: Any) -> int:
    return value.size if isinstance(value, np.ndarray) else 1


class Counted(np.ndarray):
    """An array that counts its elements that are read, written or computed with."""

    touched = 0

    @classmethod
    def over(cls, thing: Any) -> int:
        """Make every array of `thing` counted; answers how many."""
        arrays = {name: value for name, value in vars(thing).items() if isinstance(value, np.ndarray)}
        for name, value in arrays.items():
            setattr(thing, name, value.view(cls))
        return len(arrays)

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            return found  # a view: counted when it is used
        Counted.touched += _size(found)
        return np.asarray(found) if isinstance(found, np.ndarray) else found

    def __setitem__(self, key: Any, value: Any) -> None:
        Counted.touched += _size(np.asarray(self)[key])
        super().__setitem__(key, value)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        plain = [np.asarray(item) if isinstance(item, Counted) else item for item in inputs]
        Counted.touched += max(_size(item) for item in plain)
        if out is not None:
            options["out"] = tuple(np.asarray(item) for item in out)
        return getattr(ufunc, method)(*plain, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        Counted.touched += sum(item.size for item in args if isinstance(item, Counted))
        plain = [np.asarray(item) if isinstance(item, Counted) else item for item in args]
        return function(*plain, **kwargs)

    def copy(self, order: Any = "C") -> Any:
        Counted.touched += self.size
        return np.asarray(self).copy(order)


def _touched_by_one_page(size: int) -> dict[str, int]:
    """Array elements that each operation on one page touches, in an allocator of `size` pages."""
    pages = PageAllocator(size)
    held = pages.alloc(size - 8)
    assert held is not None
    pages.free(held[: size // 2], keep_cached=True)
    assert Counted.over(pages) > 5
    assert Counted.over(pages._lru) == 2
    page = held[-1:]
    calls: dict[str, Callable[[], Any]] = {
        "alloc": lambda: pages.alloc(1),
        "inc_ref": lambda: pages.inc_ref(page),
        "free": lambda: pages.free(page),
        "free, cached": lambda: pages.free(page, keep_cached=True),
        "touch": lambda: pages.touch(held[:1]),
        "hit": lambda: pages.inc_ref(held[:1]),
        "evict": lambda: pages.evict(1),
        "begin_read": lambda: pages.begin_read(held[:1]),
        "end_read": lambda: pages.end_read(held[:1]),
        "cached_pages": lambda: pages.cached_pages + pages.copying_pages + pages.evictable_pages,
    }
    counts = {}
    for name, call in calls.items():
        Counted.touched = 0
        call()
        counts[name] = Counted.touched
    return counts


def test_w23_a_page_costs_the_same_in_a_small_allocator_and_among_a_million() -> None:
    small, large = _touched_by_one_page(1_000), _touched_by_one_page(1_000_000)
    assert small == large
    assert max(large.values()) < 50
    assert min(count for name, count in large.items() if name != "cached_pages") > 0  # it does count
    Counted.touched = 0
    np.arange(1000).view(Counted).sum()
    assert Counted.touched >= 1000
