"""CacheClient: one session with the sidecar, as an engine's planner or as one of its movers.

Attaches over the Unix socket, maps what it is given, and speaks the messages of `wire` over a DEALER. The
owner (the first thread that calls) makes every call; a thread of its own attaches again when the server has
gone, and hands over what it made. Imports zmq, numpy, `shm`, `wire` and the ground floor; no torch.

Always true: no call waits longer than its bound, whatever the server does; every request that was posted
gets exactly one reply from `poll`, real or with status AWAY; a begin that was given up is undone by an
abort (R10); an end of a lease that was posted is sent before anything else while its session lives.

Longer than 300 lines: the two halves, posting and attaching again, share the state that must stay consistent.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq

from kvtier.client.attacher import MAX_UNANSWERED, Attacher, Link
from kvtier.errors import KVTierError, ProtocolError, Status, UsageError, WrongThreadError
from kvtier.layout import KVLayout
from kvtier.shm.attach import Attachment, AttachRequest
from kvtier.shm.region import PoolView
from kvtier.shm.rundir import boot_id
from kvtier.wire.codec import decode_reply, encode_request
from kvtier.wire.messages import (
    Abort,
    BeginLoad,
    BeginStore,
    Body,
    Detach,
    End,
    Ended,
    EndReply,
    Finish,
    Flush,
    Hello,
    HelloReply,
    LoadChain,
    LoadGrant,
    LoadReply,
    Lookup,
    Quiet,
    Reply,
    Request,
    Stats,
    StoreChain,
    StoreGrant,
    StoreReply,
)

DEFAULT_TIMEOUT_S = 0.05
MAX_OWED = 65_536
"""Posted ends that wait to be sent: as many as there can be leases."""
_SLICE_S = 0.05
_CLOSE_S = 1.0
_NEVER = float("inf")
_NOBLOCK = int(zmq.NOBLOCK)
_ENDS = (Finish, Abort, Quiet)

_KEPT: list[Attachment] = []
"""Attachments closed while not quiet: lock and mappings stay until this process ends (R11)."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """A request without its reply."""

    body: Body
    deadline: float
    """time.monotonic() in seconds after which it is given up."""
    silent: bool = False
    """Nobody waits for the reply (any more): it is dropped when it comes."""


class CacheClient:
    """One session, and the next one when the server has gone. Not thread-safe: it has one owner thread.

    `group`: the same text for all sessions of one start of one engine (R2). `ranks`: movers of the group;
    `rank`: this mover's, 0 for the planner. `timeout_s`: how long a call waits for its reply.
    `attach_timeout_s`: how long the constructor waits for the first attempt to attach; when it fails
    (no server, another geometry), the client is there all the same, answers AWAY, and goes on trying.
    `manual_release`: after the server has gone, the old pool stays mapped and nothing is attached until
    `release()` is called: for a mover, whose copies may still run (R24). `writable`: map the pool for writing
    (default: movers do). In a forked child the object is inert (R21).
    """

    attachment_no: int
    """Rises by one with each attach; 0 before the first. Leases of older attachments are gone."""
    complete: bool
    """All movers of the group are attached (as last heard): leases are granted (R2)."""
    server_gen: int
    pool_id: bytes
    """The pool's random id; b"" before the first attach."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        layout: KVLayout,
        group: str,
        ranks: int = 1,
        role: str = "planner",
        rank: int = 0,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attach_timeout_s: float = 5.0,
        manual_release: bool = False,
        writable: bool | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.layout = layout
        self.timeout_s = timeout_s
        self.attachment_no = 0
        self.complete = False
        self.server_gen = 0
        self.pool_id = b""
        self._manual_release = manual_release
        self._pid = os.getpid()
        self._owner: int | None = None
        self._closed = False
        self._number = 0
        self._rid = 0
        self._link: Link | None = None
        self._old: Attachment | None = None  # of the server that went, until release()
        self._open: dict[int, _Open] = {}
        self._owed: deque[tuple[int, bytes]] = deque()  # ends not sent yet; their rids are in _open too
        self._replies: list[Reply] = []
        self._next_deadline = _NEVER
        self._ask_again = _NEVER  # when to ask whether the group is complete
        self._watch = select.poll()  # the attach socket, and the attaching thread's bell
        self._attacher = Attacher(
            self.run_dir,
            AttachRequest(
                group=group,
                role=role,
                rank=rank,
                ranks=ranks,
                geometry=layout.geometry,
                fingerprint=layout.fingerprint,
                format=layout.format,
                boot_id=boot_id(),
            ),
            writable,
        )
        self._watch.register(self._attacher.bell, select.POLLIN)
        self._attacher.start()
        self._attacher.first_attempt.wait(attach_timeout_s)
        self._take_over()

    @property
    def attached(self) -> bool:
        """There is a session now, as far as is known."""
        return self._link is not None and os.getpid() == self._pid

    @property
    def lost(self) -> bool:
        """The server has gone and the old pool is still mapped; `release()` is awaited (manual_release)."""
        return self._old is not None

    @property
    def sid(self) -> int:
        """This session's id, 0 when not attached. A mover names its planner's sid in `quiet`."""
        return self._link.attachment.sid if self._link is not None else 0

    # --- asynchronous: post now, poll later ---

    def post(self, body: Body, timeout_s: float | None = None) -> int | None:
        """Send `body`; its rid, or None (nothing was sent, nothing will come: away, or 64 unanswered).

        Never blocks. `timeout_s`: when no reply has come by then, `poll` gives one with status AWAY and a
        begin is aborted (R10); None = the client's own. Finish, abort and quiet have no deadline: they
        are kept and sent in order for as long as the session lives, also when the server stands still for
        a while. UsageError when the body is beyond a message's limits.
        """
        if not self._enter():
            return None
        return self._post(body, time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s))

    def poll(self) -> list[Reply]:
        """Replies to posted requests that have come since; never blocks.

        Also notices that the server has gone (then every unanswered request gets a reply with status AWAY),
        takes over a new attachment, and maps chunks that were announced.
        """
        if not self._enter():
            return []
        self._work(time.monotonic())
        replies, self._replies = self._replies, []
        return replies

    def wait(self, timeout_s: float, fd: int | None = None) -> bool:
        """Block until `poll` may have something new, at most `timeout_s`; True when it may.

        Also returns when `fd` (of the caller's own) is readable.
        """
        if not self._enter():
            return False
        if self._replies:
            return True
        now = time.monotonic()
        end = now + timeout_s
        until = min(end, self._next_deadline, self._ask_again)
        watch = select.poll()
        watch.register(self._attacher.bell, select.POLLIN)
        if fd is not None:
            watch.register(fd, select.POLLIN)
        link = self._link
        if link is not None:
            watch.register(link.attachment.fileno(), select.POLLIN)
            if self._open:
                watch.register(link.fd, select.POLLIN)
            else:
                link = None
        while True:
            # The socket's own descriptor is edge-triggered: only EVENTS tells what is there.
            if link is not None and link.readable():
                return True
            ready = watch.poll(max(0.0, (until - now) * 1000))
            if any(link is None or number != link.fd for number, _ in ready):
                return True
            now = time.monotonic()
            if now >= until:
                return until < end or (link is not None and link.readable())

    def next_number(self) -> int:
        """A lease number, above all that this client has used."""
        self._number += 1
        return self._number

    # --- synchronous: one message and its reply ---

    def call(self, body: Body, timeout_s: float | None = None) -> Reply:
        """Send `body` and wait for its reply, at most `timeout_s`. Status AWAY when gone, late or full; a
        begin that came late is undone (R10). Replies to other requests that come meanwhile are kept for
        `poll`."""
        if not self._enter():
            return self._away(0, "not attached")
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        rid = self._post(body, deadline)
        if rid is None:
            return self._away(
                0, "no server answers" if self._link is None else "too many requests unanswered"
            )
        while True:
            link = self._link
            mine = self._taken(rid)
            if mine is not None:
                return mine
            left = deadline - time.monotonic()
            if left <= 0 or link is None:
                break
            wait_ms = ceil(min(left, _SLICE_S) * 1000)
            if wait_ms != link.wait_ms:
                link.socket.set(zmq.RCVTIMEO, wait_ms)
                link.wait_ms = wait_ms
            try:
                data = link.socket.recv()
            except zmq.Again:
                self._work(time.monotonic())
            else:
                self._receive(link, data)
        self._work(time.monotonic())
        mine = self._taken(rid)
        if mine is not None:
            return mine
        self._give_up(rid)
        return self._away(rid, "no answer in time")

    def lookup(self, ns: bytes, keys: bytes, timeout_s: float | None = None) -> Reply:
        """Body `LookupReply` when status is OK."""
        return self.call(Lookup(ns, keys), timeout_s)

    def begin_load(
        self, chains: Sequence[LoadChain], timeout_s: float | None = None
    ) -> tuple[LoadGrant, ...]:
        """One grant for each chain; all AWAY when no answer came in time."""
        if not chains:
            return ()
        reply = self.call(BeginLoad(tuple(chains)), timeout_s)
        if isinstance(reply.body, LoadReply) and len(reply.body.grants) == len(chains):
            return reply.body.grants
        return tuple(LoadGrant(chain.number, reply.status, text=reply.text) for chain in chains)

    def begin_store(
        self, chains: Sequence[StoreChain], timeout_s: float | None = None
    ) -> tuple[StoreGrant, ...]:
        """One grant for each chain; all AWAY when no answer came in time."""
        if not chains:
            return ()
        reply = self.call(BeginStore(tuple(chains)), timeout_s)
        if isinstance(reply.body, StoreReply) and len(reply.body.grants) == len(chains):
            return reply.body.grants
        return tuple(StoreGrant(chain.number, reply.status, text=reply.text) for chain in chains)

    def finish(self, ends: Sequence[End], timeout_s: float | None = None) -> tuple[Ended, ...]:
        """One answer for each end; all AWAY when no answer came in time (the message is sent all the
        same)."""
        return self._end(Finish(tuple(ends)), [end.number for end in ends], timeout_s)

    def abort(self, ends: Sequence[End], timeout_s: float | None = None) -> tuple[Ended, ...]:
        """As `finish`."""
        return self._end(Abort(tuple(ends)), [end.number for end in ends], timeout_s)

    def quiet(
        self, planner_sid: int, numbers: Sequence[int], timeout_s: float | None = None
    ) -> tuple[Ended, ...]:
        """As `finish`; a mover says that it touches these leases no more (R9)."""
        return self._end(Quiet(planner_sid, tuple(numbers)), numbers, timeout_s)

    def _end(self, body: Body, numbers: Sequence[int], timeout_s: float | None) -> tuple[Ended, ...]:
        if not numbers:
            return ()
        reply = self.call(body, timeout_s)
        if isinstance(reply.body, EndReply) and len(reply.body.ended) == len(numbers):
            return reply.body.ended
        return tuple(Ended(number, reply.status, text=reply.text) for number in numbers)

    def flush(self, ns: bytes = b"", timeout_s: float | None = None) -> Reply:
        """Body `FlushReply`; ns = b"": all namespaces."""
        return self.call(Flush(ns), timeout_s)

    def stats(self, timeout_s: float | None = None) -> Reply:
        """Body `StatsReply`."""
        return self.call(Stats(), timeout_s)

    # --- the pool ---

    @property
    def pool(self) -> PoolView:
        """The mapped pool (the old one while `lost`); UsageError when there is none."""
        return self._attachment().pool

    def gens(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """Generations of `frames` as the table has them now, to be compared with the grant's (R31)."""
        return self._attachment().tables.gens(frames)

    def _attachment(self) -> Attachment:
        attachment = self._link.attachment if self._link is not None else self._old
        if attachment is None or os.getpid() != self._pid:
            raise UsageError("no pool is mapped: the client is not attached")
        return attachment

    # --- the ends ---

    @property
    def refused(self) -> KVTierError | None:
        """Why the server refused the last attempt to attach (GeometryError and so on); None: it did not."""
        return self._attacher.refused

    def raise_if_refused(self) -> None:
        """Raise `refused` if there is one."""
        if self._attacher.refused is not None:
            raise self._attacher.refused

    def release(self) -> None:
        """The owner's copies on the lost pool are quiet: unmap it, and attach again (manual_release, R24)."""
        if self._enter() and self._old is not None:
            self._old.close()
            self._old = None
            self._attacher.again()

    def detach(self, quiet: bool = True, timeout_s: float | None = None) -> Reply:
        """End the session now; the client does not attach again.

        `quiet`: the last event on every lease has fired; with False its frames wait for this process's death
        (R11).
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        reply = self.call(Detach(quiet), timeout_s)
        if not self._closed and os.getpid() == self._pid:
            self._let_go(deadline)
        return reply

    def close(self, quiet: bool = True, timeout_s: float | None = None) -> None:
        """Detach, and let go of everything, in `timeout_s` (default: 1 s). Can be called twice, and from any
        thread once the owner is done. With quiet=False the mappings stay as they are until this process ends.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._owner = threading.get_ident()
        timeout_s = _CLOSE_S if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        if self._link is not None:
            self._work(time.monotonic())
            self.call(Detach(quiet), timeout_s)
        self._let_go(deadline, keep=not quiet)

    def __enter__(self) -> CacheClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _let_go(self, deadline: float, keep: bool = False) -> None:
        self._closed = True
        link, self._link = self._link, None
        self._answer_all("closed")
        if link is not None:
            link.socket.close(0)
        for attachment in (link.attachment if link is not None else None, self._old):
            if attachment is not None:
                if keep:
                    _KEPT.append(attachment)
                else:
                    attachment.close()
        self._old = None
        self._attacher.stop(deadline - time.monotonic())

    # --- within ---

    def _enter(self) -> bool:
        """Checks who calls; False when there is nothing to do (forked child, closed)."""
        if os.getpid() != self._pid or self._closed:
            return False
        me = threading.get_ident()
        if self._owner != me:
            if self._owner is not None:
                raise WrongThreadError("this CacheClient belongs to another thread: the first that called it")
            self._owner = me
        if self._link is None:
            self._take_over()
        return True

    def _take_over(self) -> None:
        """Take what the attaching thread has made, if anything."""
        link = self._attacher.take()
        if link is None:
            return
        self._link = link
        self.attachment_no += 1
        self.complete = link.complete
        self.server_gen = link.attachment.server_gen
        self.pool_id = link.attachment.pool_id
        self._ask_again = _NEVER if link.complete else time.monotonic() + _SLICE_S
        self._watch.register(link.attachment.fileno(), select.POLLIN)

    def _post(self, body: Body, deadline: float, silent: bool = False) -> int | None:
        link = self._link
        if link is None:
            return None
        is_end = isinstance(body, _ENDS)
        if self._owed:
            self._send_owed(link)
        if not is_end and (self._owed or len(self._open) >= MAX_UNANSWERED):
            return None
        if is_end and len(self._owed) >= MAX_OWED:
            return None
        rid = self._rid + 1
        expires = 0 if is_end or deadline == _NEVER or isinstance(body, Detach) else int(deadline * 1e9)
        try:
            data = encode_request(Request(rid, self.server_gen, link.attachment.sid, body, expires))
        except ProtocolError as error:
            raise UsageError(str(error)) from None
        if is_end:
            self._owed.append((rid, data))
            deadline = _NEVER
        else:
            try:
                link.socket.send(data, _NOBLOCK)
            except zmq.Again:
                return None
        self._rid = rid
        self._open[rid] = _Open(body, deadline, silent)
        self._next_deadline = min(self._next_deadline, deadline)
        if is_end:
            self._send_owed(link)
        return rid

    def _send_owed(self, link: Link) -> None:
        while self._owed and len(self._open) - len(self._owed) < MAX_UNANSWERED:
            try:
                link.socket.send(self._owed[0][1], _NOBLOCK)
            except zmq.Again:
                return
            self._owed.popleft()

    def _work(self, now: float) -> None:
        """All that is due: replies, the server's end, chunks, ends that wait, deadlines. Never blocks."""
        link = self._link
        if link is None:
            return
        while self._open and link.readable():  # with nothing unanswered there is nothing to come
            self._receive(link, link.socket.recv(_NOBLOCK))
            if self._link is not link:
                return
        if self._watch.poll(0):
            if link.attachment.closed():
                self._lose("the server has gone")
                return
            link.attachment.poll_chunks()
        if self._owed:
            self._send_owed(link)
        if now >= self._next_deadline:
            for rid in [rid for rid, entry in self._open.items() if now >= entry.deadline]:
                if not self._open[rid].silent:
                    self._replies.append(self._away(rid, "no answer in time"))
                self._give_up(rid)
            self._next_deadline = min((entry.deadline for entry in self._open.values()), default=_NEVER)
        if now >= self._ask_again:
            self._ask_again = _NEVER if self._post(Hello(), _NEVER, silent=True) else now + _SLICE_S

    def _receive(self, link: Link, data: bytes) -> None:
        try:
            reply = decode_reply(data)
        except ProtocolError as error:
            log.warning("the server of %s answers what is no reply (%s): letting go", self.run_dir, error)
            self._lose("the server answers what is no reply")
            return
        entry = self._open.pop(reply.rid, None)
        if entry is None:
            return
        if isinstance(reply.body, HelloReply):
            self.complete = reply.body.complete
            self._ask_again = _NEVER if self.complete else time.monotonic() + _SLICE_S
        if not entry.silent:
            self._replies.append(reply)
        if reply.status is Status.GONE:
            self._lose(reply.text or "the session is gone")

    def _taken(self, rid: int) -> Reply | None:
        """The reply to `rid`, taken out of those for `poll`; None while there is none."""
        for at, reply in enumerate(self._replies):
            if reply.rid == rid:
                return self._replies.pop(at)
        return None

    def _give_up(self, rid: int) -> None:
        """Nobody waits for `rid` any more. It still counts as unanswered; a begin is undone (R10)."""
        entry = self._open.get(rid)
        if entry is None or entry.silent:
            return
        entry.silent = True
        entry.deadline = _NEVER
        if isinstance(entry.body, (BeginLoad, BeginStore)):
            # No mover has been told of these frames: all are quiet.
            everyone = tuple(range(self._attacher.request.ranks))
            ends = tuple(End(chain.number, everyone) for chain in entry.body.chains)
            self._post(Abort(ends), _NEVER, silent=True)

    def _lose(self, text: str) -> None:
        """The session is over: answer what is unanswered, and attach again (or wait for `release`)."""
        link = self._link
        if link is None:
            return
        role = self._attacher.request.role
        log.warning("kvtier %s of %s lost its sidecar: %s; going on without it", role, self.run_dir, text)
        self._link = None
        self._watch.unregister(link.attachment.fileno())
        link.socket.close(0)
        self._answer_all(text)
        if self._manual_release:
            self._old = link.attachment
        else:
            link.attachment.close()
            self._attacher.again()

    def _answer_all(self, text: str) -> None:
        self._replies += [self._away(rid, text) for rid, entry in self._open.items() if not entry.silent]
        self._open.clear()
        self._owed.clear()
        self._next_deadline = self._ask_again = _NEVER
        self.complete = False

    def _away(self, rid: int, text: str) -> Reply:
        return Reply(rid, self.server_gen, Status.AWAY, text)
