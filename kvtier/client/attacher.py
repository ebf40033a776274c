"""The thread that attaches a client to its sidecar, again and again if need be.

Its own, so that the client's owner never waits for a server that is away, slow or standing still. Imports
zmq, `shm`, `wire` and the ground floor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path

import zmq

from kvtier.client.scheduling import give_way
from kvtier.errors import GeometryError, KVTierError, ProtocolError, Status
from kvtier.shm.attach import Attachment, AttachRequest, Refusal, connect
from kvtier.shm.rundir import DATA_SOCKET
from kvtier.wire.codec import decode_reply, encode_request
from kvtier.wire.messages import Detach, Hello, HelloReply, Request
from kvtier.wire.packing import MAX_MESSAGE_BYTES

MAX_UNANSWERED = 64
"""Requests under way at a time: as many as the high-water marks hold, so that every reply has room."""
ATTEMPT_S = 1.0
"""The most that each half of an attempt to attach may take: the attach socket, then the data socket."""
_POLLIN = int(zmq.POLLIN)  # a plain int: the flag's own operators cost microseconds
_BACKOFF_S = (0.05, 2.0)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Link:
    """One attachment and its socket, hello said. Made by the attaching thread, used and closed by the
    owner."""

    attachment: Attachment
    socket: zmq.Socket[bytes]
    fd: int
    """The socket's own descriptor: edge-triggered, so a wake-up only; `readable` tells."""
    complete: bool
    wait_ms: int = -1
    """The socket's receive timeout, where the owner has set it."""

    def readable(self) -> bool:
        return bool(int(self.socket.getsockopt(zmq.EVENTS)) & _POLLIN)


class Attacher:
    """The thread that attaches, again and again if need be, and hands over what it made.

    It makes the socket and says hello too, so that the owner never waits. `bell` (an eventfd) is readable
    when something was made. It owns the zmq context and the bell, and ends them after the owner has called
    `stop`.
    """

    def __init__(self, run_dir: Path, request: AttachRequest, writable: bool | None) -> None:
        self.request = request
        self.refused: KVTierError | None = None
        self.first_attempt = threading.Event()
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._run_dir = run_dir
        self._writable = writable
        self._change = threading.Condition()
        self._wanted = True
        self._stopping = False
        self._made: Link | None = None
        self._said = ""
        self._context = zmq.Context(io_threads=1)
        self._thread = threading.Thread(target=self._run, name="kvtier-attach", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Link | None:
        """What was made since the last call; it is the caller's then."""
        if self._made is None:
            return None
        with self._change:
            link, self._made = self._made, None
            os.eventfd_read(self.bell)
        return link

    def again(self) -> None:
        with self._change:
            self._wanted = True
            self._change.notify()

    def stop(self, timeout_s: float) -> None:
        """End the thread, and wait for that at most `timeout_s`.

        An attempt that is under way runs out by itself, within its own bound, and gives back what it made.
        """
        with self._change:
            self._stopping = True
            self._change.notify()
        self._thread.join(max(timeout_s, 0.0))

    def _run(self) -> None:
        give_way()  # for zmq's own threads too, which are started with the first socket
        backoff = _BACKOFF_S[0]
        while True:
            with self._change:
                self._change.wait_for(lambda: self._stopping or self._wanted)
                if self._stopping:
                    break
            try:
                link = self._attempt()
            except (OSError, zmq.ZMQError) as error:
                link = None
                self._failed(KVTierError(f"cannot attach to {self._run_dir}: {error}"))
            except KVTierError as error:
                link = None
                self._failed(error)
            with self._change:
                if link is not None:
                    backoff = _BACKOFF_S[0]
                    self._made, self._wanted = link, False
                    os.eventfd_write(self.bell, 1)
                self.first_attempt.set()
                if link is None:
                    self._change.wait_for(lambda: self._stopping, backoff * random.uniform(0.5, 1.0))
                    backoff = min(2 * backoff, _BACKOFF_S[1])
        self.first_attempt.set()
        if self._made is not None:
            self._undo(self._made)
        self._context.term()
        os.close(self.bell)

    def _attempt(self) -> Link | None:
        """One attach and its hello; None when there is no server, or it refuses."""
        found = connect(self._run_dir, self.request, timeout_s=ATTEMPT_S, writable=self._writable)
        if isinstance(found, Refusal):
            if found.status == Status.AWAY:
                self._failed(None, found.text)
                return None
            if found.geometry is not None:
                self._failed(GeometryError(found.text))
                return None
            self._failed(KVTierError(found.text))
            return None
        link = None
        try:
            socket = self._context.socket(zmq.DEALER)
            try:
                link = self._hello(found, socket)
            finally:
                if link is None:
                    socket.close(0)
        finally:
            if link is None:  # whatever went wrong: nothing of it may stay open
                found.close()
        return link

    def _hello(self, found: Attachment, socket: zmq.Socket[bytes]) -> Link | None:
        """Tie `socket` to the new session; None when there is no good answer."""
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, MAX_UNANSWERED)
        socket.setsockopt(zmq.RCVHWM, MAX_UNANSWERED)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDTIMEO, int(ATTEMPT_S * 500))
        socket.setsockopt(zmq.RCVTIMEO, int(ATTEMPT_S * 500))
        try:
            socket.connect(f"ipc://{self._run_dir / DATA_SOCKET}")
            socket.send(encode_request(Request(0, found.server_gen, found.sid, Hello())))
            reply = decode_reply(socket.recv())
        except (zmq.Again, ProtocolError) as error:
            self._failed(None, f"attached, but hello had no answer ({error})")
            return None
        if not isinstance(reply.body, HelloReply):
            self._failed(None, f"attached, but hello was answered: {reply.text}")
            return None
        found.poll_chunks()
        self.refused, self._said = None, ""
        log.info("kvtier %s is attached to the sidecar of %s", self.request.role, self._run_dir)
        return Link(found, socket, int(socket.getsockopt(zmq.FD)), reply.body.complete)

    def _failed(self, refused: KVTierError | None, text: str = "") -> None:
        """Remember why, and say it once."""
        self.refused = refused
        said = str(refused) if refused is not None else text
        if said != self._said:
            self._said = said
            log.warning(
                "kvtier %s of %s is not attached: %s; going on without it",
                self.request.role,
                self._run_dir,
                said,
            )

    def _undo(self, link: Link) -> None:
        """Give back a session that nobody took over."""
        detach = Request(1, link.attachment.server_gen, link.attachment.sid, Detach(quiet=True))
        with contextlib.suppress(zmq.Again):
            link.socket.send(encode_request(detach))
            link.socket.recv()
        link.socket.close(0)
        link.attachment.close()
