"""The operator's socket and its thread: who is let in, and who has to go.

rpyc is imported (with `server.admin`) when the first operator says something, so that a sidecar that nobody
controls starts as fast and stays as small as without it. Imports the standard library, `shm` and the ground
floor. Always true: the thread touches nothing of the loop's but its inbox; however many connect, say nothing
or send rubbish, the newest comer is served, and the loop goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.errors import ProtocolError
from kvtier.server.control import Control
from kvtier.server.framing import Framed
from kvtier.server.inbox import Inbox
from kvtier.shm.rundir import ADMIN_SOCKET

if TYPE_CHECKING:
    from kvtier.server.admin import AdminConnection

MAX_OPERATORS = 16
"""Connections at a time; the one that has been silent for longest makes room for a newcomer."""
BACKLOG = 128
MAX_REQUEST_BYTES = 4096
MAX_UNREAD_BYTES = 1 << 20
"""Answers that may wait for an operator who does not read."""
SILENT_S = 300.0
"""How long a connection may say nothing."""
ROUND_S = 0.001
"""The least time from one round to the next."""
PAUSE_S = 1.0
"""How long nobody is let in after accepting or anything unexpected has failed."""
END_S = 10.0

log = logging.getLogger(__name__)


class Door:
    """Binds the socket (0600) at once; serves from `start` to `close`.

    Only for who holds the owner lock (R25): an old socket's file is replaced.
    """

    def __init__(self, run_dir: Path, inbox: Inbox, control: Control) -> None:
        self._path = run_dir / ADMIN_SOCKET
        self._inbox = inbox
        self._control = control
        self._operators: dict[_Operator, None] = {}  # in the order of their coming
        self._paused_until = 0.0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._rest = select.poll()
        self._rest.register(self._bell, select.POLLIN)
        self._selector = selectors.DefaultSelector()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
            # Nobody else can come between these lines: the directory is closed to others.
            self._path.chmod(0o600)
            self._socket.listen(BACKLOG)
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._selector.register(self._bell, selectors.EVENT_READ)
        except OSError:
            self._release()
            raise

    def start(self) -> None:
        """Let operators in, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="kvtier-admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, hang up, remove the socket. Bounded; once only. The loop no longer runs."""
        self._stopping = True
        self._inbox.close()
        os.eventfd_write(self._bell, 1)
        if self._thread is not None:
            self._thread.join(END_S)
            if self._thread.is_alive():
                log.error("the admin thread did not end within %g s", END_S)
                return
        self._release()

    def _release(self) -> None:
        for operator in list(self._operators):
            self._hang_up(operator)
        self._selector.close()
        self._socket.close()
        self._path.unlink(missing_ok=True)
        os.close(self._bell)

    # -- the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._serve()
            except Exception:
                # Never silently (P11), and never for good.
                log.exception("the admin thread failed; everyone is hung up, and it goes on")
                for operator in list(self._operators):
                    self._hang_up(operator)
                self._pause()

    def _serve(self) -> None:
        """One round: whoever has something to say, one message each."""
        if any(operator.more for operator in self._operators):
            timeout_s: float | None = 0.0
        else:
            timeout_s = PAUSE_S if self._operators or self._paused_until else None
        ready = {key.fd: events for key, events in self._selector.select(timeout_s)}
        now = time.monotonic()
        for operator in list(self._operators):
            events = ready.get(operator.fd, 0)
            if events or operator.more:
                self._hear(operator, events, now)
            elif now > operator.heard + SILENT_S:
                self._hang_up(operator)
        if self._socket.fileno() in ready:
            for _ in range(BACKLOG):
                if not self._accept(now):
                    break
        elif self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._selector.register(self._socket, selectors.EVENT_READ)
        # The interpreter is the loop's: who floods gets a message a round, a thousand rounds a second.
        self._rest.poll(ROUND_S * 1000)

    def _accept(self, now: float) -> bool:
        """Let one more in; False when nobody waits."""
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return False
        except ConnectionError:
            return True  # it went away while it waited
        except OSError as error:
            log.warning("admin socket: %s", error)  # no descriptors left
            self._pause()
            return False
        if len(self._operators) >= MAX_OPERATORS:
            self._hang_up(min(self._operators, key=lambda one: one.heard))
        operator = _Operator(sock, now)
        self._operators[operator] = None
        self._selector.register(operator.fd, selectors.EVENT_READ, operator)
        return True

    def _pause(self) -> None:
        """Let nobody in for a while: they wait in the backlog, and the thread does not spin."""
        if not self._paused_until:
            self._selector.unregister(self._socket)
        self._paused_until = time.monotonic() + PAUSE_S

    def _hear(self, operator: _Operator, events: int, now: float) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                operator.channel.flush()
            if events & selectors.EVENT_READ and not operator.more:
                operator.channel.feed()
                operator.heard = now
            operator.more = operator.channel.whole()
            if operator.more:
                if operator.connection is None:
                    # Here, on the first word of the first operator: the only import of rpyc in a sidecar.
                    from kvtier.server.admin import AdminConnection

                    operator.connection = AdminConnection(operator.channel, self._inbox, self._control)
                operator.connection.serve(0)
                operator.more = operator.channel.whole()
            if operator.channel.ended and not operator.more:
                raise EOFError
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if operator.channel.unsent else 0)
            if wanted != operator.watched:
                operator.watched = wanted
                self._selector.modify(operator.fd, wanted, operator)
        except EOFError:
            self._hang_up(operator)
        except ProtocolError as error:
            log.warning("admin socket: %s", error)
            self._hang_up(operator)
        except Exception as error:  # noqa: BLE001  # rpyc raises any kind about bytes that are none of its own
            log.warning("admin socket: not a message of rpyc: %s: %.200s", type(error).__name__, error)
            self._hang_up(operator)

    def _hang_up(self, operator: _Operator) -> None:
        self._operators.pop(operator, None)
        with contextlib.suppress(KeyError):
            self._selector.unregister(operator.fd)
        if operator.connection is not None:
            operator.connection.close()
        operator.channel.close()


class _Operator:
    """One connection. `more`: a whole message waits already. `heard`: when it last said anything."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.channel = Framed(sock, MAX_REQUEST_BYTES, MAX_UNREAD_BYTES)
        self.fd = sock.fileno()
        self.connection: AdminConnection | None = None
        self.heard = now
        self.more = False
        self.watched = selectors.EVENT_READ
