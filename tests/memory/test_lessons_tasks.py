"""Faults W5 to W9, W18, W20, W25, W27 and W28 of systems of this kind, in the life of tasks.

Each test fails when its protection is taken out: `mutations.py` shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError, WrongThreadError
from kvtier.memory import KvCacheAllocator, PagedStrategy, Prefix
from tests.memory.parts import PAGE, make_tasks, run, snapshot


def _public_calls() -> list[Any]:
    tasks = make_tasks()
    strategy = tasks.strategy
    assert isinstance(strategy, PagedStrategy)
    tasks.task_alloc("a", list(range(9)))
    tasks.task_cached("a", 9)
    hold = tasks.hold_offload("a", 0, 8)
    allocator = KvCacheAllocator(8)
    free = KvCacheAllocator(8)
    page = [int(tasks.state("a").pages[0])]
    prefix = Prefix(b"", 0)
    array = np.zeros(1, np.int32)
    calls: dict[str, Callable[[], object]] = {
        "tasks.task_alloc": lambda: tasks.task_alloc("b", [1, 2]),
        "tasks.task_extend": lambda: tasks.task_extend("a", 1),
        "tasks.task_cached": lambda: tasks.task_cached("a", 9),
        "tasks.task_free": lambda: tasks.task_free("a"),
        "tasks.state": lambda: tasks.state("a"),
        "tasks.slots": lambda: tasks.slots("a"),
        "tasks.write_slots": lambda: tasks.write_slots("a", 8),
        "tasks.hold_load": lambda: tasks.hold_load("a", 8, 9),
        "tasks.hold_offload": lambda: tasks.hold_offload("a", 0, 8),
        "tasks.release": lambda: tasks.release(hold),
        "tasks.flush": tasks.flush,
        "tasks.resize_mem": lambda: tasks.resize_mem(8),
        "manager.profile_size": lambda: tasks.manager.profile_size(0.5, available_bytes=1 << 20),
        "tasks.stats": tasks.stats,
        "tasks.check": tasks.check,
        "allocator.alloc": lambda: allocator.alloc(1),
        "allocator.free": lambda: allocator.free([0]),
        "allocator.free_all": allocator.free_all,
        "allocator.resize": lambda: allocator.resize(4),
        "allocator.claim": lambda: free.claim("x"),
        "allocator.unclaim": allocator.unclaim,
        "allocator.alloc_runs": lambda: allocator.alloc_runs(4, 2),
        "allocator.free_runs": lambda: allocator.free_runs(2),
        "allocator.check": allocator.check,
        "pages.alloc": lambda: strategy.pages.alloc(1),
        "pages.inc_ref": lambda: strategy.pages.inc_ref(page),
        "pages.free": lambda: strategy.pages.free(page),
        "pages.touch": lambda: strategy.pages.touch(page),
        "pages.evict": lambda: strategy.pages.evict(1),
        "pages.begin_read": lambda: strategy.pages.begin_read(page),
        "pages.end_read": lambda: strategy.pages.end_read(page),
        "pages.begin_write": lambda: strategy.pages.begin_write(page),
        "pages.end_write": lambda: strategy.pages.end_write(page),
        "pages.check_writable": lambda: strategy.pages.check_writable(page),
        "pages.check": strategy.pages.check,
        "cache.lookup": lambda: strategy.cache.lookup([1, 2, 3]),
        "cache.record": lambda: strategy.cache.record(prefix, [1] * PAGE, array),
        "cache.release": lambda: strategy.cache.release(prefix),
        "cache.evict": lambda: strategy.cache.evict(1),
        "cache.flush": strategy.cache.flush,
        "cache.check": strategy.cache.check,
        "rows.alloc": tasks.req_pool.alloc,
        "rows.free": lambda: tasks.req_pool.free(0),
        "rows.write": lambda: tasks.req_pool.write(0, 0, array),
        "rows.sync": tasks.req_pool.sync,
        "rows.move_hold_slot": lambda: tasks.req_pool.move_hold_slot(1),
        "rows.check": tasks.req_pool.check,
    }
    return [pytest.param(call, id=name) for name, call in calls.items()]


def _raised_in_another_thread(call: Callable[[], object]) -> BaseException | None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except (UsageError, WrongThreadError) as error:
            raised.append(error)

    thread = threading.Thread(target=body, name="stranger")
    thread.start()
    thread.join(timeout=30)
    return raised[0] if raised else None


@pytest.mark.parametrize("call", _public_calls())
def test_w5_a_call_from_another_thread_is_an_error_that_names_both(call: Callable[[], object]) -> None:
    error = _raised_in_another_thread(call)
    assert isinstance(error, WrongThreadError)
    assert "stranger" in str(error)
    assert "MainThread" in str(error)


def test_w5_a_thread_that_adopts_the_memory_owns_all_parts_of_it() -> None:
    tasks = make_tasks()
    states: list[object] = []

    def engine() -> None:
        tasks.adopt()
        states.append(tasks.task_alloc("a", [1, 2, 3]))
        tasks.check()

    assert _raised_in_another_thread(engine) is None
    assert len(states) == 1
    with pytest.raises(WrongThreadError):
        tasks.task_free("a")
    tasks.adopt()
    tasks.task_free("a")
    tasks.check()


@pytest.mark.parametrize("extra", range(PAGE + 1))
def test_w6_a_hit_on_the_full_prompt_leaves_a_token_to_compute_into_a_page_of_its_own(extra: int) -> None:
    tasks = make_tasks()
    tokens = list(range(2 * PAGE + extra))
    run(tasks, "first", [*tokens, *range(50, 50 + 2 * PAGE)])
    state = tasks.task_alloc("second", tokens)
    assert state is not None
    assert state.cached == (len(tokens) - 1) // PAGE * PAGE
    first = tasks.write_slots("second", state.cached)
    assert not any(tasks.strategy.pages.is_cached(int(slot) // PAGE) for slot in first)  # type: ignore[attr-defined]


def test_w6_writing_a_shared_page_is_refused_by_name() -> None:
    tasks = make_tasks()
    tokens = list(range(3 * PAGE))
    run(tasks, "first", tokens)
    state = tasks.task_alloc("second", tokens)
    assert state is not None
    with pytest.raises(UsageError, match=rf"page {state.pages[1]} .*cached=True"):
        tasks.write_slots("second", state.cached - 1)
    with pytest.raises(UsageError, match="filled already"):
        tasks.hold_load("second", PAGE, 3 * PAGE)


def test_w6_an_engine_that_starts_at_a_fixed_position_shares_nothing_behind_it() -> None:
    tasks = make_tasks()
    tokens = list(range(4 * PAGE))
    run(tasks, "first", tokens)
    state = tasks.task_alloc("second", tokens, match_limit=2 * PAGE + 1)
    assert state is not None
    assert state.cached == 2 * PAGE
    tasks.write_slots("second", 2 * PAGE)
    tasks.task_cached("second", 4 * PAGE)
    tasks.task_free("second")
    tasks.check()
    assert tasks.stats()["pages_duplicate"] == 2


def test_w7_a_task_id_in_use_is_refused_and_nothing_changes() -> None:
    tasks = make_tasks()
    tasks.task_alloc("a", [1, 2, 3])
    before = snapshot(tasks)
    with pytest.raises(UsageError, match="'a' is running already"):
        tasks.task_alloc("a", [4, 5, 6])
    assert snapshot(tasks) == before
    tasks.check()


def test_w8_a_prompt_longer_than_the_table_or_the_device_is_refused_and_nothing_changes() -> None:
    tasks = make_tasks(pages=4, length=12)
    tasks.task_alloc("a", [1] * 10)
    before = snapshot(tasks)
    with pytest.raises(UsageError, match=r"13 tokens, expected 1 \.\. 12"):
        tasks.task_alloc("b", [1] * 13)
    with pytest.raises(UsageError, match="13 tokens, the slot table has 12"):
        tasks.task_extend("a", [1, 2, 3])
    with pytest.raises(UsageError, match="0 tokens"):
        tasks.task_alloc("b", [])
    tasks_small = make_tasks(pages=2)
    with pytest.raises(UsageError, match=r"9 tokens, expected 1 \.\. 8"):
        tasks_small.task_alloc("b", [1] * 9)
    assert snapshot(tasks) == before
    tasks.check()


@pytest.mark.parametrize("pos", [-1, 0, 2, 4, 60])
def test_w9_extending_with_a_gap_or_backwards_is_refused_and_nothing_changes(pos: int) -> None:
    tasks = make_tasks()
    tasks.task_alloc("a", [1, 2, 3])
    before = snapshot(tasks)
    with pytest.raises(UsageError, match=f"3 positions, the next is not {pos}"):
        tasks.task_extend("a", 9, pos=pos)
    state = tasks.state("a")
    assert isinstance(tasks.strategy, PagedStrategy)
    if pos >= 0:
        with pytest.raises(UsageError, match="without a gap"):
            tasks.strategy.extend(state, pos, state.tokens)
    assert snapshot(tasks) == before
    assert tasks.task_extend("a", 9, pos=3) is not None


def test_w18_a_failed_alloc_or_extend_leaves_no_partial_pages() -> None:
    tasks = make_tasks(pages=4)
    tasks.task_alloc("a", [1] * 2 * PAGE)
    tasks.task_alloc("b", [2] * PAGE)
    before, state = snapshot(tasks), tasks.state("b")
    assert tasks.task_extend("b", [3] * (PAGE + 1)) is None
    assert (state.length, len(state.pages), list(state.tokens)) == (PAGE, 1, [2] * PAGE)
    assert tasks.task_alloc("c", [4] * (PAGE + 1)) is None
    assert snapshot(tasks) == before
    tasks.check()
    assert tasks.task_extend("b", [3] * PAGE) is not None


def test_w18_without_a_free_row_nothing_is_taken_or_evicted() -> None:
    tasks = make_tasks(pages=4, rows=1)
    run(tasks, "old", list(range(3 * PAGE)))
    tasks.task_alloc("a", [1])
    before = snapshot(tasks)
    assert tasks.task_alloc("b", [2] * 2 * PAGE) is None
    assert snapshot(tasks) == before
    tasks.check()


def test_w20_positions_without_a_slot_point_at_the_hold_slot_and_no_task_ever_owns_it() -> None:
    tasks = make_tasks(pages=4, rows=2, length=16)
    hold = tasks.manager.HOLD_TOKEN_MEMINDEX
    assert hold == 16
    assert tasks.manager.kv_buffer.shape[1] == hold + 1
    state = tasks.task_alloc("a", list(range(16)))
    assert state is not None
    assert sorted(tasks.slots("a").tolist()) == list(range(16))
    row, other = state.req_idx, 1 - state.req_idx
    assert (tasks.req_pool.table[other] == hold).all()
    assert tasks.req_pool.table[row].tolist() == tasks.slots("a").tolist()
    tasks.task_free("a")
    assert (tasks.req_pool.table == hold).all()
    tasks.task_alloc("b", [1, 2])
    assert (tasks.req_pool.table != hold).sum() == 2


def test_w25_the_slot_table_is_written_once_for_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = make_tasks(pages=64, length=256)
    writes: list[int] = []
    write = tasks.req_pool.write

    def counted(row: int, start: int, slots: Any) -> None:
        writes.append(len(slots))
        write(row, start, slots)

    monkeypatch.setattr(tasks.req_pool, "write", counted)
    tasks.task_alloc("a", list(range(200)))
    tasks.task_extend("a", list(range(20)))
    assert writes == [200, 20]


def test_w27_pages_that_a_copy_reads_or_writes_are_not_reused_before_it_is_final() -> None:
    tasks = make_tasks(pages=8)
    tasks.task_alloc("a", list(range(5 * PAGE)))
    tasks.task_cached("a", 2 * PAGE)
    busy = set(tasks.slots("a", 0, 4 * PAGE).tolist())
    out, into = tasks.hold_offload("a", 0, 2 * PAGE), tasks.hold_load("a", 2 * PAGE, 4 * PAGE)
    tasks.task_free("a")
    tasks.check()
    assert tasks.stats()["copying"] == 4
    assert tasks.task_alloc("big", list(range(100, 100 + 5 * PAGE))) is None
    tasks.task_alloc("b", list(range(100, 100 + 4 * PAGE)))
    assert not busy & set(tasks.slots("b").tolist())
    tasks.flush()
    assert tasks.task_extend("b", 1) is None
    tasks.release(into)
    tasks.release(out)
    tasks.check()
    tasks.task_alloc("c", list(range(200, 200 + 4 * PAGE)))
    assert set(tasks.slots("c").tolist()) == busy
    with pytest.raises(UsageError, match="not open"):
        tasks.release(out)


def test_w28_counters_tell_what_was_asked_hit_refused_and_evicted() -> None:
    tasks = make_tasks(pages=4)
    run(tasks, "a", list(range(3 * PAGE)))
    run(tasks, "b", [*range(2 * PAGE), 99])
    run(tasks, "c", [7] * 4 * PAGE)
    tasks.task_alloc("d", [8] * 4 * PAGE)
    tasks.task_alloc("e", [9])
    stats = tasks.stats()
    assert stats["tokens_asked"] == 3 * PAGE + 2 * PAGE + 1 + 4 * PAGE + 4 * PAGE
    assert stats["tokens_hit"] == 2 * PAGE
    assert (stats["tasks"], stats["tasks_begun"], stats["refused"]) == (1, 4, 1)
    assert (stats["pages_recorded"], stats["pages_evicted"]) == (7, 7)
