"""rpyc's messages over a socket that never blocks, with limits."""

from __future__ import annotations

import socket
import zlib

import pytest
from rpyc.core.channel import Channel
from rpyc.core.stream import SocketStream
from rpyc.lib import Timeout

from kvtier.errors import ProtocolError
from kvtier.server.framing import Framed


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    with ours, theirs:
        yield Framed(ours, limit=100, backlog=1000), theirs


def test_it_is_rpycs_own_framing(ends):
    framed, theirs = ends
    channel = Channel(SocketStream(theirs), compress=False)
    channel.send(b"from rpyc")
    assert framed.poll(Timeout(20))
    assert framed.recv() == b"from rpyc"
    framed.send(b"to rpyc")
    assert channel.recv() == b"to rpyc"


def test_messages_come_out_one_by_one_however_they_came_in(ends):
    framed, theirs = ends
    theirs.sendall(b"\0\0\0\1\0a\n\0\0\0\0\0\n\0\0\0\3\0b")
    assert framed.poll(Timeout(20))
    assert framed.recv() == b"a"
    assert framed.whole()
    assert framed.recv() == b""
    assert not framed.whole()
    assert not framed.poll(Timeout(0.01))
    with pytest.raises(EOFError):
        framed.recv()
    theirs.sendall(b"cd\n")
    assert framed.poll(Timeout(20))
    assert framed.recv() == b"bcd"


@pytest.mark.parametrize("head", [b"\0\0\0\x65\0", b"\xff\xff\xff\xff\0", b"\0\0\0\1\1", b"HTTP/"])
def test_too_long_and_compressed_ones_are_refused_before_they_are_read(ends, head):
    framed, theirs = ends
    theirs.sendall(head)
    with pytest.raises(ProtocolError, match="at most 100"):
        framed.poll(Timeout(20))


def test_the_limit_itself_is_taken(ends):
    framed, theirs = ends
    theirs.sendall(b"\0\0\0\x64\0" + b"x" * 100 + b"\n")
    assert framed.poll(Timeout(20))
    assert framed.recv() == b"x" * 100


def test_rpycs_compression_is_refused(ends):
    framed, theirs = ends
    Channel(SocketStream(theirs)).send(b"x" * 5000)
    assert len(zlib.compress(b"x" * 5000)) < 100
    with pytest.raises(ProtocolError, match="compressed"):
        framed.poll(Timeout(20))


def test_what_was_said_before_the_end_is_still_heard(ends):
    framed, theirs = ends
    theirs.sendall(b"\0\0\0\1\0a\n")
    theirs.close()
    assert framed.poll(Timeout(20))
    assert framed.recv() == b"a"
    with pytest.raises(EOFError, match="closed"):
        framed.poll(Timeout(20))
    assert framed.ended


def test_a_peer_that_does_not_read_is_an_error_at_the_backlog():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        framed = Framed(ours, limit=10, backlog=100_000)
        with pytest.raises(ProtocolError, match="does not read"):
            for _ in range(1000):
                framed.send(b"x" * 1000)
        assert framed.unsent
        theirs.settimeout(20)
        received = b""
        while framed.unsent:
            received += theirs.recv(1 << 20)
            framed.flush()
        framed.close()
        while data := theirs.recv(1 << 20):
            received += data
        assert len(received) % 1006 == 0
        assert received == (b"\0\0\3\xe8\0" + b"x" * 1000 + b"\n") * (len(received) // 1006)


def test_after_close_it_says_so(ends):
    framed, _ = ends
    framed.close()
    framed.close()
    assert framed.closed
    with pytest.raises(EOFError):
        framed.send(b"x")
