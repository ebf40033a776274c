"""Loads of host pages into a task, offloads out of it, and what later tasks may share of them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from tests.memory.parts import PAGE, make_tasks, run


def test_pages_of_a_load_are_not_shared_before_it_is_final() -> None:
    tasks = make_tasks()
    tokens = list(range(4 * PAGE))
    tasks.task_alloc("a", tokens)
    hold = tasks.hold_load("a", 0, 3 * PAGE)
    with pytest.raises(UsageError, match="written by a copy=True"):
        tasks.task_cached("a", 3 * PAGE)
    with pytest.raises(UsageError, match="written by a copy=True"):
        tasks.write_slots("a", 2 * PAGE)
    assert run(tasks, "b", tokens) == 0
    tasks.flush()
    tasks.release(hold)
    tasks.check()


def test_a_load_that_succeeded_is_shared_from_then_on() -> None:
    tasks = make_tasks()
    tokens = list(range(4 * PAGE))
    tasks.task_alloc("a", tokens)
    tasks.release(tasks.hold_load("a", 0, 3 * PAGE))
    tasks.task_cached("a", 3 * PAGE)
    assert run(tasks, "b", [*tokens[: 3 * PAGE], 99]) == 3 * PAGE


def test_what_a_failed_load_did_not_bring_is_computed_into_the_same_slots() -> None:
    tasks = make_tasks()
    tokens = list(range(4 * PAGE))
    state = tasks.task_alloc("a", tokens)
    assert state is not None
    before = tasks.slots("a")
    hold = tasks.hold_load("a", 0, 3 * PAGE)
    tasks.release(hold)  # and no task_cached: the load failed
    assert state.filled == 0
    assert tasks.write_slots("a", 0).tolist() == before.tolist()
    assert run(tasks, "other", [*tokens, 1]) == 0
    tasks.task_cached("a", 4 * PAGE)
    tasks.check()


def test_an_aborted_task_that_never_computed_leaves_nothing_in_the_cache() -> None:
    tasks = make_tasks()
    tokens = list(range(4 * PAGE))
    tasks.task_alloc("a", tokens)
    hold = tasks.hold_load("a", 0, 3 * PAGE)
    tasks.task_free("a")
    tasks.release(hold)
    assert tasks.stats()["pages_cached"] == 0
    assert tasks.stats()["pages_free"] == 16
    tasks.check()


def test_a_load_may_begin_inside_a_page_but_not_over_valid_tokens() -> None:
    tasks = make_tasks()
    tasks.task_alloc("a", list(range(4 * PAGE)))
    tasks.task_cached("a", PAGE + 1)
    with pytest.raises(UsageError, match="never overwritten"):
        tasks.hold_load("a", PAGE, 3 * PAGE)
    hold = tasks.hold_load("a", PAGE + 1, 3 * PAGE)
    assert hold.pages.tolist() == tasks.state("a").pages[1:3].tolist()
    tasks.release(hold)


def test_only_filled_tokens_are_offloaded() -> None:
    tasks = make_tasks()
    tasks.task_alloc("a", list(range(3 * PAGE)))
    tasks.task_cached("a", 2 * PAGE)
    with pytest.raises(UsageError, match="only the first 8 are filled"):
        tasks.hold_offload("a", 0, 2 * PAGE + 1)


def test_generated_tokens_are_recorded_so_that_the_next_turn_hits() -> None:
    tasks = make_tasks()
    prompt = list(range(PAGE + 2))
    tasks.task_alloc("turn 1", prompt)
    tasks.task_cached("turn 1", len(prompt))
    for step in range(2 * PAGE):
        tasks.task_extend("turn 1", 100 + step)
        tasks.task_cached("turn 1", len(prompt) + step + 1)
    tasks.task_free("turn 1")
    reply = [100 + step for step in range(2 * PAGE)]
    assert run(tasks, "turn 2", [*prompt, *reply, 5, 6, 7]) == 3 * PAGE


def test_after_a_flush_nothing_hits_and_what_was_begun_before_it_is_not_recorded() -> None:
    tasks = make_tasks()
    tokens = list(range(3 * PAGE))
    run(tasks, "old", tokens)
    sharer = tasks.task_alloc("sharer", [*tokens, 1])
    assert sharer is not None
    assert sharer.cached == 3 * PAGE
    tasks.task_alloc("late", [50] * 2 * PAGE)
    assert tasks.flush() == 0
    tasks.check()
    tasks.task_cached("late", 2 * PAGE)
    tasks.task_cached("sharer", 3 * PAGE + 1)
    tasks.check()
    assert run(tasks, "a", [50] * 2 * PAGE) == 0
    assert run(tasks, "b", [*tokens, 1]) == 0
    tasks.task_free("sharer")
    tasks.task_free("late")
    tasks.check()
    assert tasks.flush() == 5
    assert tasks.stats()["pages_free"] == 16
