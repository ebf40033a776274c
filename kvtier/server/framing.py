"""rpyc's messages over a Unix stream socket, without its waiting and without its trust.

rpyc's own channel reads until a message is whole, however slow or large, and unpacks compressed ones of any
size. This one is in its place on both sides: it never blocks but in `poll`, takes no message above its
limit, and no compressed one. Standard library only; it imports no rpyc, so that a sidecar that nobody
controls never loads that.

A message is its length (uint32, big-endian), a byte (is it compressed?), its bytes, and a newline.
"""

from __future__ import annotations

import select
import socket
import struct
from typing import Protocol

from kvtier.errors import ProtocolError

_HEADER = struct.Struct("!LB")
_END = b"\n"
_READ_BYTES = 64 * 1024
"""The most that is taken in at once."""


class Deadline(Protocol):
    """What rpyc waits by: `rpyc.lib.Timeout`."""

    def timeleft(self) -> float | None: ...


class Framed:
    """The side that rpyc sees: `poll`, `recv`, `send`, `close`, `closed`, `fileno`.

    `limit`: bytes of the largest message that may come in. `backlog`: bytes that may wait for a peer that
    does not read. Both raise ProtocolError when broken; EOFError when the peer has gone. `ended`: nothing
    more will come in.
    """

    def __init__(self, sock: socket.socket, limit: int, backlog: int) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._limit = limit
        self._backlog = backlog
        self._in = bytearray()
        self._out = bytearray()
        self.ended = False

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    @property
    def unsent(self) -> bool:
        """Bytes wait until the peer reads."""
        return bool(self._out)

    def fileno(self) -> int:
        return self._socket.fileno()

    def whole(self) -> bool:
        """Is a whole message here?"""
        if len(self._in) < _HEADER.size:
            return False
        length, compressed = _HEADER.unpack_from(self._in)
        if length > self._limit or compressed:
            kind = "compressed message" if compressed else "message"
            raise ProtocolError(f"a {kind} of {length} bytes: at most {self._limit}, uncompressed")
        return len(self._in) >= _HEADER.size + int(length) + len(_END)

    def feed(self) -> None:
        """Take in what has come, up to 64 KiB. Take messages out before calling it again. Never blocks."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise EOFError(str(error)) from None
        self.ended = not data
        self._in += data

    def poll(self, timeout: Deadline) -> bool:
        """Wait for a whole message; False when none came in time. EOFError when none can come any more."""
        while not self.whole():
            if self.ended:
                raise EOFError("the peer has closed the connection")
            left = timeout.timeleft()
            poller = select.poll()
            poller.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
            if not poller.poll(None if left is None else left * 1000):
                return False
            self.flush()
            self.feed()
        return True

    def recv(self) -> bytes:
        """The next message; `whole` or `poll` has said that it is there."""
        if not self.whole():
            raise EOFError("no whole message is there")
        length, _ = _HEADER.unpack_from(self._in)
        end = _HEADER.size + length
        data = bytes(self._in[_HEADER.size : end])
        del self._in[: end + len(_END)]
        return data

    def send(self, data: bytes) -> None:
        """Send, or keep what the peer does not read yet. Never blocks."""
        if self.closed:
            raise EOFError("the connection is closed")
        if len(self._out) + len(data) > self._backlog:
            raise ProtocolError(f"the peer does not read: more than {self._backlog} bytes wait for it")
        self._out += _HEADER.pack(len(data), 0) + data + _END
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the peer reads."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise EOFError(str(error)) from None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
