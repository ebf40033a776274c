"""The faults W1 to W28 of systems of this kind: each test fails when its protection is taken out."""

from __future__ import annotations

import inspect
import threading
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError, WrongThreadError
from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.radix_cache import Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.task_cache import TaskCacheManager

PAGE = 4


def make_tasks(pages: int = 16, rows: int = 4, length: int = 64) -> TaskCacheManager:
    manager = MemoryManager(pages * PAGE, torch.float32, head_num=1, head_dim=2, layer_num=2)
    pool = ReqToTokenPool(rows, length, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    return TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, PAGE))


def make_cache(pages: int = 16) -> tuple[PageAllocator, RadixCache]:
    allocator = PageAllocator(pages)
    return allocator, RadixCache(allocator, PAGE)


def add(pages: PageAllocator, cache: RadixCache, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """A task that computed `tokens` (whole pages) and ended; answers the chain's pages."""
    prefix, shared = cache.lookup([*tokens, 0], namespace=namespace)
    own = pages.alloc(len(tokens) // PAGE - len(shared))
    assert own is not None
    chain = np.concatenate((shared, own))
    cache.record(prefix, tokens, chain)
    pages.free(chain)
    cache.release(prefix)
    return [int(page) for page in chain]


def known(pages: PageAllocator, cache: RadixCache, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """The pages that a look-up finds for all of `tokens`, given back at once."""
    prefix, found = cache.lookup([*tokens, 0], namespace=namespace)
    pages.free(found)
    cache.release(prefix)
    return [int(page) for page in found]


def run(tasks: TaskCacheManager, name: str, tokens: list[int], **options: Any) -> int:
    """A task from prompt to end; answers how many tokens were cached."""
    state = tasks.task_alloc(name, tokens, **options)
    assert state is not None
    tasks.task_cached(name, len(tokens))
    tasks.task_free(name)
    tasks.check()
    return state.cached


def snapshot(tasks: TaskCacheManager) -> tuple[object, ...]:
    stats = {key: value for key, value in tasks.stats().items() if key != "refused"}
    return stats, tasks.req_pool.host.copy().tolist(), tasks.req_pool.free_rows


# -- pages and index -------------------------------------------------------------------------------


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
        "tasks.stats": tasks.stats,
        "tasks.check": tasks.check,
        "allocator.alloc": lambda: allocator.alloc(1),
        "allocator.free": lambda: allocator.free([0]),
        "allocator.free_all": allocator.free_all,
        "allocator.resize": lambda: allocator.resize(4),
        "allocator.claim": lambda: free.claim("x"),
        "allocator.check": allocator.check,
        "pages.alloc": lambda: strategy.pages.alloc(1),
        "pages.inc_ref": lambda: strategy.pages.inc_ref(page),
        "pages.free": lambda: strategy.pages.free(page),
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


def test_w23_a_page_costs_the_same_in_a_small_and_in_a_large_allocator() -> None:
    def best(size: int) -> float:
        pages = PageAllocator(size)
        pages.alloc(size - 1)

        def once() -> None:
            page = pages.alloc(1)
            assert page is not None
            pages.free(page)

        return min(timeit.repeat(once, number=50, repeat=20))

    best(1_000)
    assert best(1_000_000) < 10 * best(1_000)  # a bitmask is 100 times slower here


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


def test_w26_namespaces_share_nothing() -> None:
    tasks = make_tasks()
    tokens = list(range(3 * PAGE))
    assert run(tasks, "a", tokens, namespace=b"one") == 0
    assert run(tasks, "b", tokens, namespace=b"two") == 0
    assert run(tasks, "c", [*tokens, 1], namespace=b"two") == 3 * PAGE
    assert run(tasks, "d", [*tokens, 1]) == 0


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


# -- the token allocator ---------------------------------------------------------------------------


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


# -- loads of host pages -----------------------------------------------------------------------------


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
