"""What the core wants written into the shared tables: plain values, applied in the order given (R14-R16).

`HostCache` produces them, `kvtier.shm.tables.Tables.apply` carries them out before the answer goes
out. Each is one step of the order that R15 asks for: a server killed between two of them leaves
tables that the next one can read. Standard library only; nothing here knows how a table lies in memory.

Frames come as `array('i')` (int32), so that numpy takes them without a copy. They are the receiver's to
keep and are not changed afterwards. `frame_gen` is the table's own: a `Claim` raises it by one.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

FREE, WRITING, READY, DOOMED, QUARANTINED = range(5)
"""States of a frame, as 8 bits of its word {gen 24, state 8}."""

LOAD, STORE = 1, 2
"""Kinds of lease."""

PLANNER, MOVER = 1, 2
"""Roles of a session."""


class Free(NamedTuple):
    """These frames become FREE, in this order: tails before heads."""

    frames: array[int]


class Claim(NamedTuple):
    """A chain of new pages: first FREE with `frame_gen` + 1, then the fields, then WRITING.

    `keys`: 32 bytes for each frame. The parent of `frames[i]` is `frames[i - 1]`; that of the first is
    `parent_frame`, or `-1 - ns_index` for a chain's first page. `parent_tag` is the first 8 bytes of the
    first page's parent key (`ns[:8]` under a root); the others' tags are in `keys`. `lease` is the index
    of the lease record, `stamp` a uint32 that rises with use (it orders pages by age after a restart).
    """

    frames: array[int]
    keys: bytes
    parent_frame: int
    parent_tag: bytes
    lease: int
    stamp: int


class Ready(NamedTuple):
    """These frames become READY, in this order: heads before tails."""

    frames: array[int]


class Doom(NamedTuple):
    """These frames become DOOMED: out of the tree, still under a lease; tails before heads."""

    frames: array[int]


class Quarantine(NamedTuple):
    """These frames become QUARANTINED: their lease has ended, but a mover is not known to be quiet (R9)."""

    frames: array[int]


class Reparent(NamedTuple):
    """`frame` hangs under `parent_frame` now (R8); key and tag stay as they are."""

    frame: int
    parent_frame: int


class LeaseRecord(NamedTuple):
    """One lease, whole (R16), written again when something in it changes.

    `deepest_frame` is the last page of the pinned chain, -1 when the lease pins nothing any more;
    `pages` counts that chain from its first page on. Bit r of `quiet_mask` (64 bits): mover r is quiet.
    """

    lease: int
    sid: int
    number: int
    kind: int
    deepest_frame: int
    pages: int
    epoch: int
    quiet_mask: int


class LeaseEnd(NamedTuple):
    """The record is cleared: the lease's last frame has left it."""

    lease: int


class SessionRecord(NamedTuple):
    """One session. `sid` is an unsigned 64-bit number, `group_hash` 8 bytes of the group's id."""

    slot: int
    sid: int
    role: int
    rank: int
    ranks: int
    group_hash: bytes
    last_number: int


class SessionNumber(NamedTuple):
    """The session's last lease number has risen."""

    slot: int
    last_number: int


class SessionEnd(NamedTuple):
    """The session's record is cleared."""

    slot: int


class EpochRecord(NamedTuple):
    """Namespace entry `ns_index` belongs to `ns` (16 bytes) and is in `epoch`."""

    ns_index: int
    ns: bytes
    epoch: int


class NamespaceEnd(NamedTuple):
    """The entry roots nothing any more: a rebuild frees what hangs under it. The core reuses it later."""

    ns_index: int


class PoolEpoch(NamedTuple):
    """The pool's epoch counter, and the epoch of all namespaces that have no entry (R13)."""

    counter: int
    absent: int


Write = (
    Free
    | Claim
    | Ready
    | Doom
    | Quarantine
    | Reparent
    | LeaseRecord
    | LeaseEnd
    | SessionRecord
    | SessionNumber
    | SessionEnd
    | EpochRecord
    | NamespaceEnd
    | PoolEpoch
)
