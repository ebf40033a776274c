"""What a device must offer: streams, events, and copies between its KV and pages of the pool.

Every implementation (`cpu`, `testing`; each later one) passes the same contract tests. Imports numpy, the
ground floor, and torch for types only.

Always true: the copy of a piece reads nothing on the device before its `after` has fired, and its own
event fires only when the last byte is in place. Who waits for that event may use the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError, LayoutError
from kvtier.layout import KVLayout, Plane

if TYPE_CHECKING:
    import torch

Units = npt.NDArray[np.int32]
"""Unit numbers in token order, on the host: one for each *finest* unit of the layout."""

Page = npt.NDArray[np.uint8]
"""One shard of one frame of the pool: `[plane][row]` bytes, padded to the shard's size."""


class DeviceError(KVTierError, RuntimeError):
    """Work on a stream failed; what stood behind it did not run."""


@dataclass(frozen=True, eq=False)
class KVBuffers:
    """The KV that one rank has on its device, plane by plane.

    `planes`: one uint8 tensor `[rows, row_bytes]` for each plane of `layout.shards[shard]`, in that order,
    last stride 1, any first stride; they stay the engine's own. In a plane whose rows hold `r` finest units
    each, unit `u` is in row `u // r`. `replicas`: how many ranks hold the same bytes, `replica`: which of
    them this is; they take turns by frame when offloading, and each reads all when loading.
    """

    layout: KVLayout
    planes: tuple[torch.Tensor, ...] = field(repr=False)
    shard: int = 0
    replica: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.shard < len(self.layout.shards):
            raise LayoutError(f"shard={self.shard}: the layout has {len(self.layout.shards)} shards")
        if not 0 <= self.replica < self.replicas:
            raise LayoutError(
                f"replica={self.replica} of replicas={self.replicas}: expected 0 or more, and less"
            )
        expected = self.layout.shards[self.shard]
        if len(self.planes) != len(expected):
            raise LayoutError(
                f"{len(self.planes)} planes: the layout's shard {self.shard} has {len(expected)}"
            )
        for plane, tensor in zip(expected, self.planes, strict=True):
            self._check_plane(plane, tensor)

    def _check_plane(self, plane: Plane, tensor: torch.Tensor) -> None:
        if str(tensor.dtype) != "torch.uint8" or tensor.ndim != 2 or tensor.shape[1] != plane.row_bytes:
            raise LayoutError(
                f"plane {plane.name!r}: {tensor.dtype} {tuple(tensor.shape)}, expected torch.uint8 [rows, "
                f"{plane.row_bytes}]; view the engine's tensor as bytes, one row for each unit"
            )
        if (
            tensor.shape[0] < 1
            or tensor.stride(1) != 1
            or (tensor.shape[0] > 1 and tensor.stride(0) < plane.row_bytes)
        ):
            raise LayoutError(
                f"plane {plane.name!r}: strides {tensor.stride()}: rows must not overlap, last stride 1"
            )
        if plane.unit_tokens % self.layout.unit_tokens:
            raise LayoutError(
                f"plane {plane.name!r}: unit_tokens={plane.unit_tokens} is no multiple of the finest unit, "
                f"{self.layout.unit_tokens} tokens"
            )
        if tensor.device != self.planes[0].device:
            raise LayoutError(
                f"plane {plane.name!r} is on {tensor.device}, the first one on {self.planes[0].device}"
            )

    @property
    def device(self) -> torch.device:
        """Where the planes are."""
        return self.planes[0].device

    @cached_property
    def unit_tokens(self) -> int:
        """Tokens of the finest unit, over all shards of the layout."""
        return self.layout.unit_tokens

    @cached_property
    def page_units(self) -> int:
        """Finest units of one page."""
        return self.layout.page_tokens // self.unit_tokens

    @cached_property
    def units(self) -> int:
        """How many finest units the engine can address: 0 .. units - 1 lie in every plane."""
        planes = self.layout.shards[self.shard]
        return min(
            tensor.shape[0] * (plane.unit_tokens // self.unit_tokens)
            for plane, tensor in zip(planes, self.planes, strict=True)
        )

    @cached_property
    def coarse_ratios(self) -> tuple[int, ...]:
        """Finest units in one row, of each kind of plane that has more than one, ascending."""
        planes = self.layout.shards[self.shard]
        return tuple(sorted({plane.unit_tokens // self.unit_tokens for plane in planes} - {1}))


class Piece(NamedTuple):
    """What one call of a copier moves: `units` between the device and one page, from unit `first` of it on.

    `load`: page to device; else device to page. `first` counts finest units; `first + len(units)` is at most
    `page_units`. A row of a coarser plane is moved whole when any of its units is.
    """

    load: bool
    page: Page
    first: int
    units: Units


class Event(Protocol):
    """A mark in a stream; fires when all that was submitted before it has been done."""

    def query(self) -> bool:
        """Has it fired? Never waits. DeviceError when the work before it failed."""
        ...

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait on the host until it has fired; False when `timeout_s` is over first. Raises as `query`."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` once when it has fired (or failed), from any thread; at once if that is so already.

        `call` must be short, must not raise and must not wait.
        """
        ...


class Stream(Protocol):
    """Work that is done in the order in which it was submitted, beside the submitter."""

    def run(self, work: Callable[[], object]) -> None:
        """Submit `work`. What it raises fails the events after it, and is raised by `synchronize`."""
        ...

    def record(self) -> Event:
        """An event behind all that was submitted so far."""
        ...

    def wait(self, event: Event) -> None:
        """What is submitted from now on begins only after `event` (of any stream) has fired."""
        ...

    def synchronize(self, timeout_s: float | None = None) -> bool:
        """Wait on the host until all is done; False when `timeout_s` is over first. Raises as an event."""
        ...


class Copier(Protocol):
    """Moves pieces for the buffers it was made for. Used by one thread, the mover's copy thread."""

    host_waits: bool
    """`copy` does the work in the calling thread: the mover calls it only when `after` has fired."""

    piece_units: int
    """No piece has more units: what one call moves bounds how long a short load waits for a long one."""

    def copy(self, piece: Piece, after: Event) -> Event:
        """Begin to move `piece`, not before `after` has fired; the event that fires when it is whole.

        The arrays of `piece` belong to the copy until then. Does not check numbers: `check_units` does.
        """
        ...

    def current_stream(self) -> Stream:
        """Where the calling thread's work goes if it names no stream."""
        ...


def check_units(buffers: KVBuffers, first: int, units: Units, pages: int) -> str:
    """Why a copy of `units` from unit `first` of the first of `pages` pages on cannot be; '' if it can.

    Units must lie in the buffers, fill just these pages, and keep the units of one coarse row together.
    """
    page_units = buffers.page_units
    if not (0 <= first < page_units and len(units) and -(-(first + len(units)) // page_units) == pages):
        return f"{len(units)} units from unit {first} on do not fill {pages} pages of {page_units} units"
    lowest, highest = int(units.min()), int(units.max())
    if lowest < 0 or highest >= buffers.units:
        return f"units {lowest} .. {highest} are not all in 0 .. {buffers.units - 1}"
    for ratio in buffers.coarse_ratios:
        inside = (first + np.arange(len(units))) % ratio
        rows = units // ratio
        if bool((units % ratio != inside).any()) or bool((np.diff(rows)[inside[1:] != 0] != 0).any()):
            return f"rows of {ratio} units must hold the units of consecutive tokens, in order"
    return ""
