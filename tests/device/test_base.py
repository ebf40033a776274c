"""What KV buffers must be, and which units a copy may name."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.device.base import KVBuffers, check_units
from kvtier.errors import LayoutError
from kvtier.layout import KVLayout, Plane
from tests.device import buffers as shapes

TWO = KVLayout(8, ((Plane("0.kv", 24), Plane("1.kv", 24)), (Plane("0.kv", 48),)), "test")


def plane(rows=16, row_bytes=24, dtype=torch.uint8):
    return torch.zeros((rows, row_bytes), dtype=dtype)


class TestBuffers:
    def test_count_the_units_that_every_plane_has(self):
        buffers = shapes.mixed_units(slots=40)
        assert (buffers.unit_tokens, buffers.page_units, buffers.units) == (1, 8, 40)
        assert buffers.coarse_ratios == (4, 8)
        fewer = KVBuffers(buffers.layout, (*buffers.planes[:4], buffers.planes[4][:3]))
        assert fewer.units == 24
        whole_blocks = shapes.blocks(unit_tokens=4, units=10, page_tokens=8)
        assert (whole_blocks.unit_tokens, whole_blocks.page_units, whole_blocks.units) == (4, 2, 10)

    def test_may_be_any_shard(self):
        assert KVBuffers(TWO, (plane(row_bytes=48),), shard=1).units == 16

    @pytest.mark.parametrize(
        ("planes", "options", "said"),
        [
            ((plane(),), {}, "1 planes"),
            ((plane(), plane()), {"shard": 2}, "shard=2"),
            ((plane(), plane()), {"shard": -1}, "shard=-1"),
            ((plane(), plane()), {"replica": 1}, "replica=1"),
            ((plane(), plane()), {"replica": -1, "replicas": 2}, "replica=-1"),
            ((plane(), plane(row_bytes=25)), {}, "'1.kv'"),
            ((plane(), plane(dtype=torch.int8)), {}, "int8"),
            ((plane(), plane()[0]), {}, "'1.kv'"),
            ((plane(), plane(0)), {}, "'1.kv'"),
            ((plane(), plane(24, 16).t()), {}, "stride"),
            ((plane(), torch.zeros(200, dtype=torch.uint8).as_strided((8, 24), (8, 1))), {}, "overlap"),
            ((plane(), plane().to("meta")), {}, "meta"),
        ],
    )
    def test_that_do_not_fit_are_refused(self, planes, options, said):
        with pytest.raises(LayoutError, match=said):
            KVBuffers(TWO, planes, **options)

    def test_with_units_that_are_no_multiples_are_refused(self):
        layout = KVLayout(6, ((Plane("a", 8, 2), Plane("b", 8, 3)),), "test")
        with pytest.raises(LayoutError, match="no multiple"):
            KVBuffers(layout, (plane(row_bytes=8), plane(row_bytes=8)))


class TestUnits:
    @pytest.mark.parametrize(
        ("first", "units", "pages"),
        [(0, range(8), 1), (3, [9], 1), (7, [9, 2], 2), (0, [39, 0], 1), (0, range(16), 2)],
    )
    def test_that_fill_their_pages_may_be_copied(self, first, units, pages):
        assert check_units(shapes.joined(slots=40), first, np.array(units, np.int32), pages) == ""

    @pytest.mark.parametrize(
        ("first", "units", "pages", "said"),
        [
            (0, [], 0, "do not fill"),
            (0, [], 1, "do not fill"),
            (0, range(9), 1, "do not fill"),
            (0, range(8), 2, "do not fill"),
            (8, range(8), 2, "do not fill"),
            (-1, [1], 1, "do not fill"),
            (0, [40], 1, "not all in"),
            (0, [-1], 1, "not all in"),
        ],
    )
    def test_that_do_not_are_named(self, first, units, pages, said):
        assert said in check_units(shapes.joined(slots=40), first, np.array(units, np.int32), pages)

    @pytest.mark.parametrize(
        ("first", "units", "fits"),
        [
            (0, range(8, 16), True),
            (4, range(24, 28), False),  # rows of 8: the second half of a page, in the first half of a row
            (4, [28, 29, 30, 31], True),
            (6, [14, 15, 32, 33], True),
            (0, [0, 1, 2, 3, 20, 21, 22, 23], False),  # one row of 8 in two places
            (0, [1, 0, 2, 3], False),
        ],
    )
    def test_of_one_coarse_row_are_neighbours(self, first, units, fits):
        units = np.array(units, np.int32)
        pages = -(-(first + len(units)) // 8)
        assert (check_units(shapes.mixed_units(slots=40), first, units, pages) == "") is fits
