"""Every request and reply of the data socket, one dataclass each (section 8 of the protocol).

Keys travel as packed bytes, 32 a page; frames and their generations as numpy arrays. Values only: `codec`
turns them into bytes and back. Imports numpy and the ground floor.

By convention nobody changes a message. The classes are not frozen: that would cost a microsecond for each
object on the hot path, and 10 ms of the sidecar's start.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.errors import ProtocolError, Status

VERSION = 1
MAX_KEYS = 65_536
"""Keys of one message, all its chains together."""
MAX_NUMBER = 2**63 - 1
MAX_SID = 2**64 - 1
MAX_RANKS = 64
"""Movers of one group."""

Frames: TypeAlias = npt.NDArray[np.int32]
Gens: TypeAlias = npt.NDArray[np.uint32]

NO_FRAMES: Frames = np.empty(0, dtype=np.int32)
NO_GENS: Gens = np.empty(0, dtype=np.uint32)


class Op(enum.IntEnum):
    """What a message is about; the numbers are what travels."""

    HELLO = 1
    LOOKUP = 2
    BEGIN_LOAD = 3
    BEGIN_STORE = 4
    FINISH = 5
    ABORT = 6
    QUIET = 7
    FLUSH = 8
    STATS = 9
    DETACH = 10


# --- what is asked ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Hello:
    """Ties this socket to the session: the first message of each new socket."""

    op: ClassVar[Op] = Op.HELLO


@dataclass(slots=True)
class Lookup:
    """How much of this chain is there? Holds nothing. `keys`: packed, from the chain's first page."""

    ns: bytes
    keys: bytes
    op: ClassVar[Op] = Op.LOOKUP


@dataclass(slots=True)
class LoadChain:
    """One load: `keys` from the chain's first page; pages from `first` on are wanted, at least `at_least` of
    them (R6: fewer is a miss and makes no lease). `number`: the lease's, rising in the session (R1)."""

    number: int
    ns: bytes
    keys: bytes
    first: int = 0
    at_least: int = 1


@dataclass(slots=True)
class BeginLoad:
    chains: tuple[LoadChain, ...]
    op: ClassVar[Op] = Op.BEGIN_LOAD


@dataclass(slots=True)
class StoreChain:
    """One store: `keys` from the chain's first page to the last that is to be stored; `epoch`: the
    namespace's, as told by the look-up or load that the KV goes back to (R13)."""

    number: int
    ns: bytes
    keys: bytes
    epoch: int = 0


@dataclass(slots=True)
class BeginStore:
    chains: tuple[StoreChain, ...]
    op: ClassVar[Op] = Op.BEGIN_STORE


@dataclass(slots=True)
class End:
    """The end of one lease. `quiet`: ranks of the movers whose last event on it has fired (R9)."""

    number: int
    quiet: tuple[int, ...] = ()


@dataclass(slots=True)
class Finish:
    ends: tuple[End, ...]
    op: ClassVar[Op] = Op.FINISH


@dataclass(slots=True)
class Abort:
    ends: tuple[End, ...]
    op: ClassVar[Op] = Op.ABORT


@dataclass(slots=True)
class Quiet:
    """A mover says that it touches these leases of `planner_sid` no more (R9)."""

    planner_sid: int
    numbers: tuple[int, ...]
    op: ClassVar[Op] = Op.QUIET


@dataclass(slots=True)
class Flush:
    """Forget one namespace, or all with ns = b"" (R13)."""

    ns: bytes = b""
    op: ClassVar[Op] = Op.FLUSH


@dataclass(slots=True)
class Stats:
    """Counters. Needs no session and formats nothing."""

    op: ClassVar[Op] = Op.STATS


@dataclass(slots=True)
class Detach:
    """The session ends. `quiet`: its last event has fired; else frames wait for the proof of death (R11)."""

    quiet: bool = True
    op: ClassVar[Op] = Op.DETACH


Body: TypeAlias = Hello | Lookup | BeginLoad | BeginStore | Finish | Abort | Quiet | Flush | Stats | Detach


@dataclass(slots=True)
class Request:
    """A body and its envelope. `rid` rises within the socket; `expires`: CLOCK_MONOTONIC in ns after which
    the server does nothing but say so, 0 = never; `sid` = 0: without a session (`stats` only)."""

    rid: int
    server_gen: int
    sid: int
    body: Body
    expires: int = 0


# --- what is answered -------------------------------------------------------------------------------


@dataclass(slots=True)
class HelloReply:
    """`complete`: all movers of the group are attached, so leases are granted (R2)."""

    complete: bool
    op: ClassVar[Op] = Op.HELLO


@dataclass(slots=True)
class LookupReply:
    """`ready`: visible pages from the chain's first on; `pending`: those after them being written."""

    ready: int
    pending: int
    epoch: int
    op: ClassVar[Op] = Op.LOOKUP


@dataclass(slots=True, eq=False)
class LoadGrant:
    """The answer to one `LoadChain`. With status OK the frames of pages `first`, `first + 1`, ... are held
    under the lease, and `gens` are their generations, to be compared after the copy (R31); else nothing is
    held. Both arrays are read-only. `ready`: visible pages from the chain's first on. `reason`: in one word,
    why not all that was wanted is given."""

    number: int
    status: Status
    epoch: int = 0
    ready: int = 0
    frames: Frames = field(default_factory=lambda: NO_FRAMES)
    gens: Gens = field(default_factory=lambda: NO_GENS)
    reason: str = ""
    text: str = ""


@dataclass(slots=True)
class LoadReply:
    grants: tuple[LoadGrant, ...]
    op: ClassVar[Op] = Op.BEGIN_LOAD


@dataclass(slots=True, eq=False)
class StoreGrant:
    """The answer to one `StoreChain`. With status OK, `frames` are for pages `start`, `start + 1`, ...
    (`taken` of them); pages before `start` are there already or are being written by others (`pending`);
    `reason` says why not all of the rest was taken. DONE: nothing is left to store, no lease was made."""

    number: int
    status: Status
    epoch: int = 0
    start: int = 0
    taken: int = 0
    pending: int = 0
    frames: Frames = field(default_factory=lambda: NO_FRAMES)
    reason: str = ""
    text: str = ""


@dataclass(slots=True)
class StoreReply:
    grants: tuple[StoreGrant, ...]
    op: ClassVar[Op] = Op.BEGIN_STORE


@dataclass(slots=True)
class Ended:
    """`status`: OK, or DONE when the lease had ended before. `visible`: its pages that can be found now;
    `dropped`: those that were lost with an ancestor, an abort or a flush (R7, R13); `superseded`: those
    that another store took over (R8)."""

    number: int
    status: Status
    visible: int = 0
    dropped: int = 0
    superseded: int = 0
    text: str = ""


@dataclass(slots=True)
class EndReply:
    """Answers `Finish`, `Abort` and `Quiet`, one entry for each lease named, in order."""

    op: Op
    ended: tuple[Ended, ...]


@dataclass(slots=True)
class FlushReply:
    freed: int
    doomed: int
    epoch: int
    op: ClassVar[Op] = Op.FLUSH


@dataclass(slots=True)
class StatsReply:
    values: dict[str, int | str]
    op: ClassVar[Op] = Op.STATS


@dataclass(slots=True)
class DetachReply:
    op: ClassVar[Op] = Op.DETACH


ReplyBody: TypeAlias = (
    HelloReply | LookupReply | LoadReply | StoreReply | EndReply | FlushReply | StatsReply | DetachReply
)


@dataclass(slots=True)
class Reply:
    """`status` is the request's as a whole (each chain and each end has its own); `body` is None where the
    request was not carried out: `text` says why. A client makes replies of its own with status AWAY."""

    rid: int
    server_gen: int
    status: Status
    text: str = ""
    body: ReplyBody | None = None


class BadRequest(ProtocolError):
    """A request whose body is wrong but whose `rid` could be read (0 if not), so that it gets its reply."""

    def __init__(self, rid: int, text: str) -> None:
        super().__init__(text)
        self.rid = rid
