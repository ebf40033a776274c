"""How long indices that were given out stay as they are: the bound that asynchronous copies rely on."""

from __future__ import annotations

import mmap
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.errors import UsageError
from kvtier.memory import KvCacheAllocator
from kvtier.memory.indices import _MAX_BLOCKS, ASYNC_SLOTS, HandOut

BLOCK = 16


def numbers(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def peek(array: np.ndarray) -> np.ndarray:
    """The array's memory without holding the array: what a device that copies from it would see."""
    address, length = array.ctypes.data, len(array)
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * length).from_address(address))


@pytest.mark.parametrize("length", range(1, BLOCK + 1))
def test_an_array_that_was_dropped_stays_until_a_blocks_worth_was_given_out(length: int) -> None:
    given = HandOut(pinned=False, block_slots=BLOCK)
    for turn in range(20):
        given.copy(numbers(turn % 5))  # so that arrays begin anywhere in a block
        array = given.copy(numbers(3, 1000))
        seen = peek(array)
        del array
        out = 0
        while out + length <= BLOCK:
            given.copy(numbers(length))
            out += length
            assert seen.tolist() == [1000, 1001, 1002], f"overwritten after {out} more slots"


def test_after_enough_more_slots_the_memory_is_used_again() -> None:
    given = HandOut(pinned=False, block_slots=BLOCK)
    addresses = {given.copy(numbers(1)).ctypes.data for _ in range(100 * BLOCK)}
    assert len(addresses) == 2 * BLOCK


@pytest.mark.parametrize(
    "hold", [lambda a: a, lambda a: a[1:], lambda a: torch.from_numpy(a)[:2], memoryview]
)
def test_what_is_held_never_changes(hold) -> None:
    given = HandOut(pinned=False, block_slots=BLOCK)
    kept = []
    for turn in range(10 * _MAX_BLOCKS):
        array = given.copy(numbers(5, 100 * turn))
        if turn % 3 == 0:
            kept.append((hold(array), [int(value) for value in hold(array)]))
        del array
    for held, then in kept:
        assert [int(value) for value in held] == then


def test_blocks_that_kept_arrays_hold_are_bounded_and_used_again_when_dropped() -> None:
    given = HandOut(pinned=False, block_slots=BLOCK)
    kept = [given.copy(numbers(BLOCK, 100 * turn)) for turn in range(3 * _MAX_BLOCKS)]
    assert len(given._full) <= _MAX_BLOCKS
    assert [array.tolist() for array in kept] == [
        numbers(BLOCK, 100 * turn).tolist() for turn in range(3 * _MAX_BLOCKS)
    ]
    blocks = {kept[turn].ctypes.data for turn in range(_MAX_BLOCKS)}
    kept.clear()
    assert given.copy(numbers(BLOCK)).ctypes.data in blocks


def test_an_array_longer_than_a_block_is_a_copy_of_its_own() -> None:
    given = HandOut(pinned=False, block_slots=BLOCK)
    assert given.copy(numbers(BLOCK + 1)).tolist() == numbers(BLOCK + 1).tolist()
    assert given.copy(numbers(0)).tolist() == []
    assert not given._full


def test_the_allocators_bound_is_the_one_that_it_states() -> None:
    slots = KvCacheAllocator(4 * ASYNC_SLOTS)
    slots._copy = HandOut(pinned=False).copy  # as it is where memory is pinned
    array = slots.alloc(7)
    seen = peek(array)
    del array
    for _ in range(ASYNC_SLOTS // 64):
        slots.alloc(64)
    assert seen.tolist() == list(range(7))
    assert "262,144" in (KvCacheAllocator.alloc.__doc__ or "")
    assert ASYNC_SLOTS == 262_144


def test_another_process_reads_the_free_count() -> None:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        slots = KvCacheAllocator(1000, free_count=memoryview(memory)[8:16])
        given = slots.alloc(400)

        def seen() -> int:
            return int.from_bytes(memory[8:16], sys.byteorder)

        assert seen() == 600
        slots.free(given[:100])
        assert seen() == 700
        slots.free_all()
        assert seen() == 1000
        slots.resize(10)
        assert seen() == 10
        slots.claim("me")
        assert seen() == 0
        slots.publish(6)
        assert seen() == 6
        slots.unclaim()
        assert seen() == 10
        del slots


def test_a_process_that_is_not_this_one_really_sees_it(tmp_path) -> None:
    path = tmp_path / "count"
    path.write_bytes(bytes(8))
    reader = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as f, mmap.mmap(f.fileno(), 8, prot=mmap.PROT_READ) as m:\n"
        "    for line in sys.stdin:\n"
        "        print(int.from_bytes(m[:8], sys.byteorder), flush=True)\n"
    )
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
        slots = KvCacheAllocator(1000, free_count=memory)
        with subprocess.Popen(
            [sys.executable, "-c", reader, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for expected in (1000, 990, 980):
                process.stdin.write("?\n")
                process.stdin.flush()
                assert int(process.stdout.readline()) == expected
                slots.alloc(10)
            process.stdin.close()
        del slots


@pytest.mark.parametrize("memory", [bytes(8), bytearray(7), memoryview(bytearray(32))[1:9]])
def test_memory_that_cannot_hold_the_count_is_refused(memory) -> None:
    with pytest.raises(UsageError, match="free_count"):
        KvCacheAllocator(8, free_count=memory)


def test_runs_are_aligned_and_what_breaks_them_is_said() -> None:
    slots = KvCacheAllocator(64)
    single = slots.alloc(3)
    given = slots.alloc_runs(32, run=16)
    assert given.tolist() == list(range(16, 48))
    with pytest.raises(UsageError, match=r"2 whole runs needed, 1 left \(of 29 free slots"):
        slots.alloc_runs(32, run=16)
    with pytest.raises(UsageError, match="expected a multiple of run"):
        slots.alloc_runs(30, run=16)
    slots.free(single)
    assert slots.free_runs(16) == 2
    slots.free(given)
    assert sorted(slots.alloc(64).tolist()) == list(range(64))
    with pytest.raises(UsageError, match="expected 1 or more"):
        slots.free_runs(0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_indices_are_given_out_in_pinned_memory_that_a_device_copies_from() -> None:
    slots = KvCacheAllocator(1 << 20)
    for _ in range(50):
        expected = slots.alloc(4096)
        on_device = torch.from_numpy(expected).to("cuda", non_blocking=True)
        assert torch.from_numpy(expected).is_pinned()
        copy = expected.copy()
        del expected
        slots.alloc(4096)
        assert on_device.cpu().numpy().tolist() == copy.tolist()
    slots.free(on_device)
    assert slots.device_frees == 1
