"""A resize on every strategy: hold slot, slot table and slots follow, or nothing changes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import (
    TaskCacheManager,
)
from tests.memory.strategies import LONGEST, SIZE, Make, fill, snapshot


def test_a_resize_is_an_error_while_a_task_runs_or_a_copy_is_open(make: Make) -> None:
    tasks = make()
    tasks.task_alloc("a", [1, 2, 3])
    tasks.task_cached("a", 3)
    before, buffer = snapshot(tasks), tasks.manager.kv_buffer
    with pytest.raises(UsageError, match="1 tasks run and 0 copies"):
        tasks.resize_mem(2 * SIZE)
    assert snapshot(tasks) == before
    hold = tasks.hold_offload("a", 0, 3)
    tasks.task_free("a")
    with pytest.raises(UsageError, match="0 tasks run and 1 copies"):
        tasks.resize_mem(2 * SIZE)
    assert tasks.manager.kv_buffer is buffer
    tasks.release(hold)
    tasks.resize_mem(2 * SIZE)
    tasks.check()


@pytest.mark.parametrize("size", [2 * SIZE, SIZE // 2])
def test_hold_slot_table_and_strategy_follow_a_resize(make: Make, size: int) -> None:
    tasks = make()
    for name in fill(tasks):
        tasks.task_cached(name, LONGEST)
        tasks.task_free(name)
    tasks.resize_mem(size)
    assert tasks.manager.HOLD_TOKEN_MEMINDEX == tasks.req_pool.hold_slot == size
    assert (tasks.req_pool.table == size).all()
    assert tasks.manager.kv_buffer.shape[1] == size + 1
    tasks.check()
    names = fill(tasks)
    assert len(names) == size // (-(-LONGEST // _unit(tasks)) * _unit(tasks))
    assert all(tasks.state(name).cached == 0 for name in names)  # what was cached went with the buffers
    assert all(tasks.slots(name).max() < size for name in names)
    tasks.check()


def _unit(tasks: TaskCacheManager) -> int:
    return getattr(tasks.strategy, "page_size", LONGEST)


def test_a_size_that_cannot_work_is_refused_before_anything_changes(make: Make) -> None:
    tasks = make()
    before = snapshot(tasks)
    with pytest.raises(UsageError, match="expected 1"):
        tasks.resize_mem(0)
    assert snapshot(tasks) == before
    assert fill(tasks)


def test_buffers_that_cannot_be_made_leave_the_old_size(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make()
    init = tasks.manager._init_buffers

    def fails_for_more(size: int) -> None:
        if size > SIZE:
            raise RuntimeError("out of memory")
        init(size)

    monkeypatch.setattr(tasks.manager, "_init_buffers", fails_for_more)
    with pytest.raises(RuntimeError, match="out of memory"):
        tasks.resize_mem(2 * SIZE)
    assert tasks.manager.HOLD_TOKEN_MEMINDEX == SIZE == tasks.req_pool.hold_slot
    assert len(fill(tasks)) >= 2
    tasks.check()


def test_counters_outlive_a_resize(make: Make) -> None:
    tasks = make()
    tasks.task_alloc("a", [1] * LONGEST)
    tasks.task_cached("a", LONGEST)
    tasks.task_free("a")
    before = {name: count for name, count in tasks.stats().items() if "recorded" in name or "begun" in name}
    assert before["tasks_begun"] == 1
    tasks.resize_mem(2 * SIZE)
    assert before.items() <= tasks.stats().items()
