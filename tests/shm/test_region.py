"""A client's mapping: the right bytes, no descriptor kept, nothing for forks and core dumps (R21, R28)."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvtier.errors import ProtocolError, UsageError
from kvtier.shm.mapping import populate, sealed_memfd
from kvtier.shm.region import PoolView
from tests.shm.harness import SMALL, chunk_fds, exit_code, forked, open_fds


def view_of_all(writable: bool = True) -> PoolView:
    view = PoolView(SMALL, writable=writable)
    view.add(chunk_fds(SMALL))
    return view


def mappings() -> str:
    return Path("/proc/self/smaps").read_text()


def test_a_page_is_where_the_shape_says() -> None:
    fds = chunk_fds(SMALL)
    kept = [os.dup(fd) for fd in fds]
    view = PoolView(SMALL)
    view.add(fds)
    for frame in range(SMALL.frames):
        for shard in range(2):
            view.page(frame, shard, write=True)[:] = frame * 2 + shard + 1
    for frame in range(SMALL.frames):
        for shard in range(2):
            place = SMALL.where(frame, shard)
            expected = bytes([frame * 2 + shard + 1]) * place.bytes
            assert os.pread(kept[place.chunk], place.bytes, place.offset) == expected
            assert view.page(frame, shard).tobytes() == expected
    for fd in kept:
        os.close(fd)


def test_two_processes_see_the_same_bytes() -> None:
    fds = chunk_fds(SMALL)
    mine = PoolView(SMALL)
    mine.add([os.dup(fd) for fd in fds])

    def other() -> None:
        theirs = PoolView(SMALL)
        theirs.add(fds)
        theirs.page(9, 1, write=True)[:] = 42

    with forked(other) as pid:
        assert exit_code(pid) == 0
    assert (mine.page(9, 1) == 42).all()
    for fd in fds:
        os.close(fd)


def test_it_grows_by_chunks_and_a_hit_ends_at_what_is_mapped() -> None:
    view = PoolView(SMALL)
    with pytest.raises(UsageError, match="mapped so far"):
        view.page(0)
    for chunk, frames in [(0, 4), (1, 8), (2, 10)]:
        view.add(chunk_fds(SMALL, chunk, 1))
        assert (view.chunks, view.frames) == (chunk + 1, frames)
        assert view.page(frames - 1).nbytes == 4096
        with pytest.raises(UsageError, match="mapped so far"):
            view.page(frames)


def test_descriptors_are_closed_after_mapping() -> None:
    before = open_fds()
    view = view_of_all()
    assert open_fds() == before
    assert view.page(0, write=True).flags.writeable


def test_pages_are_read_only_unless_asked_for_and_allowed() -> None:
    view = view_of_all()
    with pytest.raises(ValueError, match="read-only"):
        view.page(3)[0] = 1
    view.page(3, write=True)[0] = 1
    reader = view_of_all(writable=False)
    with pytest.raises(UsageError, match="read-only"):
        reader.page(3, write=True)
    rights = re.findall(r"^\S+ (\S+) .*memfd:test-0", mappings(), re.MULTILINE)
    assert sorted(rights) == ["r--s", "rw-s"]  # the kernel holds the reader to it too


@pytest.mark.parametrize("wrong", ["size", "seals", "number", "no memfd"])
def test_what_is_no_such_chunk_is_refused_whole_and_closed(wrong: str, tmp_path: Path) -> None:
    before = open_fds()
    view = PoolView(SMALL)
    good = sealed_memfd("good", SMALL.chunk_bytes(0))
    if wrong == "size":
        fds = [good, sealed_memfd("bad", SMALL.chunk_bytes(1) + 4096)]
    elif wrong == "seals":
        fds = [good, os.memfd_create("bad")]
        os.ftruncate(fds[1], SMALL.chunk_bytes(1))
    elif wrong == "number":
        fds = [good, *chunk_fds(SMALL, 1, 2), sealed_memfd("bad", SMALL.chunk_bytes(2))]
    else:
        fds = [good, os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)]
        os.ftruncate(fds[1], SMALL.chunk_bytes(1))
    with pytest.raises(ProtocolError, match="chunk"):
        view.add(fds)
    assert (view.frames, open_fds()) == (0, before)


def test_arrays_outlive_close_and_the_memory_goes_with_the_last_one() -> None:
    view = view_of_all()
    page = view.page(5, 1, write=True)
    page[:] = 9
    count = mappings().count("memfd:test-1")
    part = page[100:200]
    view.close()
    view.close()
    with pytest.raises(UsageError, match="closed"):
        view.page(5, 1)
    with pytest.raises(UsageError, match="closed"):
        view.add([])
    del page, view
    gc.collect()
    assert (part == 9).all()
    assert mappings().count("memfd:test-1") == count
    del part
    gc.collect()
    assert mappings().count("memfd:test-1") == count - 1


def test_close_of_a_view_without_arrays_unmaps_at_once() -> None:
    before = mappings().count("memfd:test-")
    view = view_of_all()
    assert mappings().count("memfd:test-") == before + 3
    view.close()
    assert mappings().count("memfd:test-") == before


def test_a_forked_child_has_no_mapping_and_an_inert_view() -> None:
    view = view_of_all()
    page = view.page(0, write=True)

    def child() -> None:
        assert "memfd:test-" not in mappings()
        for call in (lambda: view.page(0), lambda: view.shard(0, 0), lambda: view.add([])):
            with pytest.raises(UsageError, match="forked child"):
                call()
        view.close()
        gc.collect()

    with forked(child) as pid:
        assert exit_code(pid) == 0
    page[:] = 3  # still mapped here
    assert (view.page(0) == 3).all()


def test_the_pool_is_not_in_core_dumps_and_not_copied_by_forks() -> None:
    view = view_of_all()
    block = mappings().split("memfd:test-0", 1)[1]
    flags = re.search(r"VmFlags: (.*)", block)
    assert flags is not None
    assert {"dc", "dd"} <= set(flags[1].split())  # do not copy on fork, do not dump
    view.close()


def test_populate_faults_all_pages_in() -> None:
    view = view_of_all()
    done = [populate(view.shard(1, shard, write=True), write=True) for shard in range(2)]
    if not all(done):
        pytest.skip("the kernel has no MADV_POPULATE")
    resident = re.search(r"Rss: +(\d+) kB", mappings().split("memfd:test-1", 1)[1])
    assert resident is not None
    assert int(resident[1]) * 1024 == SMALL.chunk_bytes(1)


def test_shard_is_a_run_of_frames() -> None:
    view = view_of_all()
    run = view.shard(1, 1, write=True)
    assert run.shape == (4, 8192)
    assert run.flags.c_contiguous
    run[:] = np.arange(4, dtype=np.uint8)[:, None]
    assert [int(view.page(frame, 1)[17]) for frame in range(4, 8)] == [0, 1, 2, 3]
    for chunk, shard in [(3, 0), (0, 2), (-1, 0), (0, -1)]:
        with pytest.raises(UsageError):
            view.shard(chunk, shard)
