"""Plans down, progress up: the two arrays between a planner and its movers.

A plan is one int32 array, so that any carrier an engine has can take it (a message of its own, a
broadcast, a queue). What comes back is in `progress`, and handed on here. Imports numpy and the ground
floor only.

Always true: decoding never reads past the words that the header announces, whatever they hold; words
after them are padding.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import ProtocolError, UsageError
from kvtier.wire.arrays import Arrays
from kvtier.wire.progress import FAILURES, LANES, PROGRESS_WORDS, Failure, Lane, Progress, Reason, Seen

__all__ = [
    "FAILURES",
    "HEADER_WORDS",
    "LANES",
    "MAX_WORDS",
    "PROGRESS_WORDS",
    "SHORT_LOAD_BYTES",
    "Cancel",
    "Command",
    "Copy",
    "Failure",
    "Kind",
    "Lane",
    "Plan",
    "Progress",
    "Reason",
    "Seen",
    "decode",
    "encode",
    "lane_of",
    "pool_tag",
]

Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]

MAGIC = 0x6B765031  # "kvP1": the format of a plan, with its version
HEADER_WORDS = 4
"""magic, words in all, commands, tag of the pool."""
MAX_WORDS = 1 << 24
"""A plan of more words (64 MiB) is a mistake, not a plan."""


class Kind(enum.IntEnum):
    """Which way a copy goes."""

    LOAD = 1
    """Frames of the pool to units of the device."""
    OFFLOAD = 2
    """Units of the device to frames of the pool."""


SHORT_LOAD_BYTES = 32 << 20
"""A load of more bytes than this goes into the lane of long ones."""


@dataclass(frozen=True, eq=False)
class Copy:
    """One task for a mover: `units` between the device and the pages in `frames`, in token order.

    `task` names it (1 .. 2**63 - 1), `seq` rises by any step within its lane. `frames`: one for each page
    that is touched. `gens`: what `begin_load` said of these frames (R31); empty for an offload. `first`:
    tokens into the first page at which the copy begins. `units`: the engine's unit numbers, one for each
    *finest* unit of the layout; the copy may end inside its last page.
    """

    task: int
    kind: Kind
    lane: Lane
    seq: int
    frames: Int32s
    units: Int32s
    first: int = 0
    gens: UInt32s = field(default_factory=lambda: np.empty(0, np.uint32))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Copy):
            return NotImplemented
        mine = (self.task, self.kind, self.lane, self.seq, self.first)
        return mine == (other.task, other.kind, other.lane, other.seq, other.first) and all(
            np.array_equal(left, right)
            for left, right in (
                (self.frames, other.frames),
                (self.gens, other.gens),
                (self.units, other.units),
            )
        )

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Cancel:
    """Take `task` back if it has not begun; else it runs on. Either way it finishes in its lane's order."""

    task: int


Command = Copy | Cancel


class Plan(NamedTuple):
    """A decoded plan: for which pool, and what to do, in order."""

    pool: int
    commands: list[Command]


# Enums are slow to call.
_KINDS = {int(kind): kind for kind in Kind}
_LANES = {int(lane): lane for lane in Lane}
_COPY, _CANCEL = 1, 2
_COPY_WORDS, _CANCEL_WORDS = 12, 4
_INT31, _INT63 = 1 << 31, 1 << 63


def lane_of(kind: Kind, nbytes: int) -> Lane:
    """The lane for a copy of `nbytes`: offloads have their own, loads are short or long."""
    if kind == Kind.OFFLOAD:
        return Lane.OFFLOADS
    return Lane.SHORT_LOADS if nbytes <= SHORT_LOAD_BYTES else Lane.LONG_LOADS


def pool_tag(pool_id: bytes) -> int:
    """31 bits of a pool's id: enough for a mover to see that a plan is meant for another pool. Never 0."""
    return (zlib.crc32(pool_id) & 0x7FFFFFFF) or 1


def encode(commands: Sequence[Command], pool_id: bytes = b"", arrays: Arrays | None = None) -> Int32s:
    """One int32 array of all `commands`, for the pool with this id; also of none.

    The caller's arrays are copied, into memory from `arrays` where that is given. UsageError names what does
    not fit, before anything is made.
    """
    head = [MAGIC, HEADER_WORDS, len(commands), pool_tag(pool_id)]
    if not commands:
        return np.array(head, np.int32)
    parts: list[list[int] | npt.NDArray[np.integer]] = [head]
    for command in commands:
        parts += _encode_copy(command) if isinstance(command, Copy) else _encode_cancel(command)
    head[1] = sum(map(len, parts))
    if head[1] > MAX_WORDS:
        raise UsageError(f"a plan of {head[1]} words: expected at most {MAX_WORDS}; send less in one step")
    plan = np.empty(head[1], np.int32) if arrays is None else arrays.empty(head[1])
    at = 0
    for part in parts:
        plan[at : at + len(part)] = part
        at += len(part)
    return plan


def decode(plan: npt.NDArray[np.integer]) -> Plan:
    """The commands in `plan`; their arrays are views of it. ProtocolError for anything that is not a plan."""
    words = _as_words(plan)
    header = words[:HEADER_WORDS].tolist()
    if len(header) < HEADER_WORDS or header[0] != MAGIC:
        raise ProtocolError("not a plan: it does not begin with a plan's header")
    _, end, count, tag = header
    if not HEADER_WORDS <= end <= min(len(words), MAX_WORDS) or count < 0:
        raise ProtocolError(f"a plan that says {end} words and {count} commands, in an array of {len(words)}")
    commands: list[Command] = []
    at = HEADER_WORDS
    for _ in range(count):
        if end - at < 2:
            raise ProtocolError(f"a plan of {count} commands ends after {len(commands)}")
        head = words[at : min(at + _COPY_WORDS, end)].tolist()
        code, size = head[:2]
        if not 2 <= size <= end - at:
            raise ProtocolError(f"command {len(commands)} says {size} words, {end - at} are left")
        if code == _COPY:
            commands.append(_decode_copy(head, words[at : at + size]))
        elif code == _CANCEL and size == _CANCEL_WORDS:
            commands.append(Cancel(_join(head[2], head[3])))
        else:
            raise ProtocolError(f"command {len(commands)} has code {code} and {size} words: unknown")
        at += size
    if at != end:
        raise ProtocolError(f"{end - at} words after the last command of a plan")
    return Plan(tag, commands)


def _encode_copy(copy: Copy) -> list[list[int] | npt.NDArray[np.integer]]:
    frames, units, gens = np.asarray(copy.frames), np.asarray(copy.units), np.asarray(copy.gens)
    for name, array in (("frames", frames), ("units", units), ("gens", gens)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise UsageError(f"task {copy.task}: {name} must be one-dimensional integers")
    for name, array in (("frames", frames), ("units", units)):
        if array.size and (array.min() < 0 or (array.dtype != np.int32 and array.max() >= _INT31)):
            raise UsageError(f"task {copy.task}: {name} must lie in 0 .. 2**31 - 1")
    if copy.kind == Kind.LOAD and len(gens) != len(frames):
        raise UsageError(f"task {copy.task}: {len(gens)} gens for {len(frames)} frames of a load")
    if not (0 < copy.task < _INT63 and 0 < copy.seq < _INT63 and 0 <= copy.first < _INT31):
        raise UsageError(f"task={copy.task}, seq={copy.seq}, first={copy.first}: out of range")
    counts = (len(frames), len(gens), len(units))
    kind, lane = _KINDS[copy.kind], _LANES[copy.lane]
    size = _COPY_WORDS + sum(counts)
    head = [_COPY, size, kind, lane, *_split(copy.task), *_split(copy.seq), copy.first, *counts]
    return [head, frames, gens.astype(np.uint32, copy=False).view(np.int32), units]


def _encode_cancel(cancel: Cancel) -> list[list[int] | npt.NDArray[np.integer]]:
    if not 0 < cancel.task < _INT63:
        raise UsageError(f"task={cancel.task}: out of range")
    return [[_CANCEL, _CANCEL_WORDS, *_split(cancel.task)]]


def _decode_copy(head: list[int], body: Int32s) -> Copy:
    """`head`: the first words of `body`, as ints."""
    if len(body) < _COPY_WORDS:
        raise ProtocolError(f"a copy of {len(body)} words: expected {_COPY_WORDS} or more")
    _, _, kind, lane, task_low, task_high, seq_low, seq_high, first, frames, gens, units = head
    if min(frames, gens, units, first) < 0 or _COPY_WORDS + frames + gens + units != len(body):
        raise ProtocolError(f"a copy of {len(body)} words with {frames} frames, {gens} gens, {units} units")
    if kind not in _KINDS or lane not in _LANES:
        raise ProtocolError(f"a copy of kind {kind} in lane {lane}: unknown")
    if kind == Kind.LOAD and gens != frames:
        raise ProtocolError(f"a load of {frames} frames with {gens} gens")
    at = _COPY_WORDS
    return Copy(
        _join(task_low, task_high),
        _KINDS[kind],
        _LANES[lane],
        _join(seq_low, seq_high),
        body[at : at + frames],
        body[at + frames + gens :],
        first,
        body[at + frames : at + frames + gens].view(np.uint32),
    )


def _as_words(plan: npt.NDArray[np.integer]) -> Int32s:
    if not isinstance(plan, np.ndarray) or plan.ndim != 1 or plan.dtype != np.int32:
        raise ProtocolError("a plan is a one-dimensional numpy array of int32")
    return np.ascontiguousarray(plan)


def _split(number: int) -> tuple[int, int]:
    """63 bits as two words that int32 holds."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >= _INT31 else low, number >> 32


def _join(low: int, high: int) -> int:
    number = (high << 32) | (low & 0xFFFFFFFF)
    if number <= 0:
        raise ProtocolError(f"{number} as the name of a task or a sequence number: expected 1 or more")
    return number
