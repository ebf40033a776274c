"""What every `AllocationStrategy` promises: one suite, over pages of several sizes and over fixed ranges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import (
    AllocationStrategy,
    ContiguousStrategy,
    KvCacheAllocator,
    MemoryManager,
    PagedStrategy,
    ReqToTokenPool,
    TaskCacheManager,
    TaskCacheState,
)
from tests.memory.strategies import LONGEST, SIZE, STRATEGIES, Make, fill, snapshot


@pytest.mark.parametrize("kind", [PagedStrategy, ContiguousStrategy])
def test_every_member_of_the_protocol_is_there(kind: type) -> None:
    allocator = KvCacheAllocator(8)
    strategy = kind(allocator, 4)
    members = {name for name in vars(AllocationStrategy) if not name.startswith("_")}
    members |= set(AllocationStrategy.__annotations__)
    assert {"alloc", "free_slots", "capacity", "owner"} <= members
    assert [name for name in members if not hasattr(strategy, name)] == []


def test_each_position_has_a_slot_that_no_other_position_has(make: Make) -> None:
    tasks = make()
    names = fill(tasks)
    assert len(names) >= 2
    slots = np.concatenate([tasks.slots(name) for name in names])
    assert len(set(slots.tolist())) == len(names) * LONGEST
    assert slots.min() >= 0
    assert slots.max() < tasks.manager.HOLD_TOKEN_MEMINDEX
    for name in names:
        row = tasks.req_pool.table[tasks.state(name).req_idx]
        assert row.tolist() == tasks.slots(name).tolist()
        assert tasks.slots(name, 3, 9).tolist() == tasks.slots(name)[3:9].tolist()
    tasks.check()


def test_slots_stay_where_they_are_while_a_task_grows(make: Make) -> None:
    tasks = make()
    tasks.task_alloc("a", [1])
    tasks.task_alloc("b", [2])
    for step in range(1, 15):
        before = {name: tasks.slots(name).tolist() for name in "ab"}
        for name in "ab":
            more = tasks.task_extend(name, step)
            assert more is not None
            assert tasks.slots(name).tolist() == [*before[name], int(more[0])]
    assert not set(tasks.slots("a").tolist()) & set(tasks.slots("b").tolist())
    tasks.check()


def test_what_does_not_fit_changes_nothing_and_fits_after_an_end(make: Make) -> None:
    tasks = make()
    names = fill(tasks)
    before = snapshot(tasks)
    assert tasks.task_alloc("late", [7] * LONGEST) is None
    assert snapshot(tasks) == before
    assert tasks.stats()["refused"] == 2
    tasks.task_free(names[0])
    assert tasks.task_alloc("late", [7] * LONGEST) is not None
    tasks.check()


def test_all_slots_come_back_over_and_over(make: Make) -> None:
    tasks = make()
    free = tasks.stats()["slots_free"]
    for _ in range(5):
        for name in fill(tasks):
            tasks.task_cached(name, LONGEST - 3)
            tasks.task_free(name)
        tasks.check()
        assert tasks.stats()["slots_free"] == free
    tasks.flush()
    assert tasks.stats()["slots_free"] == free
    assert len(tasks) == 0


def test_mistakes_are_named_and_change_nothing(make: Make) -> None:
    tasks = make(length=64)
    tasks.task_alloc("a", [1, 2, 3])
    longest = tasks.strategy.capacity
    before = snapshot(tasks)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: tasks.task_alloc("a", [4]), "'a' is running already"),
        (lambda: tasks.task_alloc("b", []), "0 tokens"),
        (lambda: tasks.task_alloc("b", [1] * (longest + 1)), f"{longest + 1} tokens, expected 1"),
        (lambda: tasks.task_extend("a", [1] * (longest - 2)), f"would have {longest + 1} tokens"),
        (lambda: tasks.task_extend("a", 1, pos=5), "the next is not 5"),
        (lambda: tasks.strategy.extend(tasks.state("a"), 4, tasks.state("a").tokens), "without a gap"),
        (lambda: tasks.strategy.free(TaskCacheState(req_idx=0)), "no slots"),
        (lambda: tasks.manager.alloc(1), "allocate through it"),
        (lambda: STRATEGIES["ranges"](tasks.manager.allocator), "belong to"),
        (lambda: tasks.hold_offload("a", 0, 3), "only the first 0 are filled"),
    ]
    for call, message in calls:
        with pytest.raises(UsageError, match=message):
            call()
        assert snapshot(tasks) == before
    tasks.check()


def test_a_task_never_writes_what_another_reads(make: Make) -> None:
    tasks = make()
    tokens = list(range(12))
    tasks.task_alloc("first", tokens)
    first = tasks.write_slots("first", 0)
    tasks.task_cached("first", 12)
    second = tasks.task_alloc("second", tokens)
    assert second is not None
    assert second.cached < 12  # something is left to compute (W6)
    shared = tasks.slots("second", 0, second.cached) if second.cached else np.empty(0, np.int32)
    assert shared.tolist() == first[: second.cached].tolist()
    assert not set(tasks.write_slots("second", second.cached).tolist()) & set(first.tolist())
    tasks.check()


def test_what_a_copy_reads_or_writes_is_not_reused_before_it_is_final(make: Make) -> None:
    tasks = make()
    free = tasks.stats()["slots_free"]
    tasks.task_alloc("a", list(range(LONGEST)))
    tasks.task_cached("a", 8)
    busy, written = set(tasks.slots("a", 0, 16).tolist()), set(tasks.slots("a", 8, 16).tolist())
    out, into = tasks.hold_offload("a", 0, 8), tasks.hold_load("a", 8, 16)
    tasks.task_free("a")
    tasks.check()
    assert tasks.stats()["copying"] > 0
    for hold in (out, into):
        still = busy if hold is out else written
        names = fill(tasks)
        assert names
        assert not {slot for name in names for slot in tasks.slots(name).tolist()} & still
        for name in names:
            tasks.task_free(name)
        tasks.flush()
        assert tasks.stats()["slots_free"] < free
        tasks.release(hold)
        tasks.check()
        with pytest.raises(UsageError, match="not open"):
            tasks.release(hold)
    assert tasks.stats()["copying"] == 0
    tasks.flush()
    assert tasks.stats()["slots_free"] == free


def test_positions_under_a_load_are_neither_computed_nor_shared_until_it_is_final(make: Make) -> None:
    tasks = make()
    tokens = list(range(LONGEST))
    tasks.task_alloc("a", tokens)
    hold = tasks.hold_load("a", 0, 14)
    for call in (
        lambda: tasks.task_cached("a", 14),
        lambda: tasks.write_slots("a", 7),
        lambda: tasks.hold_load("a", 0, 7),
    ):
        with pytest.raises(UsageError, match="written by a copy=True"):
            call()
    other = tasks.task_alloc("b", tokens)
    assert other is not None
    assert other.cached == 0
    tasks.release(hold)
    tasks.task_cached("a", 14)
    with pytest.raises(UsageError, match="never overwritten"):
        tasks.hold_load("a", 13, 15)
    tasks.write_slots("a", 14)
    tasks.check()


def test_several_offloads_may_read_the_same_positions(make: Make) -> None:
    tasks = make()
    free = tasks.stats()["slots_free"]
    tasks.task_alloc("a", list(range(LONGEST)))
    tasks.task_cached("a", 14)
    holds = [tasks.hold_offload("a", 0, 14), tasks.hold_offload("a", 7, 14)]
    tasks.task_free("a")
    for hold in holds:
        tasks.flush()
        tasks.check()
        assert tasks.stats()["slots_free"] < free
        tasks.release(hold)
    tasks.flush()
    assert tasks.stats()["slots_free"] == free


def test_the_free_count_follows_every_change(make: Make) -> None:
    memory = np.zeros(4, np.int64)
    tasks = make(free_count=memory.data)

    def agrees() -> int:
        assert memory[0] == tasks.stats()["slots_free"] == tasks.strategy.free_slots
        assert not memory[1:].any()
        return int(memory[0])

    full = agrees()
    tasks.task_alloc("a", list(range(12)))
    assert agrees() < full
    tasks.task_extend("a", [5] * 7)
    agrees()
    tasks.task_cached("a", 14)
    agrees()
    hold = tasks.hold_offload("a", 0, 14)
    tasks.task_free("a")
    agrees()
    tasks.release(hold)
    assert agrees() == full
    tasks.flush()
    assert agrees() == full
    tasks.resize_mem(SIZE // 2)
    assert 0 < agrees() <= SIZE // 2


def test_the_self_check_sees_a_slot_that_is_lost(make: Make) -> None:
    tasks = make()
    tasks.task_alloc("a", list(range(LONGEST)))
    tasks.check()
    tasks.state("a").pages = tasks.state("a").pages[:-1].copy()
    with pytest.raises((RuntimeError, UsageError)):
        tasks.check()


def test_a_range_is_one_run_and_is_never_shared() -> None:
    manager = MemoryManager(50, torch.int64, 1, 1, 1)
    pool = ReqToTokenPool(4, 20, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    tasks = TaskCacheManager(manager, pool, ContiguousStrategy(manager.allocator, 20))
    for name in "ab":
        state = tasks.task_alloc(name, [1] * 15, namespace=b"x", match_limit=9)
        assert state is not None
        assert state.cached == 0
        tasks.task_extend(name, [2] * 5)
        tasks.task_cached(name, 20)
        first = int(state.pages[0]) * 20
        assert tasks.slots(name).tolist() == list(range(first, first + 20))
    assert tasks.stats()["ranges_free"] == 0  # 10 slots are no range
    assert tasks.task_alloc("c", [1]) is None
    assert tasks.flush() == 0
