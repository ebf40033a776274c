"""Faults W10 to W12 of systems of this kind, and what an engine relies on in the token allocator.

Each test of a fault fails when its protection is taken out: `mutations.py` shows it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import (
    KvCacheAllocator,
    MemoryManager,
    PageAllocator,
    PagedStrategy,
)
from tests.memory.parts import make_tasks


def test_w10_a_double_free_names_the_slot_or_page_and_changes_nothing() -> None:
    slots = KvCacheAllocator(16)
    given = slots.alloc(8)
    slots.free(given[2:4])
    for bad, name in (([5, 3], 3), ([0, 1, 0], 0), ([9], 9), (given, 2)):
        with pytest.raises(UsageError, match=rf"slot {name} .*double free"):
            slots.free(bad)
        assert slots.can_use_mem_size == 10
        slots.check()
    slots.free(np.delete(given, [2, 3]))
    assert sorted(slots.alloc(16).tolist()) == list(range(16))

    pages = PageAllocator(8)
    taken = pages.alloc(4)
    assert taken is not None
    pages.free(taken[1:2])
    for bad, message in ((taken, "page 1 has no reference"), ([0, 2, 0], "page 0 is named twice")):
        with pytest.raises(UsageError, match=message):
            pages.free(bad)
        assert pages.free_pages == 5
        pages.check()


@pytest.mark.parametrize("bad", [-1, 8, 1 << 20, -(1 << 31)])
def test_w11_a_foreign_index_is_named_and_changes_nothing(bad: int) -> None:
    slots = KvCacheAllocator(8)
    slots.alloc(8)
    with pytest.raises(UsageError, match=rf"slot {bad} does not exist: expected 0 \.\. 7"):
        slots.free([0, bad])
    assert slots.can_use_mem_size == 0
    pages = PageAllocator(8)
    pages.alloc(8)
    calls = (pages.free, pages.inc_ref, pages.begin_read, pages.begin_write, lambda p: pages.ref_count(p[0]))
    for call in calls:
        with pytest.raises(UsageError, match=rf"page {bad} does not exist"):
            call([bad])
    assert pages.free_pages == 0
    pages.check()


def test_w11_numbers_beyond_int32_and_non_integers_are_refused() -> None:
    slots = KvCacheAllocator(8)
    slots.alloc(8)
    for bad in ([1 << 32], np.array([1.0]), np.zeros((2, 2), np.int32)):
        with pytest.raises(UsageError):
            slots.free(bad)
    with pytest.raises(UsageError, match="int32"):
        make_tasks().task_alloc("a", [1 << 31])


def test_w12_referring_to_a_free_page_is_an_error_that_names_it() -> None:
    pages = PageAllocator(8)
    pages.alloc(2)
    for call in (pages.inc_ref, pages.begin_read, pages.begin_write):
        with pytest.raises(UsageError, match="page 5 is not"):
            call([1, 5])
        assert pages.ref_count(1) == 1
        assert pages.copying_pages == 0
    pages.check()


def test_the_hold_slot_follows_a_resize() -> None:
    manager = MemoryManager(8, torch.float32, head_num=2, head_dim=4, layer_num=3)
    for size in (20, 4):
        manager.resize_mem(size)
        assert manager.size == manager.HOLD_TOKEN_MEMINDEX == manager.allocator.can_use_mem_size == size
        assert tuple(manager.kv_buffer.shape) == (3, size + 1, 4, 4)
        assert not manager.kv_buffer.any()


def test_a_resize_while_tasks_run_is_an_error_and_changes_nothing() -> None:
    manager = MemoryManager(8, torch.float32, head_num=2, head_dim=4, layer_num=3)
    slots, buffer = manager.alloc(2), manager.kv_buffer
    with pytest.raises(UsageError, match="2 of 8 slots are in use"):
        manager.resize_mem(16)
    manager.free(slots)
    PagedStrategy(manager.allocator, 2)
    for call in (
        lambda: manager.resize_mem(16),
        manager.free_all,
        lambda: manager.alloc(1),
        lambda: manager.free([0]),
    ):
        with pytest.raises(UsageError, match="PagedStrategy"):
            call()
    assert manager.kv_buffer is buffer
    assert manager.HOLD_TOKEN_MEMINDEX == 8


def test_indices_given_out_stay_as_they_are_for_as_long_as_they_are_kept() -> None:
    slots = KvCacheAllocator(64)
    kept = [slots.alloc(8) for _ in range(4)]
    copies = [given.copy() for given in kept]
    for _ in range(50):
        slots.free(np.random.default_rng(0).permutation(np.concatenate(kept[:2])))
        kept[0], kept[1] = slots.alloc(8), slots.alloc(8)
    assert [given.tolist() for given in kept[2:]] == [given.tolist() for given in copies[2:]]
    first = copies[0]
    slots.free_all()
    slots.alloc(64)[:] = 0
    assert first.tolist() == list(range(8))
    slots.free_all()
    assert sorted(slots.alloc(64).tolist()) == list(range(64))


def test_an_over_large_request_says_needed_and_left_and_changes_nothing() -> None:
    slots = KvCacheAllocator(10)
    slots.alloc(4)
    with pytest.raises(UsageError, match="7 slots needed, 6 of 10 left"):
        slots.alloc(7)
    with pytest.raises(UsageError, match="expected 0 or more"):
        slots.alloc(-1)
    assert slots.can_use_mem_size == 6
    assert len(slots.alloc(0)) == 0
    slots.check()


def test_freeing_a_tensor_of_another_device_is_counted_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Far(torch.Tensor):  # type: ignore[misc]
        @property
        def device(self) -> Any:
            return torch.device("cuda")

    slots = KvCacheAllocator(8)
    given = torch.from_numpy(slots.alloc(4))
    for part in (given[:2], given[2:]):
        slots.free(part.as_subclass(Far))
    assert slots.device_frees == 2
    assert len(caplog.records) == 1
    assert slots.can_use_mem_size == 8
