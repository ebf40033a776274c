"""CacheClient: one session with the sidecar, as an engine's planner or as one of its movers.

Attaches over the Unix socket, maps what it is given, and speaks the messages of `wire` over a DEALER. The
owner (the first thread that calls) makes every call; a thread of its own attaches again when the server has
gone, and hands over what it made. Imports zmq, numpy, `shm`, `wire` and the ground floor; no torch.

Always true: no call waits longer than its bound, whatever the server does; every request that was posted gets
exactly one reply from `poll`, real or with status AWAY; a begin that was given up is undone by an abort (R10);
an end of a lease that was posted is sent before anything else while its session lives.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import KVTierError
from kvtier.layout import KVLayout
from kvtier.shm.region import PoolView
from kvtier.wire.messages import Body, End, Ended, LoadChain, LoadGrant, Reply, StoreChain, StoreGrant

DEFAULT_TIMEOUT_S = 0.05


class CacheClient:
    """One session, and the next one when the server has gone. Not thread-safe: it has one owner thread.

    `group`: the same text for all sessions of one start of one engine (R2). `ranks`: movers of the group;
    `rank`: this mover's, 0 for the planner. `timeout_s`: how long a call waits for its reply.
    `attach_timeout_s`: how long the constructor waits for the first attempt to attach; when it fails
    (no server, another geometry), the client is there all the same, answers AWAY, and goes on trying.
    `manual_release`: after the server has gone, the old pool stays mapped and nothing is attached until
    `release()` is called: for a mover, whose copies may still run (R24).
    """

    attached: bool
    """There is a session now, as far as is known."""
    attachment_no: int
    """Rises by one with each attach; 0 before the first. Leases of older attachments are gone."""
    complete: bool
    """All movers of the group are attached (as last heard): leases are granted (R2)."""
    lost: bool
    """The server has gone and the old pool is still mapped; `release()` is awaited (manual_release)."""
    sid: int
    """This session's id, 0 when not attached. A mover names its planner's sid in `quiet`."""
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
    ) -> None:
        raise NotImplementedError

    # --- asynchronous: post now, poll later ---

    def post(self, body: Body, timeout_s: float | None = None) -> int | None:
        """Send `body`; its rid, or None (nothing was sent, nothing will come: away, or 64 unanswered).

        Never blocks. `timeout_s`: when no reply has come by then, `poll` gives one with status AWAY and a begin
        is aborted (R10); None = the client's own. Finish, abort and quiet have no deadline: they are kept and
        sent in order for as long as the session lives, also when the server stands still for a while.
        """
        raise NotImplementedError

    def poll(self) -> list[Reply]:
        """Replies to posted requests that have come since; never blocks. Also notices that the server has gone
        (then every unanswered request gets a reply with status AWAY), takes over a new attachment, and maps
        chunks that were announced."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """Block until `poll` may have something new, at most `timeout_s`; True when it may."""
        raise NotImplementedError

    def next_number(self) -> int:
        """A lease number, above all that this client has used."""
        raise NotImplementedError

    # --- synchronous: one message and its reply ---

    def call(self, body: Body, timeout_s: float | None = None) -> Reply:
        """Send `body` and wait for its reply, at most `timeout_s`. Status AWAY when gone, late or full; a begin
        that came late is undone (R10). Replies to other requests that come meanwhile are kept for `poll`."""
        raise NotImplementedError

    def lookup(self, ns: bytes, keys: bytes, timeout_s: float | None = None) -> Reply:
        """Body `LookupReply` when status is OK."""
        raise NotImplementedError

    def begin_load(
        self, chains: Sequence[LoadChain], timeout_s: float | None = None
    ) -> tuple[LoadGrant, ...]:
        """One grant for each chain; all AWAY when no answer came in time."""
        raise NotImplementedError

    def begin_store(
        self, chains: Sequence[StoreChain], timeout_s: float | None = None
    ) -> tuple[StoreGrant, ...]:
        """One grant for each chain; all AWAY when no answer came in time."""
        raise NotImplementedError

    def finish(self, ends: Sequence[End], timeout_s: float | None = None) -> tuple[Ended, ...]:
        """One answer for each end; all AWAY when no answer came in time (the message is sent all the same)."""
        raise NotImplementedError

    def abort(self, ends: Sequence[End], timeout_s: float | None = None) -> tuple[Ended, ...]:
        """As `finish`."""
        raise NotImplementedError

    def quiet(
        self, planner_sid: int, numbers: Sequence[int], timeout_s: float | None = None
    ) -> tuple[Ended, ...]:
        """As `finish`; a mover says that it touches these leases no more (R9)."""
        raise NotImplementedError

    def flush(self, ns: bytes = b"", timeout_s: float | None = None) -> Reply:
        """Body `FlushReply`; ns = b"": all namespaces."""
        raise NotImplementedError

    def stats(self, timeout_s: float | None = None) -> Reply:
        """Body `StatsReply`."""
        raise NotImplementedError

    # --- the pool ---

    @property
    def pool(self) -> PoolView:
        """The mapped pool; UsageError when nothing is attached."""
        raise NotImplementedError

    def gens(self, frames: npt.NDArray[np.int32]) -> npt.NDArray[np.uint32]:
        """Generations of `frames` as the table has them now, to be compared with the grant's (R31)."""
        raise NotImplementedError

    # --- the ends ---

    @property
    def refused(self) -> KVTierError | None:
        """Why the server refused the last attempt to attach (GeometryError and so on); None when it did not."""
        raise NotImplementedError

    def raise_if_refused(self) -> None:
        """Raise `refused` if there is one."""
        raise NotImplementedError

    def release(self) -> None:
        """The owner's copies on the lost pool are quiet: unmap it, and attach again (manual_release, R24)."""
        raise NotImplementedError

    def detach(self, quiet: bool = True, timeout_s: float | None = None) -> Reply:
        """End the session now. `quiet`: the last event on every lease has fired; with False its frames wait for
        this process's death (R11). The client does not attach again."""
        raise NotImplementedError

    def close(self, quiet: bool = True, timeout_s: float | None = None) -> None:
        """Detach, and let go of everything. Bounded; can be called twice."""
        raise NotImplementedError
