"""The sidecar: one synchronous loop over the data socket, the attach socket, and the clients' processes.

    server = Server(run_dir, pool_bytes)    # OwnedError, PreflightError, ConfigError: nothing is left behind
    server.run()                            # until stop(), from any thread or a signal handler
    server.close()

One thread owns everything. Imports zmq, `core`, `shm`, `wire` and the ground floor; no torch. Always true:
no bytes from outside stop the loop, and each request gets its reply (an unexpected error too), except what
has too many parts, which is dropped and counted. Only a core whose invariants are broken stops the server:
serving on could hand out another prompt's KV.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import selectors
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import zmq

from kvtier.config import format_size
from kvtier.errors import PreflightError, Status
from kvtier.server.admission import Admission
from kvtier.server.answers import Answers
from kvtier.server.control import Control
from kvtier.server.door import Door
from kvtier.server.inbox import Inbox
from kvtier.server.sessions import Session
from kvtier.server.state import State
from kvtier.shm import preflight
from kvtier.shm.attach import AttachRequest, Connection, Greeting, Listener
from kvtier.shm.liveness import Liveness, OwnerLock, SessionLocks
from kvtier.shm.rundir import DATA_SOCKET
from kvtier.wire.codec import decode_request, encode_reply
from kvtier.wire.messages import BadRequest, Reply
from kvtier.wire.packing import MAX_MESSAGE_BYTES, MAX_PARTS

MAX_CONNECTIONS = 512
"""On the attach socket: twice the sessions, so that newcomers can be refused by name."""
STRANGER_S = 10.0
"""How long a connection may stay without a session."""
OPEN_FILES = 16_384
"""Descriptors: for each session connection, pidfd and data socket, and for each chunk one."""
OWN_FILES = 320
"""Of these, the sidecar's own: chunks, tables, sockets, locks."""
HIGH_WATER_MARK = 64
"""Messages that wait in one direction for one peer."""
SWEEP_S = 1.0
"""How often liveness, the heartbeat and a slice of the core's own check are due."""
DOUBT_S = 0.05
"""The same while the end of a session is not proven yet, or a drain goes on."""
PROGRESS_S = 1.0
"""How often the log says how far the reservation is."""
CHECK_NODES = 200
CLEAN_PAGES = 4096
"""Slices of the core's own check, and of freeing what a flush left: each about 1 ms (R18)."""
# Plain ints: the flags' own operators cost microseconds.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_BURST = HIGH_WATER_MARK
"""Requests answered in a row before everything else gets its turn."""

log = logging.getLogger(__name__)


class Server:
    """Owns the run directory from its making to `close()`. `patience_s`: R8.

    The pool is made at the first attach, which brings the geometry; before that only the preflight is done.
    """

    def __init__(self, run_dir: str | Path, pool_bytes: int, *, patience_s: float = 10.0) -> None:
        preflight.require(preflight.run(pool_bytes))
        # A peer costs up to three descriptors: connection, pidfd, data socket. libzmq ends the process when
        # it finds none for a newcomer (seen), so the attach socket leaves it some, and the pool its chunks.
        self._room = min(MAX_CONNECTIONS, max((_raise_open_files() - OWN_FILES) // 4, 8))
        # Milliseconds since the epoch rise with each start (R1), without a file that outlives the server.
        self._state = State(pool_bytes, server_gen=time.time_ns() // 1_000_000, patience_s=patience_s)
        self._stopping = False
        self._next_sweep = self._next_progress = 0.0
        self._watched_memory = -1
        self._connections: set[Connection] = set()
        # Undone in reverse, now when something fails, or by close().
        with ExitStack() as made, _said_plainly(run_dir):
            self._selector = made.enter_context(selectors.DefaultSelector())
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            made.callback(os.close, self._bell)
            owner = OwnerLock(run_dir)
            made.callback(owner.release)
            self.run_dir = Path(owner.run_dir)
            self._locks = SessionLocks(self.run_dir)
            made.callback(self._locks.close)
            context = made.enter_context(zmq.Context(io_threads=1))
            self._router = made.enter_context(self._bind(context))
            self._listener = Listener(self.run_dir, Greeting(b"", self._state.server_gen))
            made.callback(self._listener.close)
            self._answers = Answers(self._state)
            self._control = Control(self._state, self._locks, self._answers.stats)
            self._inbox = Inbox(self._ring)
            self._door = Door(self.run_dir, self._inbox, self._control)
            made.callback(self._door.close)
            self._made = made.pop_all()
        self._admission = Admission(self._state, self._locks, self._pool_changed)
        self._state.sessions.unwatch = self._unwatch
        watch = self._selector.register
        watch(self._bell, selectors.EVENT_READ, self._rung)
        watch(self._listener.fileno(), selectors.EVENT_READ, self._accept)
        watch(int(self._router.getsockopt(zmq.FD)), selectors.EVENT_READ, None)

    def _bind(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        # A reply that cannot be delivered is an error then, and counted.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, 512)
        path = self.run_dir / DATA_SOCKET
        # The owner lock is held: whatever lies there is of a server that is dead (R25).
        path.unlink(missing_ok=True)
        router.bind(f"ipc://{path}")
        path.chmod(0o600)
        return router

    # --- life ---

    def run(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop()`. `ready` is called once, when clients can attach."""
        if ready is not None:
            ready()
        self._door.start()  # last: a sidecar serves engines before its operator
        more = False
        while not self._stopping:
            now = time.monotonic()
            if now >= self._next_sweep:
                self._next_sweep = now + self._sweep()
            timeout_s = 0.0 if more else max(0.0, self._next_sweep - time.monotonic())
            self._hear_all(timeout_s)
            more = self._drain()
            pool = self._state.formatted
            if pool is not None and pool.cleaning:
                more = pool.clean(CLEAN_PAGES) or more

    def _hear_all(self, timeout_s: float) -> None:
        """Whatever is ready, but for the data socket."""
        for key, _ in self._selector.select(timeout_s):
            if key.data is not None:
                key.data()

    def stop(self) -> None:
        """End `run` soon. From any thread, or a signal handler."""
        self._stopping = True
        self._ring()

    def _ring(self) -> None:
        """Wake the loop. From any thread."""
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Let go of everything and remove what was made. Bounded; once only.

        Clients notice by the end of their connection, and keep what they have mapped.
        """
        self._stopping = True
        for connection in list(self._connections):
            self._hang_up(connection)
        for session in self._state.sessions:
            self._state.sessions.drop(session)
        if self._state.formatted is not None:
            self._state.formatted.close()
        self._made.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rung(self) -> None:
        os.eventfd_read(self._bell)
        self._inbox.run(self._unexpected)
        if self._state.draining:
            self._next_sweep = 0.0  # it may have begun just now: sweeps come faster then

    # --- the data socket ---

    def _drain(self) -> bool:
        """Answer what has come in; True when there may be more.

        The socket's descriptor is edge-triggered: the loop may wait only when the socket itself has said that
        nothing is there. It is asked after each answer, when no client waits for that any more.
        """
        router = self._router
        for _ in range(_BURST):
            try:
                routing = router.recv(_NOBLOCK)
            except zmq.Again:
                return False
            frame = router.recv(_NOBLOCK, copy=False)
            data, parts = frame.buffer, 1
            while frame.more:
                frame = router.recv(_NOBLOCK, copy=False)
                parts += 1
            if not self._state.settled:
                # What a client said on the attach socket before it asked ("mapped") counts before the answer.
                self._hear_all(0.0)
            self._answer(routing, data, parts)
            if not int(router.get(_EVENTS)) & _POLLIN:
                return False
        return True

    def _answer(self, routing: bytes, data: memoryview, parts: int) -> None:
        counters = self._state.counters
        if parts > MAX_PARTS:
            counters.dropped_requests += 1
            return
        rid, gen = 0, self._state.server_gen
        try:
            if parts != 1:
                raise BadRequest(0, f"message of {parts} parts: a request has one")
            request = decode_request(data)
            rid = request.rid
            answer = encode_reply(self._answers.answer(routing, request, time.monotonic()))
        except BadRequest as error:
            counters.bad_requests += 1
            answer = encode_reply(Reply(error.rid, gen, Status.BAD, str(error)))
        except Exception:
            log.exception("a request failed unexpectedly; checking the core")
            self._unexpected()
            answer = encode_reply(Reply(rid, gen, Status.BAD, "internal error: see the server's log"))
        try:
            self._router.send(routing, _NOBLOCK_MORE)
            self._router.send(answer, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            counters.dropped_replies += 1

    def _unexpected(self) -> None:
        """An error that nobody foresaw: no request goes without its reply for it (P3), but a broken core ends
        the loop loudly."""
        self._state.counters.internal_errors += 1
        if self._state.formatted is not None:
            self._state.pool.write()
            self._state.pool.cache.check()

    # --- the attach socket ---

    def _accept(self) -> None:
        for connection in self._listener.accept(room=self._room - len(self._connections)):
            self._connections.add(connection)
            self._selector.register(
                connection.fileno(), selectors.EVENT_READ, partial(self._hear, connection)
            )
        if self._listener.starved:
            self._selector.unregister(self._listener.fileno())  # until one has gone, or the next sweep

    def _accept_again(self) -> None:
        """There may be descriptors again."""
        if self._listener.fileno() not in self._selector.get_map():
            self._selector.register(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def _hear(self, connection: Connection) -> None:
        if connection not in self._connections:
            return  # hung up earlier in this round
        now = time.monotonic()
        broken = False
        try:
            for message in connection.receive():
                if isinstance(message, AttachRequest):
                    session = self._admission.attach(connection, message, now)
                    if session is not None:
                        self._selector.register(
                            session.pidfd, selectors.EVENT_READ, partial(self._exited, session)
                        )
                else:
                    self._admission.chunks(connection, message)
        except Exception:
            broken = True
            log.exception("a message on the attach socket failed unexpectedly; checking the core")
            self._unexpected()
        if broken or connection.closed:
            self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        """The connection has ended. If its session has not, the session is in doubt from now on."""
        self._connections.discard(connection)
        self._selector.unregister(connection.fileno())
        session = connection.tag
        connection.close()
        self._accept_again()
        if isinstance(session, Session) and not self._stopping:
            session.connection = None
            if session.routing is None or self._state.pool.cache.unused(session.sid):
                # No lease, and no copy under one, was ever begun with it: it never said hello, or gave up
                # waiting for the answer. It may attach again at once.
                self._state.leave(session, True, time.monotonic())
            else:
                self._state.doubt(session)
                self._probe(session)

    def _pool_changed(self) -> None:
        """The pool was formatted: tell newcomers its id, and watch the child that reserves it."""
        if self._watched_memory >= 0:
            self._selector.unregister(self._watched_memory)
            self._watched_memory = -1
        pool = self._state.formatted
        self._listener.greeting = Greeting(b"" if pool is None else pool.pool_id, self._state.server_gen)
        if pool is not None and pool.memory.fileno() >= 0:
            self._watched_memory = pool.memory.fileno()
            self._selector.register(self._watched_memory, selectors.EVENT_READ, self._reserved)

    def _reserved(self) -> None:
        """The reserving child reports: new frames go to the core, new chunks to those who wait."""
        pool = self._state.formatted
        if pool is None or self._watched_memory < 0:
            return  # closed earlier in this round, for another geometry
        rose = pool.step()
        now = time.monotonic()
        if pool.memory.finished or now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            log.info(
                "pool: %s of %s reserved",
                format_size(pool.memory.reserved_bytes),
                format_size(pool.shape.pool_bytes),
            )
        if rose:
            for session in self._state.sessions:
                if session.connection is not None:
                    session.connection.send_chunks(pool.memory.chunks)
            if pool.memory.error:
                log.error("the pool stays at %d frames: %s", pool.memory.frames, pool.memory.error)
        if pool.memory.finished:
            self._selector.unregister(self._watched_memory)
            self._watched_memory = -1

    # --- who lives ---

    def _exited(self, session: Session) -> None:
        """The session's process has ended. Its files may still be open, in a forked child too (R20, R21)."""
        if self._state.sessions.get(session.sid) is session:  # else it was ended earlier in this round
            self._unwatch(session)
            self._state.doubt(session)
            self._probe(session)

    def _probe(self, session: Session) -> None:
        if self._locks.probe(session.sid, session.pidfd) is Liveness.DEAD:
            self._state.bury(session, time.monotonic())
        else:
            self._next_sweep = min(self._next_sweep, time.monotonic() + DOUBT_S)

    def _unwatch(self, session: Session) -> None:
        """Its pidfd is watched no more."""
        if session.pidfd in self._selector.get_map():
            self._selector.unregister(session.pidfd)

    def _sweep(self) -> float:
        """What is due from time to time; seconds until the next."""
        self._state.counters.sweeps += 1
        for session in self._state.sessions.doubted():
            self._probe(session)
        for connection in list(self._connections):
            if connection.tag is None and connection.since + STRANGER_S < time.monotonic():
                self._hang_up(connection)
        self._accept_again()
        pool = self._state.formatted
        if pool is not None:
            pool.tables.beat(time.monotonic_ns())
            pool.cache.check(CHECK_NODES)
        # Young garbage only: a full collection, which `kvtier serve` turns off, stops the loop for O(nodes).
        gc.collect(1)
        if self._control.ended(time.monotonic()):
            self._stopping = True
        return DOUBT_S if self._state.draining or self._state.sessions.doubted() else SWEEP_S


@contextmanager
def _said_plainly(run_dir: str | Path) -> Iterator[None]:
    """What the host refuses, a full disk for one, as a message for its operator."""
    try:
        yield
    except (OSError, zmq.ZMQError) as error:
        raise PreflightError(
            f"cannot start in {run_dir}: {error.strerror or error}; put that right, or give another --run-dir"
        ) from error


def _raise_open_files() -> int:
    """The limit. Many hosts start processes with 1,024 descriptors; that is raised as far as they allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft
