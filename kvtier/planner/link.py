"""The planner's end of the messages: what was posted and who waits for the reply, and the ends of leases.

Always true: every handler is called exactly once, from `poll`; ends go out before a begin that is posted
after them, so that what they free counts for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvtier.client import CacheClient
from kvtier.planner.counters import Counters
from kvtier.wire.messages import Abort, BeginLoad, BeginStore, End, Ended, EndReply, Finish, Lookup, Reply

log = logging.getLogger("kvtier")

MAX_ENDS = 1024
"""Ends in one message: the codec takes no longer lists."""

Handler = Callable[[Reply], None]
OnEnded = Callable[[Ended], None]


class Link:
    """Posts through `client` and hands each reply to its handler; `lost` is called after each new attach."""

    def __init__(
        self, client: CacheClient, counters: Counters, clock: Callable[[], float], lost: Callable[[], None]
    ) -> None:
        self._client = client
        self._counters = counters
        self._lost = lost
        self._handlers: dict[int, Handler] = {}
        self._finishes: list[End] = []
        self._aborts: list[End] = []
        self._on_ended: dict[int, OnEnded] = {}
        self._open_ends = 0
        self.now = clock
        self.attachment = client.attachment_no

    def post(self, body: BeginLoad | BeginStore | Lookup, handler: Handler) -> bool:
        """Post a question; False when there is nobody to post to, and then `handler` is not called."""
        self.flush_ends()
        return self._post(body, handler)

    def finish(self, number: int, quiet: tuple[int, ...], on_ended: OnEnded | None = None) -> None:
        """The lease has done what it was for. Goes out with the next begin or `flush_ends`."""
        self._finishes.append(End(number, quiet))
        if on_ended is not None:
            self._on_ended[number] = on_ended

    def abort(self, number: int, quiet: tuple[int, ...]) -> None:
        """The lease, or the begin that may still make it, is not wanted."""
        self._aborts.append(End(number, quiet))

    def flush_ends(self) -> None:
        """Post what has ended. Without a session there is nothing to end: the sidecar has done so itself."""
        for ends, kind in ((self._finishes, Finish), (self._aborts, Abort)):
            while ends:
                some, ends[:] = tuple(ends[:MAX_ENDS]), ends[MAX_ENDS:]
                if self._post(kind(some), self._ended):
                    self._open_ends += 1
                else:
                    self._counters.add("ends_lost", len(some))
                    for end in some:
                        self._on_ended.pop(end.number, None)

    @property
    def ends_open(self) -> bool:
        """Whether an end is not acknowledged yet."""
        return bool(self._open_ends or self._finishes or self._aborts)

    @property
    def waiting(self) -> bool:
        """Whether a reply is still to come."""
        return bool(self._handlers)

    def poll(self) -> None:
        """Take in the replies that have come; never blocks."""
        for reply in self._client.poll():
            handler = self._handlers.pop(reply.rid, None)
            if handler is not None:
                handler(reply)
        self.notice()

    def notice(self) -> None:
        """If there is a new session, let go of what was of the old one before anything is posted to it."""
        if self._client.attachment_no != self.attachment:
            self.attachment = self._client.attachment_no
            self._finishes.clear()
            self._aborts.clear()
            self._on_ended.clear()
            self._lost()

    def wait(self, timeout_s: float) -> None:
        """Block until a reply may have come, at most `timeout_s`."""
        self._client.wait(timeout_s)

    def _post(self, body: BeginLoad | BeginStore | Lookup | Finish | Abort, handler: Handler) -> bool:
        if not self._client.attached:
            return False
        rid = self._client.post(body)
        if rid is None:
            return False
        self._handlers[rid] = handler
        return True

    def _ended(self, reply: Reply) -> None:
        self._open_ends -= 1
        if not isinstance(reply.body, EndReply):
            if reply.text:
                log.debug("an end of leases was answered with %s: %s", reply.status.name, reply.text)
            return
        for ended in reply.body.ended:
            on_ended = self._on_ended.pop(ended.number, None)
            if on_ended is not None:
                on_ended(ended)
