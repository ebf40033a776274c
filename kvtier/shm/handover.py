"""Messages of the attach socket, and how they and their descriptors are sent and received (R28).

A message is one msgpack map and at most 64 descriptors on a Unix SOCK_SEQPACKET socket:

    server -> client   greeting   on connect: pool id (b"" before the first attach), server_gen       (R24)
    client -> server   attach     group, role, rank, ranks, geometry ..., and the client's pidfd
    server -> client   attached   sid, pool id; with two descriptors: session lock, tables (read-only)
                       refused    status, text; for another geometry the pool's
    client -> server   chunks     start: it has mapped all before `start`, and waits for more         (R28)
    server -> client   chunks     start, count, and that many descriptors; now, or once they are reserved

Imports msgpack, the standard library and the ground floor. Always true: a message comes whole or as a
ProtocolError, and received descriptors are either handed to the caller or closed.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

import msgpack

from kvtier.errors import ProtocolError, UsageError

VERSION = 1
MAX_FDS = 64
"""Descriptors in one message (R28); the kernel's own limit is 253."""
MAX_BYTES = 64 * 1024
"""Bytes of one message."""
MAX_SHARDS = 256


@dataclass(frozen=True)
class Greeting:
    """What a client is told on connecting. `pool_id` is b"" while there is no pool."""

    pool_id: bytes
    server_gen: int


@dataclass(frozen=True)
class AttachRequest:
    """Who wants to attach, and with what; checked for types and ranges only.

    `role`: "planner" or "mover"; `rank` of `ranks` movers (0 for a planner). `geometry`, `fingerprint` (32
    bytes) and `format`: of the `KVLayout`. `boot_id`: of the client's machine. `numa_node`: of its GPU, -1
    unknown. `versions`: lowest and highest version of this protocol that the client speaks.
    """

    group: str
    role: str
    rank: int
    ranks: int
    geometry: tuple[int, ...]
    fingerprint: bytes
    format: str = ""
    boot_id: str = ""
    numa_node: int = -1
    versions: tuple[int, int] = (VERSION, VERSION)


@dataclass(frozen=True)
class ChunksRequest:
    """The client has mapped all chunks before `start`, and waits for more.

    Its `mapped` mark is `shape.frames_below(start)` (R28).
    """

    start: int


# --- messages ---------------------------------------------------------------------------------------


class Ended(Exception):
    """The other side has gone."""


def send(sock: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    if len(fds) > MAX_FDS:
        raise UsageError(f"{len(fds)} descriptors in one message: expected at most {MAX_FDS}")
    data = msgpack.packb(message)
    if len(data) > MAX_BYTES:
        raise UsageError(f"a message of {len(data)} bytes: expected at most {MAX_BYTES}")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, max_fds: int) -> tuple[dict[str, Any], list[int]] | None:
    """One message and its descriptors, which are the caller's; None when there is none (yet).

    Ended at the end; ProtocolError for what is no message, or one whose descriptors did not all arrive (R28).
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            MAX_BYTES, socket.CMSG_SPACE(max_fds * 4), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        return None
    except ConnectionError as error:
        raise Ended(str(error)) from error
    fds = array.array("i")
    for level, kind, rights in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(rights[: len(rights) // 4 * 4])
    received = fds.tolist()
    try:
        if flags & socket.MSG_CTRUNC:
            raise ProtocolError(
                f"descriptors were lost: {len(received)} arrived, at most {max_fds} are expected here; or "
                "this process has too many open files (ulimit -n)"
            )
        if len(received) > max_fds:
            raise ProtocolError(f"{len(received)} descriptors: expected at most {max_fds}")
        if flags & socket.MSG_TRUNC:
            raise ProtocolError(f"a message of more than {MAX_BYTES} bytes")
        if not data:
            raise Ended("the other side closed the connection")
        message = unpacked(data)
    except BaseException:
        close_all(received)
        raise
    return message, received


def unpacked(data: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_map_len=64, max_array_len=MAX_SHARDS + 1
        )
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"no msgpack message: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(name, str) for name in message):
        raise ProtocolError("a message is a map with names as keys")
    return message


def answer(sock: socket.socket, deadline: float) -> tuple[dict[str, Any], list[int]]:
    """The next message of a blocking socket, before the deadline; OSError (timeout) after it."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    received = receive(sock, MAX_FDS)
    if received is None:
        raise TimeoutError("no answer in time")
    return received


def readable(sock: socket.socket, deadline: float) -> bool:
    poller = select.poll()  # not select: engines have more than 1,024 descriptors
    poller.register(sock, select.POLLIN)
    return bool(poller.poll(max(0.0, deadline - time.monotonic()) * 1000))


def attach_request(message: dict[str, Any]) -> AttachRequest:
    versions = integers(message, "versions")
    if len(versions) != 2:
        raise ProtocolError("versions: expected the lowest and the highest")
    ranks = integer(message, "ranks", 1, MAX_SHARDS)
    return AttachRequest(
        group=text(message, "group", 256),
        role=text(message, "role", 16),
        rank=integer(message, "rank", 0, ranks - 1),
        ranks=ranks,
        geometry=integers(message, "geometry"),
        fingerprint=bytes_of(message, "fingerprint", (32,)),
        format=text(message, "format", 4096),
        boot_id=text(message, "boot_id", 64),
        numa_node=integer(message, "numa_node", -1, 4096),
        versions=(versions[0], versions[1]),
    )


def integer(message: dict[str, Any], name: str, low: int, high: int) -> int:
    value = message.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{name}={value!r}: expected an integer of {low} to {high}")
    return value


def integers(message: dict[str, Any], name: str) -> tuple[int, ...]:
    value = message.get(name)
    if not isinstance(value, list) or not all(
        type(number) is int and 0 <= number < 2**63 for number in value
    ):
        raise ProtocolError(f"{name}={value!r}: expected integers, zero or more")
    return tuple(value)


def text(message: dict[str, Any], name: str, longest: int) -> str:
    value = message.get(name)
    if not isinstance(value, str) or len(value) > longest:
        raise ProtocolError(f"{name}={value!r}: expected text of at most {longest} characters")
    return value


def bytes_of(message: dict[str, Any], name: str, lengths: tuple[int, ...]) -> bytes:
    value = message.get(name)
    if not isinstance(value, bytes) or len(value) not in lengths:
        raise ProtocolError(f"{name}={value!r}: expected bytes of length {' or '.join(map(str, lengths))}")
    return value


def peer(sock: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side, as the kernel tells them."""
    credentials = struct.Struct("@iII")
    pid, uid, _ = credentials.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    return pid, uid


def close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
