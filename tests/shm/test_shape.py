"""How a pool is cut: exact sizes, no overlap, and step by step for small pools too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config import GIB, MIB
from kvtier.errors import ConfigError, UsageError
from kvtier.layout import KVLayout, Plane
from kvtier.shm.shape import PoolShape, chunk_size

LAYOUT = KVLayout(16, ((Plane("0.kv", 3000), Plane("1.kv", 100)), (Plane("2.kv", 1000),)), "test")


def shapes() -> st.SearchStrategy[PoolShape]:
    shards = st.lists(st.integers(1, 4).map(lambda n: n * 4096), min_size=1, max_size=3)
    return st.builds(
        lambda sizes, frames, share: PoolShape((64, *sizes), frames, max(1, min(frames, share))),
        shards,
        st.integers(1, 40),
        st.integers(1, 40),
    )


@given(shapes())
def test_places_fill_the_chunks_without_gap_or_overlap(shape: PoolShape) -> None:
    places = sorted(
        shape.where(frame, shard) for frame in range(shape.frames) for shard in range(len(shape.shard_bytes))
    )
    at = (0, 0)
    for place in places:
        if place.chunk == at[0] + 1:
            assert at[1] == shape.chunk_bytes(at[0])
            at = (place.chunk, 0)
        assert (place.chunk, place.offset) == at
        at = (place.chunk, place.offset + place.bytes)
    assert at == (shape.chunks - 1, shape.chunk_bytes(shape.chunks - 1))


@given(shapes())
def test_a_shard_of_a_chunk_is_one_run_in_frame_order(shape: PoolShape) -> None:
    for shard, size in enumerate(shape.shard_bytes):
        for frame in range(1, shape.frames):
            before, here = shape.where(frame - 1, shard), shape.where(frame, shard)
            if before.chunk == here.chunk:
                assert here.offset == before.offset + size


@given(shapes())
def test_chunks_add_up_to_the_pool(shape: PoolShape) -> None:
    assert sum(shape.frames_of(chunk) for chunk in range(shape.chunks)) == shape.frames
    assert sum(shape.chunk_bytes(chunk) for chunk in range(shape.chunks)) == shape.pool_bytes
    assert [shape.frames_below(chunks) for chunks in range(shape.chunks + 1)] == [
        sum(shape.frames_of(chunk) for chunk in range(chunks)) for chunks in range(shape.chunks + 1)
    ]


@given(st.integers(1, 300), st.integers(1, 2**40))
def test_a_pool_takes_whole_pages_and_never_more_than_asked(quarter_mib: int, pool_bytes: int) -> None:
    geometry = (64, quarter_mib * 256 * 1024)
    if pool_bytes < geometry[1]:
        with pytest.raises(ConfigError, match="holds no page"):
            PoolShape.of(geometry, pool_bytes)
        return
    shape = PoolShape.of(geometry, pool_bytes)
    assert pool_bytes - geometry[1] < shape.pool_bytes <= pool_bytes
    assert shape.chunks <= 256


def test_chunks_are_an_eighth_of_a_small_pool_and_a_gib_of_a_large_one() -> None:
    assert chunk_size(4 * MIB) == 16 * MIB
    assert chunk_size(GIB) == 128 * MIB
    assert chunk_size(64 * GIB) == GIB
    assert chunk_size(1024 * GIB) == 4 * GIB
    assert PoolShape.of(LAYOUT, GIB).chunks in (8, 9)


def test_geometry_comes_from_the_layout() -> None:
    shape = PoolShape.of(LAYOUT, 10 * LAYOUT.page_bytes + 5)
    assert shape.geometry == LAYOUT.geometry
    assert (shape.frames, shape.page_bytes) == (10, LAYOUT.page_bytes)


def test_a_pool_without_a_page_says_what_one_page_needs() -> None:
    with pytest.raises(ConfigError, match=r"--size 1024KiB or more"):
        PoolShape.of((64, MIB), 1000)


@pytest.mark.parametrize(
    ("geometry", "frames", "chunk_frames"),
    [
        ((64,), 1, 1),
        ((0, 4096), 1, 1),
        ((64, 4095), 1, 1),
        ((64, 0), 1, 1),
        ((64, 4096), 0, 1),
        ((64, 4096), 1, 2),
        ((64, 4096), 2**31, 1),
        ((64, 4096), 4, 0),
    ],
)
def test_what_makes_no_pool_is_refused(geometry: tuple[int, ...], frames: int, chunk_frames: int) -> None:
    with pytest.raises(ConfigError):
        PoolShape(geometry, frames, chunk_frames)


def test_places_that_do_not_exist_are_refused() -> None:
    shape = PoolShape((64, 4096), 10, 4)
    for frame, shard in [(-1, 0), (10, 0), (0, 1), (0, -1)]:
        with pytest.raises(UsageError):
            shape.where(frame, shard)
    for chunk in (-1, 3):
        with pytest.raises(UsageError):
            shape.frames_of(chunk)
