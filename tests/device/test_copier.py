"""What every copier promises; the CPU's and the double pass the same tests."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from kvtier.device.base import Copier, DeviceError, KVBuffers, Piece
from kvtier.device.cpu import CpuCopier, CpuEvent, fired
from kvtier.device.testing import HeldCopier
from kvtier.errors import LayoutError, UsageError
from tests.device import buffers as shapes


def held(buffers: KVBuffers) -> Copier:
    return HeldCopier(buffers, hold=False)


COPIERS = {"cpu": CpuCopier, "double": held}


def page_for(buffers: KVBuffers, seed: int = 1) -> np.ndarray:
    size = buffers.layout.shard_bytes[buffers.shard]
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@pytest.mark.parametrize("make", COPIERS.values(), ids=COPIERS.keys())
@pytest.mark.parametrize("kind", shapes.KINDS)
@pytest.mark.parametrize("load", [True, False], ids=["load", "offload"])
class TestEveryCopier:
    @given(data=st.data())
    def test_moves_just_the_rows_of_its_units(self, make, kind, load, data):
        buffers = shapes.KINDS[kind]()
        first = data.draw(st.integers(0, buffers.page_units - 1), "first")
        count = data.draw(st.integers(1, buffers.page_units - first), "count")
        run = data.draw(st.sampled_from([None, 2, 4, 8]), "run")
        seed = data.draw(st.integers(0, 1 << 16), "seed")
        shapes.fill_random(buffers, seed)
        units = shapes.units_for(buffers, first, count, seed, run)
        page, piece_page = page_for(buffers, seed), page_for(buffers, seed)
        piece = Piece(load, piece_page, first, units)
        expected = shapes.image(buffers)
        shapes.reference(buffers, expected, page, piece)
        event = make(buffers).copy(piece, fired())
        assert event.synchronize(5)
        for now, then in zip(shapes.image(buffers), expected, strict=True):
            np.testing.assert_array_equal(now, then)
        np.testing.assert_array_equal(piece_page, page)

    def test_a_page_survives_there_and_back(self, make, kind, load):
        buffers = shapes.KINDS[kind]()
        shapes.fill_random(buffers)
        copier, page = make(buffers), page_for(buffers)
        units = shapes.units_for(buffers, 0, buffers.page_units)
        assert copier.copy(Piece(False, page, 0, units), fired()).synchronize(5)
        before = shapes.image(buffers)
        for plane in buffers.planes:
            plane.zero_()
        assert copier.copy(Piece(True, page, 0, units), fired()).synchronize(5)
        for plane, now, then in zip(buffers.layout.shards[0], shapes.image(buffers), before, strict=True):
            rows = np.unique(units // (plane.unit_tokens // buffers.unit_tokens))
            np.testing.assert_array_equal(now[rows], then[rows])
            others = np.setdiff1d(np.arange(len(now)), rows)
            assert not now[others].any()

    def test_does_not_touch_a_read_only_page_on_load(self, make, kind, load):
        buffers = shapes.KINDS[kind]()
        page = page_for(buffers)
        page.flags.writeable = False
        units = shapes.units_for(buffers, 0, buffers.page_units)
        assert make(buffers).copy(Piece(True, page, 0, units), fired()).synchronize(5)


@pytest.mark.parametrize("make", COPIERS.values(), ids=COPIERS.keys())
def test_pieces_are_whole_rows_and_at_most_a_page(make):
    for kind in shapes.KINDS.values():
        buffers = kind()
        copier = make(buffers)
        ratios = [plane.unit_tokens // buffers.unit_tokens for plane in buffers.layout.shards[0]]
        assert 1 <= copier.piece_units <= buffers.page_units
        assert all(copier.piece_units % ratio == 0 for ratio in ratios)


def test_large_pages_are_split_into_pieces():
    buffers = shapes.joined(layers=2, row_bytes=1 << 18, slots=33, page_tokens=32)
    assert CpuCopier(buffers).piece_units == 16


@pytest.mark.parametrize("row_bytes", [4096, 1536, 64 << 10])
@pytest.mark.parametrize("run", [None, 4, 16, 64])
def test_rows_of_real_sizes_take_every_way_and_arrive(row_bytes, run):
    """Slices, indexed rows with and without touching ahead, and one plane of many: by size of row and run."""
    for buffers in (
        shapes.joined(2, row_bytes, 129, 64),
        shapes.interleaved(2, row_bytes, 129, 64),
        shapes.odd_stride(2, row_bytes, 129, 64),
    ):
        shapes.fill_random(buffers)
        units = shapes.units_for(buffers, 0, 64, seed=3, run=run)
        page, expected = page_for(buffers), page_for(buffers)
        shapes.reference(buffers, shapes.image(buffers), expected, Piece(False, expected, 0, units))
        copier = CpuCopier(buffers)
        copier.copy(Piece(False, page, 0, units), fired())
        np.testing.assert_array_equal(page, expected)
        before = shapes.image(buffers)
        for plane in buffers.planes:
            plane[torch.from_numpy(units.astype(np.int64))] = 0
        copier.copy(Piece(True, page, 0, units), fired())
        for now, then in zip(shapes.image(buffers), before, strict=True):
            np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("piece_bytes", [1, 100, 300, 500])
def test_pieces_of_coarse_rows_are_whole_rows(monkeypatch, piece_bytes):
    monkeypatch.setattr("kvtier.device.cpu.PIECE_BYTES", piece_bytes)
    units = CpuCopier(shapes.mixed_units(page_tokens=32)).piece_units
    assert units % 8 == 0
    assert 8 <= units <= 32


def test_evenly_spaced_planes_of_one_tensor_move_by_one_call():
    assert len(CpuCopier(shapes.joined())._groups) == 1
    assert len(CpuCopier(shapes.interleaved())._groups) == 1
    assert len(CpuCopier(shapes.mixed_units())._groups) == 3
    assert len(CpuCopier(shapes.separate())._groups) == 3


def test_the_cpu_refuses_to_begin_before_its_event():
    buffers = shapes.joined()
    piece = Piece(False, page_for(buffers), 0, shapes.units_for(buffers, 0, 8))
    with pytest.raises(UsageError):
        CpuCopier(buffers).copy(piece, CpuEvent())


def test_a_copy_behind_failed_work_fails():
    buffers, event = shapes.joined(), CpuEvent()
    event.fire(ValueError("compute went wrong"))
    piece = Piece(False, page_for(buffers), 0, shapes.units_for(buffers, 0, 8))
    with pytest.raises(DeviceError, match="compute went wrong"):
        CpuCopier(buffers).copy(piece, event)


class TestTheDouble:
    def setup_method(self):
        self.buffers = shapes.joined()
        shapes.fill_random(self.buffers)
        self.copier = HeldCopier(self.buffers)
        self.page = page_for(self.buffers)
        self.before = self.page.copy()
        self.piece = Piece(False, self.page, 0, shapes.units_for(self.buffers, 0, 8))

    def test_moves_nothing_until_the_test_says(self):
        event = self.copier.copy(self.piece, fired())
        assert not event.query()
        np.testing.assert_array_equal(self.page, self.before)
        self.copier.finish()
        assert event.query()
        assert not np.array_equal(self.page, self.before)

    def test_waits_for_its_edge_even_when_let_go(self):
        edge = CpuEvent()
        event = self.copier.copy(self.piece, edge)
        self.copier.finish()
        assert not event.query()
        np.testing.assert_array_equal(self.page, self.before)
        edge.fire()
        assert event.query()
        assert not np.array_equal(self.page, self.before)

    def test_fails_when_told(self):
        event = self.copier.copy(self.piece, fired())
        self.copier.fail()
        with pytest.raises(DeviceError):
            event.query()
        np.testing.assert_array_equal(self.page, self.before)

    def test_ends_only_what_is_held(self):
        self.copier.copy(self.piece, fired())
        with pytest.raises(UsageError):
            self.copier.finish(2)
        assert len(self.copier.held) == 1
        with pytest.raises(UsageError):
            self.copier.wait_held(2, timeout_s=0.01)


def test_buffers_of_another_device_are_refused():
    layout = shapes.joined().layout
    planes = tuple(torch.zeros((4, 24), dtype=torch.uint8, device="meta") for _ in range(3))
    with pytest.raises(LayoutError, match="meta"):
        CpuCopier(KVBuffers(layout, planes))
