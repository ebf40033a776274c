"""Pages that `PageAllocator` itself keeps cached, for an engine with an index of its own."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import PageAllocator
from kvtier.memory.page_lru import PageLru


def cached(pages: PageAllocator, count: int) -> list[int]:
    """Pages that one task had and gave back, tail first, to be kept."""
    chain = pages.alloc(count)
    assert chain is not None
    pages.free(chain[::-1], keep_cached=True)
    return [int(page) for page in chain]


def test_the_least_recently_used_page_goes_first_and_a_chain_loses_its_tail_first() -> None:
    pages = PageAllocator(8)
    old, young = cached(pages, 3), cached(pages, 3)
    assert pages.evictable_pages == 6
    victims = pages.evict(4)
    assert victims is not None
    assert victims.tolist() == [*old[::-1], young[-1]]
    assert [pages.is_cached(page) for page in young] == [True, True, False]
    assert pages.free_pages == 6
    pages.check()


def test_a_touched_page_is_young_and_one_in_use_is_not_evicted() -> None:
    pages = PageAllocator(8)
    first, second, third = cached(pages, 3)
    pages.touch([third])
    pages.inc_ref([second])
    assert pages.evict(3) is None
    victims = pages.evict(2)
    assert victims is not None
    assert victims.tolist() == [first, third]
    pages.free([second], keep_cached=True)
    assert pages.evict(1) is not None
    pages.check()


def test_one_page_may_be_named_as_a_number() -> None:
    pages = PageAllocator(4)
    page = int(pages.alloc(1)[0])
    pages.inc_ref(page)
    assert pages.ref_count(page) == 2
    pages.free(np.int32(page))
    pages.free(page, keep_cached=True)
    pages.touch(page)
    assert pages.is_cached(page)
    pages.check()


def test_more_than_can_go_evicts_nothing() -> None:
    pages = PageAllocator(4)
    cached(pages, 3)
    assert pages.evict(4) is None
    assert (pages.cached_pages, pages.free_pages) == (3, 1)
    with pytest.raises(UsageError, match="expected 0 or more"):
        pages.evict(-1)


def test_a_page_under_copy_is_evictable_when_the_copy_ends() -> None:
    pages = PageAllocator(4)
    (page,) = cached(pages, 1)
    pages.begin_read([page])
    assert pages.evict(1) is None
    pages.end_read([page])
    assert pages.evict(1) is not None
    own = pages.alloc(1)
    assert own is not None
    pages.begin_write(own)
    with pytest.raises(UsageError, match="a copy writes it"):
        pages.free(own, keep_cached=True)
    assert pages.ref_count(int(own[0])) == 1


def test_pages_of_an_index_are_left_to_it() -> None:
    pages = PageAllocator(4)
    chain = pages.alloc(2)
    assert chain is not None
    pages.keep(chain)
    pages.free(chain)
    pages.touch(chain)
    assert (pages.cached_pages, pages.evictable_pages) == (2, 0)
    assert pages.evict(1) is None
    assert pages.drop(chain) == 2
    with pytest.raises(UsageError, match="is not cached"):
        pages.touch(chain)


def test_a_cached_page_that_its_engine_forgets_is_free_at_once_or_with_its_last_reference() -> None:
    pages = PageAllocator(4)
    first, second = cached(pages, 2)
    pages.inc_ref([second])
    assert pages.drop([first, second]) == 1
    pages.free([second])
    assert pages.free_pages == 4
    pages.check()


def test_the_queue_stays_as_long_as_it_was_made_however_often_pages_are_used() -> None:
    lru = PageLru(5)
    everyone = np.arange(5, dtype=np.int32)
    lru.add(everyone)
    length = len(lru._entries)
    for turn in range(500):
        lru.add(everyone[turn % 5 : turn % 5 + 1])
        lru.check()
    assert len(lru._entries) == length
    assert lru.pop(5).tolist() == [0, 1, 2, 3, 4]
    assert len(lru) == 0
