"""Arrays whose memory is used again: never while anybody can reach it."""

from __future__ import annotations

import numpy as np

from kvtier.wire.arrays import KEPT_WORDS, LARGE_WORDS, Arrays

WORDS = LARGE_WORDS + 5


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


def test_memory_that_nobody_has_is_used_again() -> None:
    arrays = Arrays()
    first = arrays.empty(WORDS)
    where = address(first)
    del first
    assert address(arrays.empty(WORDS - 3)) == where


def test_memory_that_a_view_reaches_is_not_used_again() -> None:
    arrays = Arrays()
    first = arrays.empty(WORDS)
    where = address(first)
    views = [memoryview(first), first[5:9], first[:0], first.view(np.uint32)[1:]]
    del first
    while views:
        assert address(arrays.empty(WORDS)) != where
        views.pop()
    assert address(arrays.empty(WORDS)) == where


def test_arrays_in_use_never_overlap() -> None:
    arrays, random = Arrays(4 * LARGE_WORDS), np.random.default_rng(1)
    live: list[np.ndarray] = []
    for number in range(300):
        array = arrays.empty(int(random.integers(LARGE_WORDS // 2, 3 * LARGE_WORDS)))
        assert array.dtype == np.int32
        array[:] = number
        live.append(array)
        if len(live) > 4:
            gone = live.pop(int(random.integers(len(live))))
            assert (gone == gone[0]).all()
            del gone
    assert len({int(array[0]) for array in live}) == len(live)
    assert all((array == array[0]).all() for array in live)


def test_what_is_kept_is_bounded_and_unused_memory_makes_room_for_other_sizes() -> None:
    arrays = Arrays(2 * LARGE_WORDS)
    held = [arrays.empty(LARGE_WORDS) for _ in range(3)]
    assert len({address(array) for array in held}) == 3  # the third is nobody's but the caller's
    assert len(arrays.empty(KEPT_WORDS)) == KEPT_WORDS  # more than is ever kept
    held.clear()
    large = arrays.empty(2 * LARGE_WORDS)
    where = address(large)
    del large
    assert address(arrays.empty(2 * LARGE_WORDS)) == where
