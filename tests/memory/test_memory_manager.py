"""KV buffers as attention and as a worker see them, the slot table, and what cannot be made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.layout import default_page_tokens
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.radix_cache import Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import TaskCacheState
from kvtier.memory.task_cache import TaskCacheManager


def make(size: int = 32, dtype: Any = torch.float32) -> MemoryManager:
    return MemoryManager(size, dtype, head_num=3, head_dim=8, layer_num=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cell_is_the_kv_bytes_of_one_token(dtype: Any) -> None:
    manager = make(dtype=dtype)
    assert manager.get_cell_size() * (manager.size + 1) == manager.kv_buffer.nbytes


def test_attention_sees_views_of_keys_and_values() -> None:
    manager = make()
    k, v = manager.get_att_input_params(1)
    assert tuple(k.shape) == tuple(v.shape) == (33, 3, 8)
    k[5], v[5] = 1.0, 2.0
    assert manager.kv_buffer[1, 5, :3].eq(1).all()
    assert manager.kv_buffer[1, 5, 3:].eq(2).all()
    assert not manager.kv_buffer[0].any()


def test_a_worker_gets_one_plane_a_layer_over_the_same_bytes() -> None:
    manager = make()
    buffers = manager.kv_buffers(16, engine="test/1")
    assert buffers.layout.page_tokens == 16
    assert [plane.name for plane in buffers.layout.shards[0]] == ["0.kv", "1.kv"]
    assert {plane.row_bytes for plane in buffers.layout.shards[0]} == {2 * 3 * 8 * 4}
    assert buffers.units == manager.size + 1
    manager.kv_buffer[1, 7] = 3.0
    row = buffers.planes[1][7].numpy().view(np.float32)
    assert (row == 3.0).all()
    assert len(row) == 48
    assert manager.kv_buffers().layout.page_tokens == default_page_tokens(manager.get_cell_size())


def test_what_changes_the_meaning_of_the_bytes_is_in_the_format() -> None:
    formats = {
        manager.kv_buffers(16, engine=engine).layout.format
        for manager in (
            make(),
            make(dtype=torch.int32),
            MemoryManager(32, torch.float32, head_num=6, head_dim=4, layer_num=2),
        )
        for engine in ("", "a", "b")
    }
    assert len(formats) == 9


def test_a_row_of_the_slot_table_is_filled_in_order_and_cleared_at_its_end() -> None:
    pool = ReqToTokenPool(2, 8, hold_slot=99)
    row = pool.alloc()
    assert row is not None
    pool.write(row, 0, np.array([4, 5, 6], np.int32))
    pool.write(row, 3, np.array([1], np.int32))
    pool.write(row, 1, np.array([7], np.int32))
    assert pool.table[row].tolist() == [4, 7, 6, 1, 99, 99, 99, 99]
    for start, slots, message in (
        (5, [1], "leaves a gap"),
        (4, [1] * 5, "past the table's 8"),
        (-1, [1], "gap"),
    ):
        with pytest.raises(UsageError, match=message):
            pool.write(row, start, np.array(slots, np.int32))
    pool.check()
    assert pool.alloc() == 1 - row
    assert pool.alloc() is None
    pool.free(row)
    with pytest.raises(UsageError, match="not in use"):
        pool.free(row)
    with pytest.raises(UsageError, match="not in use"):
        pool.write(row, 0, np.array([1], np.int32))
    assert (pool.host == 99).all()
    pool.check()


def test_page_sizes_that_do_not_divide_the_slots_leave_the_rest_unused() -> None:
    for page_size in (1, 3, 7, 32):
        manager = make()
        strategy = PagedStrategy(manager.allocator, page_size)
        pool = ReqToTokenPool(2, 64, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
        tasks = TaskCacheManager(manager, pool, strategy)
        assert strategy.capacity == 32 // page_size * page_size
        assert tasks.task_alloc("a", list(range(strategy.capacity))) is not None
        slots = tasks.slots("a")
        assert len(set(slots.tolist())) == strategy.capacity
        assert slots.max() < manager.size
        assert tasks.slots("a", 2, 20).tolist() == slots[2:20].tolist()
        tasks.check()


def test_tokens_may_be_a_list_an_array_or_numpy_and_are_copied() -> None:
    manager = make()
    pool = ReqToTokenPool(4, 32, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    tasks = TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, 4))
    given = np.arange(5, dtype=np.int32)
    tasks.task_alloc("a", given)
    given[:] = 9
    assert list(tasks.state("a").tokens) == [0, 1, 2, 3, 4]
    tasks.task_extend("a", np.arange(2))
    tasks.task_extend("a", 8)
    tasks.task_extend("a", [])
    assert list(tasks.state("a").tokens) == [0, 1, 2, 3, 4, 0, 1, 8]
    tasks.task_alloc("b", tasks.state("a").tokens)
    tasks.task_extend("b", 1)
    assert len(tasks.state("a").tokens) == 8


def test_an_unknown_task_or_position_is_named() -> None:
    manager = make()
    pool = ReqToTokenPool(4, 32, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    tasks = TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, 4))
    tasks.task_alloc("a", [1, 2, 3])
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: tasks.task_free("nobody"), "'nobody' is not running"),
        (lambda: tasks.slots("a", 0, 4), r"positions 0 \.\. 3 of task 'a': it has 0 \.\. 2"),
        (lambda: tasks.slots("a", 2, 2), "positions"),
        (lambda: tasks.slots("a", -1), "positions"),
        (lambda: tasks.task_cached("a", 4), "has 3 tokens, not 4"),
        (lambda: tasks.task_alloc("b", [1], match_limit=-1), "match_limit=-1"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()
    assert len(tasks) == 1
    tasks.check()


def test_parts_that_do_not_belong_together_are_refused() -> None:
    manager = make()
    strategy = PagedStrategy(manager.allocator, 4)
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: TaskCacheManager(manager, ReqToTokenPool(1, 8, 31, manager.owner), strategy),
            "hold slot is 31",
        ),
        (lambda: TaskCacheManager(manager, ReqToTokenPool(1, 8, 32), strategy), "one ThreadOwner"),
        (lambda: PagedStrategy(manager.allocator, 4), "belong to PagedStrategy"),
        (lambda: PagedStrategy(KvCacheAllocator(4), 5), r"page_size=5: expected 1 \.\. 4"),
        (lambda: RadixCache(PageAllocator(4), 0), "page_size=0"),
        (lambda: PageAllocator(0), "pages=0"),
        (lambda: KvCacheAllocator(0), "size=0"),
        (lambda: ReqToTokenPool(0, 1, 1), "max_requests=0"),
        (lambda: MemoryManager(4, torch.float32, 0, 1, 1), "head_num=0"),
        (lambda: strategy.free(TaskCacheState(req_idx=0)), "no slots"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()
    taken = KvCacheAllocator(4)
    taken.alloc(1)
    with pytest.raises(UsageError, match="needs all 4 slots, but 1 are in use"):
        PagedStrategy(taken, 2)


def test_the_index_refuses_what_is_not_its_tasks_own_chain() -> None:
    pages = PageAllocator(8, ThreadOwner())
    cache = RadixCache(pages, 2)
    own = pages.alloc(4)
    prefix, _ = cache.lookup([1, 2, 3, 4])
    with pytest.raises(UsageError, match="3 tokens for 2 pages"):
        cache.record(prefix, [1, 2, 3], own[:2])
    assert cache.record(prefix, [1, 2, 3, 4], own[:2]) == 2
    with pytest.raises(UsageError, match="differ from the task's own within its first 2 pages"):
        cache.record(prefix, [1, 2, 3, 5, 6, 7], own[:3])
    with pytest.raises(UsageError, match=rf"page {own[0]} cannot be cached"):
        cache.record(Prefix(b"other", 0), [8, 8], own[:1])
    assert b"other" not in cache._roots
    cache.release(prefix)
    with pytest.raises(UsageError, match="released already"):
        cache.record(prefix, [1, 2, 3, 4, 5, 6], own[:3])
    with pytest.raises(UsageError, match="expected 0 or more"):
        cache.evict(-1)
