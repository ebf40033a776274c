"""The CPU as a device: streams are threads (`streams`, handed on here), copies are single numpy calls.

For engines that run on the CPU, and the reference for the others. Imports torch for index_select, numpy, and
`device.base`.

Always true: a byte is moved once, from the device's row to its place in the page or back, with no temporary
copy of the rows between, and by calls that release the GIL.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.device.base import Event, KVBuffers, Page, Piece, Stream, Units
from kvtier.device.streams import CallerStream, CpuEvent, CpuStream, fired
from kvtier.errors import LayoutError, UsageError

__all__ = ["CallerStream", "CpuCopier", "CpuEvent", "CpuStream", "fired"]

PIECE_BYTES = 8 << 20
"""A page with more bytes is moved in several pieces: about a millisecond each."""

# One call for many scattered rows, or one call for each run of rows? Measured on Zen 4 in loops like
# those of `benchmarks/copies.py`, as parts of memcpy's rate: 4 KiB rows by index 0.83 at random, 0.88 in
# runs of 8 and 0.95 in runs of 16, by slices 0.5, 0.79 and 0.90; 1.5 KiB rows by index 0.50, 0.58 and 0.65,
# by slices 0.3, 0.58 and 0.74. A run that is the whole page is a plain copy.
LONG_ROW_BYTES = 2048
SLICE_ROWS = {"short": 8, "long": 32}
"""Runs of this many rows, on average, are copied as slices."""
SLICE_BYTES = 64 << 10
"""... if one call moves at least as much, over all planes: a call costs a microsecond."""

TOUCH_ROWS = 1024
TOUCH_ROW_BYTES = 2048
"""Before scattered rows are moved, the first byte of each of the next `TOUCH_ROWS` is read.

A copy of one row does not run ahead into the next, so each scattered row begins with a miss of memory, and
of the TLB where there are no huge pages; these reads overlap. Random rows of 4 KiB gain 3% to 25% by it,
shorter ones nothing.
"""


@dataclass(frozen=True)
class _Group:
    """Planes that follow one another in a page and lie evenly spaced in one device tensor.

    `rows[plane, row, byte]` is a view of the device. Where every row begins at a multiple of row_bytes
    from the first, `flat[row, byte]` is that memory without gaps, and row `r` of plane `p` is
    `flat[starts[p, 0] + step * r]`: then one call moves all planes of a page.
    """

    ratio: int
    offset: int
    page_rows: int
    row_bytes: int
    planes: int
    rows: npt.NDArray[np.uint8]
    flat: npt.NDArray[np.uint8] | None
    starts: npt.NDArray[np.intp]
    step: int


class CpuCopier:
    """Copies between KV in this process's memory and pages; done when `copy` returns.

    `buffers` must stay where they are for as long as this object is used.
    """

    host_waits = True

    def __init__(self, buffers: KVBuffers) -> None:
        if buffers.device.type != "cpu":
            raise LayoutError(f"KV on {buffers.device}: this copier is for the CPU")
        self.buffers = buffers
        self._groups = list(_groups(buffers))
        unit_bytes = max(1, buffers.layout.shard_bytes[buffers.shard] // buffers.page_units)
        coarsest = math.lcm(*(group.ratio for group in self._groups))
        wanted = max(1, PIECE_BYTES // unit_bytes)
        self.piece_units = min(buffers.page_units, max(coarsest, wanted // coarsest * coarsest))
        self._caller = CallerStream()

    def copy(self, piece: Piece, after: Event) -> CpuEvent:
        if not after.query():
            raise UsageError("the CPU's copies are begun when their event has fired")
        for group in self._groups:
            first_row, rows = _rows(group.ratio, piece.first, piece.units)
            _move(group, piece.load, piece.page, first_row, rows)
        return fired()

    def current_stream(self) -> Stream:
        return self._caller


def _rows(ratio: int, first: int, units: Units) -> tuple[int, npt.NDArray[np.intp]]:
    """The rows that hold `units`, and the place in the page of the first: rows of `ratio` units each."""
    if ratio == 1:
        return first, units.astype(np.intp)
    first_row, last_row = first // ratio, (first + len(units) - 1) // ratio
    at = np.maximum(np.arange(first_row, last_row + 1) * ratio - first, 0)
    return first_row, units[at].astype(np.intp) // ratio


def _move(group: _Group, load: bool, page: Page, first_row: int, rows: npt.NDArray[np.intp]) -> None:
    count, width = len(rows), group.row_bytes
    size = group.planes * group.page_rows * width
    place = page[group.offset : group.offset + size].reshape(group.planes, group.page_rows, width)
    place = place[:, first_row : first_row + count]
    breaks = rows[1:] - rows[:-1] != 1
    runs = int(np.count_nonzero(breaks)) + 1
    long = count >= runs * SLICE_ROWS["long" if width >= LONG_ROW_BYTES else "short"]
    if runs == 1 or (long and count * width * group.planes >= runs * SLICE_BYTES):
        edges = [0, *(breaks.nonzero()[0] + 1).tolist(), count]
        for begin, end in itertools.pairwise(edges):
            device = group.rows[:, rows[begin] : rows[begin] + (end - begin)]
            if load:
                np.copyto(device, place[:, begin:end])
            else:
                np.copyto(place[:, begin:end], device)
    elif group.flat is not None:
        _move_indexed(group, group.flat, load, place, rows)
    else:
        _move_odd(group, load, place, rows)


def _move_indexed(group: _Group, flat: Page, load: bool, place: Page, rows: npt.NDArray[np.intp]) -> None:
    width = group.row_bytes
    index = group.starts + (rows * group.step if group.step != 1 else rows)
    if place.flags.c_contiguous:  # whole pages: all planes by one call
        index, place = index.reshape(1, -1), place.reshape(1, -1, width)
    first_bytes = flat.reshape(-1) if width >= TOUCH_ROW_BYTES else None
    # Rows as bytes of a second dimension: as scalars of type void numpy moves them a tenth slower.
    for at_rows, at_place in zip(index, place, strict=True):
        for begin in range(0, len(at_rows), TOUCH_ROWS):
            some, its_place = at_rows[begin : begin + TOUCH_ROWS], at_place[begin : begin + TOUCH_ROWS]
            if first_bytes is not None:
                np.take(first_bytes, some * width, mode="clip")
            if load:
                flat[some] = its_place
            else:
                np.take(flat, some, axis=0, out=its_place, mode="clip")


def _move_odd(group: _Group, load: bool, place: Page, rows: npt.NDArray[np.intp]) -> None:
    """Rows at a stride that is no multiple of their size: numpy's take would copy the whole plane first."""
    index = torch.from_numpy(rows)
    for plane, at_place in zip(group.rows, place, strict=True):
        if load:
            plane[rows] = at_place
        else:
            torch.index_select(torch.from_numpy(plane), 0, index, out=torch.from_numpy(at_place))


def _groups(buffers: KVBuffers) -> Iterator[_Group]:
    """The planes of `buffers` in as few groups as can be, in the page's order."""
    planes = buffers.layout.shards[buffers.shard]
    offsets = buffers.layout.plane_offsets(buffers.shard)
    tensors = buffers.planes
    begin = 0
    while begin < len(planes):
        end = begin + 1
        while end < len(planes) and _joins(buffers, begin, end):
            end += 1
        plane, first = planes[begin], tensors[begin]
        spacing = tensors[begin + 1].data_ptr() - first.data_ptr() if end - begin > 1 else plane.row_bytes
        stride = first.stride(0) if first.shape[0] > 1 else plane.row_bytes
        base = first.numpy()
        rows = np.lib.stride_tricks.as_strided(base, (end - begin, *first.shape), (spacing, stride, 1))
        starts = np.arange(end - begin, dtype=np.intp)[:, None] * (spacing // plane.row_bytes)
        flat = None
        if spacing % plane.row_bytes == 0 and stride % plane.row_bytes == 0:
            step = stride // plane.row_bytes
            count = int(starts[-1, 0]) + step * (first.shape[0] - 1) + 1
            flat = np.lib.stride_tricks.as_strided(base, (count, plane.row_bytes), (plane.row_bytes, 1))
        yield _Group(
            ratio=plane.unit_tokens // buffers.unit_tokens,
            offset=offsets[begin],
            page_rows=buffers.layout.page_tokens // plane.unit_tokens,
            row_bytes=plane.row_bytes,
            planes=end - begin,
            rows=rows,
            flat=flat,
            starts=starts,
            step=stride // plane.row_bytes,
        )
        begin = end


def _joins(buffers: KVBuffers, begin: int, end: int) -> bool:
    """Does plane `end` continue the group that begins at `begin`: same shape, same memory, even steps?"""
    planes, tensors = buffers.layout.shards[buffers.shard], buffers.planes
    left, right = tensors[begin], tensors[end]
    same = (
        planes[begin].row_bytes == planes[end].row_bytes
        and planes[begin].unit_tokens == planes[end].unit_tokens
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    )
    spacing = tensors[begin + 1].data_ptr() - left.data_ptr()
    return same and spacing > 0 and right.data_ptr() == left.data_ptr() + (end - begin) * spacing
