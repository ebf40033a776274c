"""Faults W1 to W4, W13 to W16, W23, W24 and W26 of systems of this kind, in pages and prefix index.

Each test fails when its protection is taken out: `mutations.py` shows it.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import (
    PageAllocator,
    PagedStrategy,
    Prefix,
    RadixCache,
)
from tests.memory.parts import PAGE, add, known, make_cache, make_tasks, run, snapshot


def test_w1_eviction_takes_the_tail_of_a_chain_so_that_every_cached_page_stays_reachable() -> None:
    pages, cache = make_cache()
    tokens = list(range(5 * PAGE))
    chain = add(pages, cache, tokens)
    for left in range(4, 0, -1):
        victims = cache.evict(1)
        assert victims is not None
        assert victims.tolist() == [chain[left]]
        assert known(pages, cache, tokens) == chain[:left]
        cache.check()


def test_w1_a_shared_head_outlives_all_its_branches() -> None:
    pages, cache = make_cache()
    head = list(range(2 * PAGE))
    first = add(pages, cache, head + [100] * PAGE)
    second = add(pages, cache, head + [200] * PAGE)
    victims = cache.evict(2)
    assert victims is not None
    assert sorted(victims.tolist()) == sorted([first[2], second[2]])
    assert known(pages, cache, head) == first[:2]


def test_w2_recording_again_changes_nothing_and_detaches_no_branch() -> None:
    pages, cache = make_cache()
    head = list(range(2 * PAGE))
    branches = {end: add(pages, cache, head + [end] * PAGE) for end in (100, 200, 300)}
    prefix, chain = cache.lookup([*head, *[100] * PAGE, 0])
    for _ in range(3):
        assert cache.record(prefix, head + [100] * PAGE, chain) == 0
        assert cache.record(Prefix(b"", cache.epoch), head, chain[:2]) == 0
    for end, pages_there in branches.items():
        assert known(pages, cache, head + [end] * PAGE) == pages_there
    cache.check()


def test_w3_a_prompt_that_cannot_fit_now_evicts_nothing() -> None:
    tasks = make_tasks(pages=8)
    assert run(tasks, "old", list(range(3 * PAGE))) == 0
    assert tasks.task_alloc("runs", list(range(1000, 1000 + 2 * PAGE))) is not None
    assert tasks.task_alloc("other", list(range(3000, 3000 + 2 * PAGE))) is not None
    before = snapshot(tasks)
    assert tasks.task_alloc("big", list(range(2000, 2000 + 5 * PAGE))) is None
    assert tasks.task_extend("runs", list(range(5 * PAGE))) is None
    assert snapshot(tasks) == before
    tasks.check()
    assert run(tasks, "again", [*range(3 * PAGE), 7]) == 3 * PAGE


def test_w4_a_match_is_referenced_in_the_same_call_so_that_eviction_cannot_take_it() -> None:
    pages, cache = make_cache(pages=4)
    tokens = list(range(4 * PAGE))
    chain = add(pages, cache, tokens)
    prefix, found = cache.lookup([*tokens[: 2 * PAGE], 0])
    assert [pages.ref_count(page) for page in chain] == [1, 1, 0, 0]
    assert cache.evict(3) is None
    victims = cache.evict(2)
    assert victims is not None
    assert sorted(victims.tolist()) == sorted(chain[2:])
    assert pages.alloc(3) is None
    assert found.tolist() == chain[:2]
    pages.free(found)
    cache.release(prefix)
    cache.check()


def test_w13_eviction_returns_its_victims_and_calls_nobody() -> None:
    pages, cache = make_cache(pages=4)
    chain = add(pages, cache, list(range(4 * PAGE)))
    victims = cache.evict(3)
    assert victims is not None
    assert sorted(victims.tolist()) == sorted(chain[1:])
    assert not any(cache.has_page(page) for page in chain[1:])
    again = pages.alloc(3)
    assert again is not None
    assert sorted(again.tolist()) == sorted(victims.tolist())
    takes_callable = [
        name
        for kind in (RadixCache, PageAllocator)
        for method in (kind.__init__, *vars(kind).values())
        if callable(method)
        for name, parameter in inspect.signature(method).parameters.items()
        if "Callable" in str(parameter.annotation)
    ]
    assert takes_callable == []


def test_w14_the_page_that_is_there_wins_and_the_duplicate_is_free_when_its_task_ends() -> None:
    tasks = make_tasks(pages=8)
    tokens = list(range(2 * PAGE))
    first, second = tasks.task_alloc("a", tokens), tasks.task_alloc("b", tokens)
    assert first is not None
    assert second is not None
    tasks.task_cached("a", 2 * PAGE)
    tasks.task_cached("b", 2 * PAGE)
    tasks.check()
    for name in ("b", "a"):
        tasks.task_free(name)
        tasks.check()
    third = tasks.task_alloc("c", [*tokens, 1])
    assert third is not None
    assert third.pages[:2].tolist() == first.pages.tolist() or third.cached == 2 * PAGE
    stats = tasks.stats()
    assert stats["pages_cached"] == 2
    assert stats["pages_free"] == 8 - 2 - 1
    assert stats["pages_duplicate"] == 2


def test_w14_what_follows_a_duplicate_hangs_under_the_page_that_won() -> None:
    tasks = make_tasks(pages=8)
    tokens = list(range(2 * PAGE))
    tasks.task_alloc("a", tokens)
    tasks.task_alloc("b", tokens)
    for name in ("a", "b"):
        tasks.task_cached(name, 2 * PAGE)
    tasks.task_extend("b", [7] * PAGE)
    tasks.task_cached("b", 3 * PAGE)
    tasks.task_free("a")
    tasks.check()
    assert tasks.task_alloc("big", list(range(100, 100 + 4 * PAGE))) is None  # b's chain holds a's pages
    tasks.task_free("b")
    tasks.check()
    assert run(tasks, "c", [*tokens, *[7] * PAGE, 1]) == 3 * PAGE


def test_w15_a_reference_really_counts_and_a_release_really_lets_go() -> None:
    pages, cache = make_cache(pages=4)
    tokens = list(range(2 * PAGE))
    chain = add(pages, cache, tokens)
    held = [cache.lookup([*tokens, 0]) for _ in range(3)]
    for left in range(3, 0, -1):
        assert [pages.ref_count(page) for page in chain] == [left, left]
        assert cache.evictable_pages == 0
        prefix, found = held.pop()
        pages.free(found)
        cache.release(prefix)
    assert cache.evictable_pages == 2
    with pytest.raises(UsageError, match="released already"):
        cache.release(prefix)


def test_w15_use_makes_young_and_the_least_recently_used_leaf_goes_first() -> None:
    pages, cache = make_cache()
    chains = {end: add(pages, cache, [end] * 2 * PAGE) for end in (1, 2, 3)}
    known(pages, cache, [1] * 2 * PAGE)
    victims = cache.evict(4)
    assert victims is not None
    assert sorted(victims.tolist()) == sorted(chains[2] + chains[3])
    assert known(pages, cache, [1] * 2 * PAGE) == chains[1]


def test_w16_nodes_and_roots_of_evicted_chains_are_collected() -> None:
    pages, cache = make_cache(pages=4)
    for number in range(1000):
        add(pages, cache, [number] * 4 * PAGE, namespace=number.to_bytes(4, "little"))
        assert cache.evict(4) is not None
    assert len(cache._roots) <= 200
    assert len(cache._tree.roots) == len(cache._roots)
    assert cache._tree.nodes == 0
    assert pages.free_pages == 4
    cache.check()


def test_w16_the_nodes_of_a_long_chat_do_not_pile_up() -> None:
    tasks = make_tasks(pages=64, length=256)
    assert isinstance(tasks.strategy, PagedStrategy)
    tokens = list(range(PAGE + 1))
    for turn in range(20):
        state = tasks.task_alloc("chat", tokens)
        assert state is not None
        assert state.cached == ((len(tokens) - 1) // PAGE * PAGE if turn else 0)
        tasks.task_cached("chat", len(tokens))
        for step in range(2 * PAGE):
            tasks.task_extend("chat", 1000 * turn + step)
            tasks.task_cached("chat", len(tokens) + step + 1)
        tokens = [*tasks.state("chat").tokens, turn]
        tasks.task_free("chat")
        tasks.check()
    assert tasks.strategy.cache._tree.nodes == 1


def test_w16_a_chain_is_one_node_again_when_what_split_it_has_ended() -> None:
    pages, cache = make_cache()
    add(pages, cache, list(range(4 * PAGE)))
    prefix, found = cache.lookup([*range(2 * PAGE), 0])
    assert cache._tree.nodes == 2
    pages.free(found)
    cache.release(prefix)
    assert cache._tree.nodes == 1


def test_w16_what_is_recorded_behind_a_chain_that_came_meanwhile_joins_it() -> None:
    pages, cache = make_cache()
    tokens = list(range(4 * PAGE))
    late, nothing = cache.lookup(tokens)
    assert not len(nothing)
    add(pages, cache, tokens[: 2 * PAGE])
    own = pages.alloc(4)
    assert cache.record(late, tokens, own) == 2
    assert cache._tree.nodes == 1


def test_w24_recording_a_long_chain_is_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    pages, cache = make_cache(pages=4096)
    walks: list[int] = []
    match = cache._tree.match

    def counted(root: Any, keys: bytes, state: int | None = None) -> Any:
        walks.append(len(keys))
        return match(root, keys, state)

    monkeypatch.setattr(cache._tree, "match", counted)
    chain = pages.alloc(4096)
    assert cache.record(Prefix(b"", 0), np.arange(4096 * PAGE, dtype=np.int32), chain) == 4096
    assert cache.record(Prefix(b"", 0), np.arange(4096 * PAGE, dtype=np.int32), chain) == 0
    assert len(walks) <= 2
    assert cache._tree.nodes == 1


def test_w26_namespaces_share_nothing() -> None:
    tasks = make_tasks()
    tokens = list(range(3 * PAGE))
    assert run(tasks, "a", tokens, namespace=b"one") == 0
    assert run(tasks, "b", tokens, namespace=b"two") == 0
    assert run(tasks, "c", [*tokens, 1], namespace=b"two") == 3 * PAGE
    assert run(tasks, "d", [*tokens, 1]) == 0
