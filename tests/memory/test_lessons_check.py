"""Fault W28: no self-check. What each broken invariant looks like to `TaskCacheManager.check`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

from kvtier.memory import TaskCacheManager
from tests.memory.parts import PAGE, make_tasks


def _break_refs(tasks: TaskCacheManager) -> None:
    tasks.strategy.pages._refs[tasks.state("a").pages[0]] += 1  # type: ignore[attr-defined]


def _break_free(tasks: TaskCacheManager) -> None:
    tasks.strategy.pages._top -= 1  # type: ignore[attr-defined]


def _break_row(tasks: TaskCacheManager) -> None:
    tasks.req_pool.host[tasks.state("a").req_idx, 1] += 1


def _break_hold(tasks: TaskCacheManager) -> None:
    tasks.req_pool.host[tasks.state("a").req_idx, 40] = 0


def _break_cached(tasks: TaskCacheManager) -> None:
    tasks.strategy.pages._cached[tasks.state("a").pages[0]] = False  # type: ignore[attr-defined]


def _break_pin(tasks: TaskCacheManager) -> None:
    tasks.strategy.cache._tree.unpin(tasks.state("a").prefix.node)  # type: ignore[attr-defined,union-attr]


def _break_copies(tasks: TaskCacheManager) -> None:
    tasks.strategy.pages._reads[tasks.state("a").pages[0]] += 1  # type: ignore[attr-defined]


def _break_filled(tasks: TaskCacheManager) -> None:
    tasks.state("a").filled = 100


@pytest.mark.parametrize(
    "harm",
    [
        _break_refs,
        _break_free,
        _break_row,
        _break_hold,
        _break_cached,
        _break_pin,
        _break_copies,
        _break_filled,
    ],
)
def test_w28_the_self_check_sees_a_broken_invariant(harm: Callable[[TaskCacheManager], None]) -> None:
    tasks = make_tasks()
    tasks.task_alloc("a", list(range(3 * PAGE)))
    tasks.task_cached("a", 2 * PAGE)
    tasks.check()
    harm(tasks)
    with pytest.raises((RuntimeError, AssertionError)):
        tasks.check()
