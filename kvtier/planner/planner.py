"""Planner: decides for one engine what is loaded and what is stored, and holds the leases.

May import the client, `wire` and the ground floor; never torch, never zmq. One object belongs to one engine
and one thread. Always true: no call waits longer than it was told to; whatever the sidecar does is a result,
never an exception; a lease is given back once, and only when no rank copies under it; every task comes back
from `update` once.

Longer than 300 lines: the engine's whole face is here, with its checks; what decides is in the other files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.client import CacheClient
from kvtier.config import Options
from kvtier.errors import UsageError, WrongThreadError
from kvtier.keys import KEY_BYTES, PageChain
from kvtier.planner.copies import Copies, Job
from kvtier.planner.counters import Counters
from kvtier.planner.link import Link
from kvtier.planner.lookups import Lookups
from kvtier.planner.records import Record, Records
from kvtier.planner.stores import Stores
from kvtier.tasks import Hit, Int32, LoadTask, OffloadTask, Task, TaskState
from kvtier.wire.arrays import Arrays
from kvtier.wire.messages import NO_FRAMES, Ended
from kvtier.wire.plan import Cancel, Command, Progress, encode

DEFAULTS = Options()
MAX_TASK_UNITS = 1 << 22
"""Units of one offload, so that a step's plan stays far below `wire.plan.MAX_WORDS`; the rest comes next
time.
"""

_NAMES = (
    *("lookups", "tokens_requested", "tokens_hit", "tokens_loaded", "tokens_load_failed", "loads"),
    *("offloads", "pages_offered", "pages_stored", "pages_known", "pages_failed", "pages_dropped"),
    *("stores_superseded", "protocol_violations", "attachments_lost", "ends_lost"),
)


class Planner:
    """One per engine. Calls raise only for the caller's mistakes, and before anything has changed.

    `client`: attached (or trying to attach) as the group's planner; it stays the caller's. `ranks`: movers
    that work on every plan. `units`: how many units the engine has, where units are to be checked against
    that. The thread that makes the first call owns it; WrongThreadError for others, UsageError once closed.
    """

    def __init__(
        self,
        client: CacheClient,
        ranks: int = 1,
        options: Options = DEFAULTS,
        *,
        units: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if ranks < 1:
            raise UsageError(f"ranks={ranks}: expected 1 or more")
        self._client = client
        self._options = options
        self._units = units
        self._page_tokens = client.layout.page_tokens
        self._unit_tokens = client.layout.unit_tokens
        self._page_units = self._page_tokens // self._unit_tokens
        self._quiet = tuple(range(ranks))
        self._records = Records()
        self._counters = Counters()
        self._link = Link(client, self._counters, clock, self._reattached)
        self._lookups = Lookups(client, self._link, options, self._counters, self._quiet)
        self._stores = Stores(client, self._link, self._lookups, options, self._counters, self._quiet)
        self._copies = Copies(ranks)
        self._arrays = Arrays()
        self._loads: list[Job] = []
        self._ended: list[Job] = []
        self._cancels: list[int] = []
        self._last_task = 0
        self._live = 0
        self._inflight_bytes = 0
        self._owner: int | None = None
        self._closed = False

    # --- look-ups ---

    def ask(self, request: str, chain: PageChain) -> None:
        """Send the look-up of a request that has arrived; waits for nothing, may do nothing.

        The answer holds a lease until `lookup` and `load`, `cancel` or `forget`: ask only for what is going
        to be looked up.
        """
        self._enter()
        self._check_chain(chain)
        self._lookups.ask(self._records.use(request, chain), chain)

    def lookup(
        self, request: str, chain: PageChain, computed: int, wait_s: float = 0.001, limit: int | None = None
    ) -> Hit | None:
        """What the host has of `chain` from token `computed` on; None = not known yet, ask again next step.

        `computed`: tokens that the device has, a multiple of the finest unit. At most `chain.tokens - 1`
        tokens are offered in all (or `limit`, where that is less), at least `Options.min_load_tokens` beyond
        `computed`. Blocks for at most `wait_s`. None is given for `Options.lookup_ms` in all, then it is a
        miss. The hit's lease ends with the request's next `lookup`, `load`, `cancel` or `forget`.
        """
        self._enter()
        self._check_chain(chain)
        if not 0 <= computed <= chain.tokens or computed % self._unit_tokens:
            raise UsageError(
                f"computed={computed}: expected 0 .. {chain.tokens}, a multiple of {self._unit_tokens} tokens"
            )
        if wait_s < 0 or (limit is not None and limit < 0):
            raise UsageError(f"wait_s={wait_s}, limit={limit}: expected zero or more")
        self._link.poll()
        record = self._records.use(request, chain)
        return self._lookups.lookup(record, chain, computed, wait_s, limit)

    # --- tasks ---

    def load(self, hit: Hit, units: npt.ArrayLike) -> LoadTask:
        """Bring the hit to the device: one unit for each finest unit of the hit, in token order. Never
        blocks.

        `units`: integers, copied here. They may hold nothing that others read, from now until the task is
        final. UsageError when the hit is void, or for the wrong number of units.
        """
        self._enter()
        if not isinstance(hit, Hit):
            raise UsageError(f"{hit!r} is no hit: lookup() gives one, or None as long as nothing is known")
        record = self._records.get(hit.request)
        if not hit.tokens or record is None or record.hit is not hit:
            raise UsageError(
                f"{hit} of request {hit.request!r} is void: it brings nothing, or it was loaded, cancelled "
                "or looked up again"
            )
        wanted = self._checked_units(units, hit.tokens // self._unit_tokens)
        first, last = hit.first // self._page_tokens, -(-(hit.first + hit.tokens) // self._page_tokens)
        task = LoadTask(
            self._next_task(), hit.request, wanted, last - first, first=hit.first, tokens=hit.tokens
        )
        job = Job(task, record, (last - first) * self._client.layout.page_bytes)
        job.units, job.first = wanted, hit.first % self._page_tokens
        self._counters.add("loads")
        if record.answer is None:  # the session was lost after the hit was offered
            record.hit, record.outcome = None, None
            job.nbytes = 0
            self._start(job)
            self._conclude(job, TaskState.FAILED, "gone")
            return task
        lease = self._lookups.take(record)
        pages = slice(first - lease.first, last - lease.first)
        job.number, job.attachment = lease.number, lease.attachment
        job.frames, job.gens = lease.frames[pages], lease.gens[pages]
        self._start(job)
        self._loads.append(job)
        return task

    def offload(self, request: str, chain: PageChain, units: npt.ArrayLike, start: int = 0) -> OffloadTask:
        """Store what became whole: `units` hold the KV of tokens from `start` (a page boundary) on. Never
        blocks.

        Takes whole pages from the first that is not stored yet, as far as the write policy and the in-flight
        limit let it, and copies just their units. The frames are asked for by the next `plan`. What was not
        taken (`task.pages` and `task.reason` say so) is taken by a later call.
        """
        self._enter()
        self._check_chain(chain)
        if start < 0 or start % self._page_tokens:
            raise UsageError(f"start={start}: expected a multiple of {self._page_tokens} tokens")
        given = _integers(units)
        record = self._records.use(request, chain)
        first_given = start // self._page_tokens
        begin = max(record.next_page, first_given)
        end = self._stores.storable(record, chain, first_given + len(given) // self._page_units)
        reason = "off" if self._options.write == "off" else ""
        taken = begin
        if end > begin:
            room = self._stores.room(self._inflight_bytes, self._options.max_inflight_bytes)
            reason = self._stores.held_off(record, begin, end)
            taken = begin if reason else min(end, begin + room, begin + MAX_TASK_UNITS // self._page_units)
            reason = reason or ("inflight" if taken < end else "")
        at = (begin - first_given) * self._page_units
        mine = (
            self._checked_units(given[at : at + (taken - begin) * self._page_units])
            if taken > begin
            else NO_FRAMES
        )
        # Nothing can be refused any more: from here on things change.
        task = OffloadTask(self._next_task(), request, mine, taken - begin, reason=reason, start_page=begin)
        if end > begin:
            self._counters.add("offloads")
            self._counters.add("pages_offered", end - begin)
            if end > taken:
                self._counters.add(f"pages_skipped_{reason}", end - taken)
        job = Job(task, record, (taken - begin) * self._client.layout.page_bytes)
        self._start(job)
        if taken > begin:
            job.ns, job.keys = chain.namespace, chain.keys[: taken * KEY_BYTES]
            self._stores.add(job, taken)
        else:
            self._conclude(job, TaskState.DONE, reason)
        return task

    def cancel(self, request: str) -> None:
        """Give up the request's look-ups, hits and what does not copy yet; what copies runs on and comes
        back.
        """
        self._enter()
        for job in self._stores.queued:
            if job.task.request == request:
                self._stores.cancel(job)
        for job in [job for job in self._loads if job.task.request == request]:
            self._loads.remove(job)
            self._link.abort(job.number, self._quiet)
            self._counters.add("tokens_load_failed", getattr(job.task, "tokens", 0))
            job.task.state, job.task.reason = TaskState.CANCELLED, "cancelled"
            self._ended.append(job)
        self._cancels += [job.task.id for job in self._copies.jobs() if job.task.request == request]
        self.forget(request)

    def forget(self, request: str) -> None:
        """The request has ended: its look-ups and hits go, its tasks run on. Its name may be used again."""
        self._enter()
        record = self._records.drop(request)
        if record is not None:
            self._lookups.drop(record)

    # --- steps ---

    def plan(self) -> Int32:
        """What the movers are to begin, for `Mover.apply`; call it every step and hand it on, also when
        empty.
        """
        self._enter()
        self._stores.ask()
        self._link.flush_ends()
        commands: list[Command] = [Cancel(task) for task in self._cancels]
        self._cancels.clear()
        for job in [*self._loads, *self._stores.due]:
            job.task.state = TaskState.COPYING
            commands.append(self._copies.begin(job))
        self._loads.clear()
        self._stores.due.clear()
        return encode(commands, self._client.pool_id, self._arrays)

    def update(self, progress: Sequence[Progress]) -> list[Task]:
        """Take in the progress of each rank and the sidecar's answers; the tasks that became final, by id.

        Never blocks. `progress`: one for each rank, in order.
        """
        self._enter()
        finished = self._copies.finished(progress)
        self._link.poll()
        for job, failure in finished:
            self._copied(job, failure)
        ended = [*self._ended, *self._stores.ended]
        self._ended.clear()
        self._stores.ended.clear()
        for job in ended:
            self._live -= 1
            job.record.live -= 1
            self._inflight_bytes -= job.nbytes
        return sorted((job.task for job in ended), key=lambda task: task.id)

    def poll(self) -> None:
        """Take in the sidecar's answers, without a step; never blocks."""
        self._enter()
        self._link.poll()

    @property
    def copying(self) -> int:
        """Tasks that are with the movers."""
        return len(self._copies)

    @property
    def due(self) -> bool:
        """Whether a step would do something at once: tell of a task, begin a copy, ask for frames."""
        return bool(self._ended or self._stores.ended or self._loads or self._stores.unasked or self._cancels)

    @property
    def waiting(self) -> bool:
        """Whether an answer of the sidecar's is still to come."""
        return self._link.waiting

    def stats(self) -> dict[str, int]:
        """Counters since the start, and what is held now."""
        return self._counters.report(_NAMES) | {
            "held_pages": self._lookups.held,
            "live_tasks": self._live,
            "inflight_bytes": self._inflight_bytes,
            "known_requests": len(self._records),
            "attached": int(self._client.attached),
        }

    # --- the end ---

    def flushed(self, ns: bytes) -> None:
        """The namespace (b"": every one) was flushed through our own client: what was known of it is void."""
        self._enter()
        for record in self._records.all():
            if ns in (b"", record.ns):
                self._lookups.void(record)
                record.next_page, record.refused = 0, None

    def stop(self) -> None:
        """Begin nothing more: look-ups are given back, what is queued is cancelled. `plan` and `update` go
        on.
        """
        self._enter()
        for request in {
            job.task.request for job in [*self._stores.queued, *self._loads, *self._copies.jobs()]
        }:
            self.cancel(request)
        for record in self._records.all():
            self.forget(record.request)

    def close(self, timeout_s: float = 5.0) -> None:
        """Give back what can be given back, within `timeout_s`. The client stays open.

        Leases of copies that are still under way are left to the end of the session (R11): call it when
        `copying` is 0, or close the client without `quiet`.
        """
        if self._closed:
            return
        self.stop()
        deadline = self._link.now() + timeout_s
        self._link.flush_ends()
        while self._link.ends_open and self._client.attached:
            left_s = deadline - self._link.now()
            if left_s <= 0:
                break
            self._link.wait(left_s)
            self._link.poll()
        self._closed = True

    # --- inside ---

    def _enter(self) -> None:
        mine = threading.get_ident()
        if self._owner is None:
            self._owner = mine
        elif self._owner != mine:
            raise WrongThreadError(
                "this planner (or the worker around it) belongs to the thread that called it first, "
                f"{self._owner}; thread {mine} called it now"
            )
        if self._closed:
            raise UsageError("closed: this planner (or the worker around it) takes no more calls")
        self._link.notice()

    def _check_chain(self, chain: PageChain) -> None:
        if chain.page_tokens != self._page_tokens:
            raise UsageError(
                f"a chain of {chain.page_tokens} tokens a page: the layout has {self._page_tokens}"
            )
        if chain.layout != self._client.layout.fingerprint:  # else another layout's KV could be a hit (P6)
            raise UsageError(
                "a chain whose namespace does not carry the layout of these buffers: make it with "
                "layout.namespace(model, ...)"
            )

    def _checked_units(self, units: npt.ArrayLike, count: int | None = None) -> Int32:
        given = _integers(units)
        if count is not None and len(given) != count:
            raise UsageError(f"{len(given)} units: expected {count}, one for each finest unit of the hit")
        limit = self._units if self._units is not None else 1 << 31
        if given.size and (np.minimum.reduce(given) < 0 or np.maximum.reduce(given) >= limit):
            raise UsageError(f"units {given.min()} .. {given.max()}: expected 0 .. {limit - 1}")
        mine = self._arrays.empty(len(given))
        mine[:] = given  # always a copy: the caller's array is the caller's
        return mine

    def _next_task(self) -> int:
        self._last_task += 1
        return self._last_task

    def _start(self, job: Job) -> None:
        self._live += 1
        job.record.live += 1
        self._inflight_bytes += job.nbytes

    def _conclude(self, job: Job, state: TaskState, reason: str) -> None:
        job.task.state, job.task.reason = state, reason
        self._ended.append(job)

    def _copied(self, job: Job, failure: str) -> None:
        """`job` has finished on all ranks; `failure` says why it brought nothing, '' if it did."""
        held = job.attachment == self._link.attachment and self._client.attached
        if failure == "changed":
            self._counters.add("protocol_violations")
        if isinstance(job.task, LoadTask):
            self._counters.add("tokens_load_failed" if failure else "tokens_loaded", job.task.tokens)
            if held and failure:
                self._link.abort(job.number, self._quiet)
            elif held:
                self._link.finish(job.number, self._quiet)
        else:
            if not held and not failure:
                failure = "gone"
            if failure:
                self._counters.add("pages_failed", job.task.pages)
                job.record.next_page = min(job.record.next_page, job.task.start_page)
                if held:
                    self._link.abort(job.number, self._quiet)
            else:
                self._counters.add("pages_stored", job.task.pages)
                record, start = job.record, job.task.start_page
                self._link.finish(job.number, self._quiet, lambda ended: self._stored(record, start, ended))
        self._conclude(job, TaskState.FAILED if failure else TaskState.DONE, failure or job.task.reason)

    def _stored(self, record: Record, start_page: int, ended: Ended) -> None:
        """What the sidecar made of a finished store (R7, R8)."""
        if ended.superseded:
            self._counters.add("stores_superseded", ended.superseded)
        if ended.dropped:
            self._counters.add("pages_dropped", ended.dropped)
            if not ended.superseded:
                record.next_page = min(record.next_page, start_page)

    def _reattached(self) -> None:
        """A new session: the leases of the old one are gone, and so may be all that was stored."""
        if self._link.attachment > 1:
            self._counters.add("attachments_lost")
        self._stores.lose()
        for job in self._loads:
            self._counters.add("tokens_load_failed", getattr(job.task, "tokens", 0))
            self._conclude(job, TaskState.FAILED, "gone")
        self._loads.clear()
        for record in self._records.all():
            self._lookups.lose(record)
            record.next_page, record.epoch, record.refused = 0, 0, None


def _integers(units: npt.ArrayLike) -> npt.NDArray[np.integer]:
    """`units` as an array of an integer type, the caller's own where it is one; UsageError otherwise."""
    given = np.asarray(units)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise UsageError(f"units: expected integers in one dimension, got {given.dtype} {given.shape}")
    return given
