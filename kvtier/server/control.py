"""What an operator may see and do, carried out on the loop's thread.

Plain values in, plain values out (str, int, dict, list); `server.admin` carries them. Imports `core`, `shm`
and the ground floor. Always true: what was refused has changed nothing; an answer's `ok` and `text` say so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from kvtier.core.results import Holding
from kvtier.keys import NS_BYTES
from kvtier.server.sessions import Session
from kvtier.server.state import State
from kvtier.shm.liveness import SessionLocks, has_ended

LAST_WORD_S = 1.0
"""How long a drain that has ended can still be asked how it ended, before the sidecar does."""
MAX_DRAIN_S = 24 * 3600.0
FORCE_WARNING = (
    "forcing a session out gives its frames to others while its process may still write into them: "
    "then other requests are served wrong KV. Do it only when you know that no process of that engine, "
    "and no child of it, is left on this host; restarting the sidecar is the safe way"
)
"""Said before anything is forced: it breaks the promise that frames come back only by proven death (R20)."""

Answer = dict[str, int | str]

log = logging.getLogger(__name__)


class Control:
    """`stats`: the sidecar's numbers. All methods belong to the loop's thread; `now` is time.monotonic()."""

    def __init__(
        self, state: State, locks: SessionLocks, stats: Callable[[float], dict[str, int | str]]
    ) -> None:
        self._state = state
        self._locks = locks
        self.stats = stats
        self._deadline = 0.0
        self._ended = ""
        self._ended_at = 0.0
        self._left_running = 0

    # -- who is there ----------------------------------------------------------------------------------

    def sessions(self, now: float) -> list[Answer]:
        """One entry for each session, and for each dead one whose frames wait for its group's movers."""
        if self._state.formatted is None:
            return []
        return [self._session(holding, now) for holding in self._state.pool.cache.holdings()]

    def _session(self, holding: Holding, now: float) -> Answer:
        """`state`: attached, doubted (its end is not proven, R20) or dead (its frames wait for movers)."""
        session = self._state.sessions.get(holding.sid)
        state = "dead" if session is None else "doubted" if session.doubted else "attached"
        return {
            "session": f"{holding.sid:016x}",
            "group": holding.group,
            "role": holding.role,
            "rank": holding.rank,
            "ranks": holding.ranks,
            "state": state,
            "pid": 0 if session is None else session.pid,
            "process": "ended" if session is None else self._process(session),
            "lock": "free" if session is None else self._lock(session),
            "age_s": 0 if session is None else int(now - session.since),
            "leases": holding.leases,
            "pages_held": holding.pages,
            "bytes_held": holding.pages * self._state.pool.shape.page_bytes,
            "frames_mapped": holding.mapped,
        }

    def _process(self, session: Session) -> str:
        try:
            return "ended" if has_ended(session.pidfd) else "running"
        except OSError:
            return "unknown"

    def _lock(self, session: Session) -> str:
        """Held by an ended process's lock: a child that it forked lives on (R21)."""
        try:
            return "free" if self._locks.is_free(session.sid) else "held"
        except OSError:
            return "unknown"

    def force_out(self, session_id: str, yes: bool, now: float) -> Answer:
        """End a doubted session as if it were proven dead. Against R20, so only with `yes`."""
        session = self._state.sessions.get(_number(session_id))
        if session is None:
            return _refused(f"there is no session {session_id}: see kvtier sessions")
        if not session.doubted:
            return _refused(
                f"session {session_id} is attached and lives: end its engine; only a doubted session, whose "
                "connection or process has ended without a proof of death, can be forced out"
            )
        if not yes:
            return _refused(FORCE_WARNING)
        (held,) = [one for one in self._state.pool.cache.holdings() if one.sid == session.sid]
        self._state.counters.forced_out += 1
        log.warning("the operator forces session %s of group %s out", session_id, session.group)
        self._state.bury(session, now)
        return {"ok": 1, "text": "", "leases": held.leases, "pages_held": held.pages}

    # -- what is there ---------------------------------------------------------------------------------

    def namespaces(self, now: float) -> list[Answer]:
        """One entry for each namespace that has pages, or has had some."""
        if self._state.formatted is None:
            return []
        return [
            {"namespace": ns.hex(), "pages": pages, "epoch": epoch}
            for ns, pages, epoch in self._state.pool.cache.namespaces()
        ]

    def flush(self, namespace: str, now: float) -> Answer:
        """Forget the pages of one namespace (32 hex digits), or of "all" (R13)."""
        ns = None
        if namespace != "all":
            ns = _bytes(namespace)
            if len(ns) != NS_BYTES:
                return _refused(
                    f"namespace {namespace!r:.100}: expected {2 * NS_BYTES} hex digits "
                    "(Namespace.digest.hex()), or all"
                )
        if self._state.formatted is None:
            return {"ok": 1, "text": "no engine has attached yet", "freed": 0, "doomed": 0, "epoch": 0}
        flushed = self._state.flush(ns, now)
        log.info(
            "the operator flushed %s: %d pages freed, %d doomed", namespace, flushed.freed, flushed.doomed
        )
        return {
            "ok": 1,
            "text": "",
            "freed": flushed.freed,
            "doomed": flushed.doomed,
            "epoch": flushed.epoch,
        }

    # -- draining --------------------------------------------------------------------------------------

    def drain(self, timeout_s: float, now: float) -> Answer:
        """No new leases and attaches from now on; the sidecar ends when no lease runs, or after `timeout_s`.

        Asked again, it sets a new deadline.
        """
        if not math.isfinite(timeout_s) or not 0 <= timeout_s <= MAX_DRAIN_S:
            return _refused(f"timeout {timeout_s:g} s: expected 0 to {MAX_DRAIN_S:g}")
        if self._ended:
            return self.progress(now)
        if not self._state.draining:
            log.warning("draining: no new leases, no attaches; ending in %g s at the latest", timeout_s)
        self._deadline = now + timeout_s
        self._state.drain(True)
        return self.progress(now)

    def undrain(self, now: float) -> Answer:
        """Take `drain` back, if it has not ended."""
        if self._ended:
            return _refused("the drain has ended: the sidecar is ending too")
        if not self._state.draining:
            return _refused("the sidecar is not draining")
        log.warning("draining was taken back: serving as before")
        self._state.drain(False)
        return self.progress(now)

    def progress(self, now: float) -> Answer:
        """How far a drain is. `ended`: "" while it goes on, then "idle" (nothing ran) or "deadline"."""
        draining = self._state.draining
        return {
            "ok": 1,
            "text": "",
            "draining": int(draining),
            "ended": self._ended,
            "leases": self._left_running if self._ended else self._leases(),
            "sessions": len(self._state.sessions),
            "seconds_left": max(0, math.ceil(round(self._deadline - now, 3)))
            if draining and not self._ended
            else 0,
        }

    def ended(self, now: float) -> bool:
        """Is a drain over, and has been for long enough to be asked about? For the loop, when it sweeps."""
        if not self._state.draining:
            return False
        if not self._ended:
            self._left_running = self._leases()
            if self._left_running and now < self._deadline:
                return False
            self._ended, self._ended_at = ("deadline" if self._left_running else "idle"), now
            log.warning("drained: %d leases were still running", self._left_running)
        return now >= self._ended_at + LAST_WORD_S

    def _leases(self) -> int:
        """Leases that run, or wait for their movers to be quiet: all that holds any frame."""
        pool = self._state.formatted
        return 0 if pool is None else pool.cache.stats()["leases"]


def _refused(text: str) -> Answer:
    return {"ok": 0, "text": text}


def _number(session_id: str) -> int:
    """The number of a session's id in hex; 0, which is no session's, for anything else."""
    return int.from_bytes(_bytes(session_id), "big") if len(session_id) == 16 else 0


def _bytes(text: str) -> bytes:
    """The bytes of a text in hex; none for anything else."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
