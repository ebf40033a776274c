"""Stores: which pages are new, asking for frames once a step, and what the grants say.

Always true: each task asked for is granted, refused or cancelled exactly once; a lease that was granted
belongs to a job that is due, copying or ended; `next_page` never passes over a page that is known to be
neither stored nor being stored.
"""

from __future__ import annotations

import logging
import math
from functools import partial

from kvtier.client import CacheClient
from kvtier.config import Options
from kvtier.errors import Status
from kvtier.keys import KEY_BYTES, PageChain
from kvtier.planner.copies import Job
from kvtier.planner.counters import Counters
from kvtier.planner.link import Link
from kvtier.planner.lookups import Lookups
from kvtier.planner.records import Record, Refusal
from kvtier.tasks import OffloadTask, TaskState
from kvtier.wire.messages import MAX_KEYS, BeginStore, Reply, StoreChain, StoreGrant, StoreReply

log = logging.getLogger("kvtier")

MAX_CHAINS = 256
"""Chains in one `begin_store`; keys are limited too, by the protocol."""
RETRY_S = 0.05
"""A request that was refused, and has no new page, does not ask again sooner."""


class Stores:
    """Offloads before they copy. `due` are granted jobs for the next plan, `ended` final ones not yet told
    of.
    """

    def __init__(
        self,
        client: CacheClient,
        link: Link,
        lookups: Lookups,
        options: Options,
        counters: Counters,
        ranks: tuple[int, ...],
    ) -> None:
        self._client = client
        self._link = link
        self._lookups = lookups
        self._counters = counters
        self._ranks = ranks
        self._write = options.write
        self._page_tokens = client.layout.page_tokens
        self._page_units = client.layout.page_tokens // client.layout.unit_tokens
        self._page_bytes = client.layout.page_bytes
        self._new: list[Job] = []
        self._asked: list[Job] = []
        self.due: list[Job] = []
        self.ended: list[Job] = []

    @property
    def queued(self) -> list[Job]:
        """All jobs that do not copy yet."""
        return [*self._new, *self._asked, *self.due]

    @property
    def unasked(self) -> bool:
        """Whether the next step has something to ask for, or to begin."""
        return bool(self.due) or any(job.record.epoch or not job.asked_epoch for job in self._new)

    def storable(self, record: Record, chain: PageChain, given_pages: int) -> int:
        """The end of what may be stored: whole pages whose KV was given, by the write policy."""
        if self._write == "off":
            return 0
        pages = min(chain.pages, given_pages, MAX_KEYS)
        return pages if self._write == "all" else min(pages, record.prompt_tokens // self._page_tokens)

    def room(self, inflight_bytes: int, limit_bytes: int) -> int:
        """Pages that may still be put under way; one page always may when nothing else is."""
        if not inflight_bytes:
            return max(limit_bytes // self._page_bytes, 1)
        return max((limit_bytes - inflight_bytes) // self._page_bytes, 0)

    def held_off(self, record: Record, begin: int, end: int) -> str:
        """Why pages [begin, end) are not to be asked for again just now; '' if they may."""
        refused = record.refused
        if refused is None or begin < refused.begin or end > refused.end or self._link.now() >= refused.until:
            return ""
        return refused.reason

    def add(self, job: Job, end: int) -> None:
        """Ask for frames for `job`, whose pages end before `end`, with the next message."""
        self._new.append(job)
        job.record.next_page = end

    def ask(self) -> None:
        """Post what was added since the last step: one message, or as few as the limits allow."""
        ready = [job for job in self._new if self._knows_epoch(job)]
        self._new = [job for job in self._new if not job.record.epoch and job.task.state is TaskState.QUEUED]
        while ready:
            batch: list[Job] = []
            keys = 0
            for job in ready[:MAX_CHAINS]:
                keys += len(job.keys) // KEY_BYTES
                if batch and keys > MAX_KEYS:
                    break
                batch.append(job)
            del ready[: len(batch)]
            chains = []
            for job in batch:
                job.number, job.attachment = self._client.next_number(), self._link.attachment
                chains.append(StoreChain(job.number, job.ns, job.keys, job.record.epoch))
            self._asked += batch
            if not self._link.post(BeginStore(tuple(chains)), partial(self._granted, batch)):
                for job in batch:
                    self._asked.remove(job)
                    self._refuse(job, "away")

    def _knows_epoch(self, job: Job) -> bool:
        """Whether `job` can be asked for; if the epoch of its KV is not known, that is learnt first."""
        if job.record.epoch:
            return True
        if (job.asked_epoch and not job.record.learning) or not self._lookups.learn(
            job.record, job.ns, job.keys
        ):
            self._refuse(job, "away")
        job.asked_epoch = True
        return False

    def cancel(self, job: Job) -> None:
        """Take back a job that does not copy yet."""
        if job in self._new:
            self._new.remove(job)
        else:
            if job in self._asked:
                self._asked.remove(job)
            else:
                self.due.remove(job)
            self._link.abort(job.number, self._ranks)
        self._counters.add("pages_skipped_cancelled", job.task.pages)
        self._end(job, TaskState.CANCELLED, "cancelled")

    def lose(self) -> None:
        """The session is gone: nothing that has not begun can begin."""
        for job in self.queued:
            self._counters.add("pages_skipped_gone", job.task.pages)
            self._end(job, TaskState.FAILED, "gone")
        self._new.clear()
        self._asked.clear()
        self.due.clear()

    # --- answers ---

    def _granted(self, jobs: list[Job], reply: Reply) -> None:
        grants = reply.body.grants if isinstance(reply.body, StoreReply) else ()
        if len(grants) != len(jobs) or any(map(_impossible, grants, jobs)):
            if reply.text:
                log.debug("a begin_store was answered with %s: %s", reply.status.name, reply.text)
            status = reply.status if reply.status is not Status.OK else Status.BAD
            grants = tuple(StoreGrant(job.number, status) for job in jobs)
            for job in jobs:  # whatever was granted after all, nothing is copied to it
                self._link.abort(job.number, self._ranks)
        for job, grant in zip(jobs, grants, strict=True):
            if job in self._asked:  # else it was cancelled, and its abort is on the way
                self._asked.remove(job)
                self._grant(job, grant)

    def _grant(self, job: Job, grant: StoreGrant) -> None:
        task, record = job.task, job.record
        if not isinstance(task, OffloadTask):
            return
        end = task.start_page + task.pages
        if grant.status is Status.DONE or (grant.status is Status.OK and not grant.taken):
            self._counters.add("pages_known", task.pages)
            task.start_page, task.pages = end, 0
            self._end(job, TaskState.DONE, "stored")
        elif grant.status is not Status.OK:
            self._refuse(job, grant.reason or _WORDS.get(grant.status, "refused"), grant.text)
        elif grant.start < task.start_page:
            # Pages that were stored once are gone, and their units are not at hand: the request's next
            # offload begins there.
            self._link.abort(job.number, self._ranks)
            self._hold_off(record, task.start_page, end, "hole")
            record.next_page = min(record.next_page, grant.start)
            self._counters.add("pages_skipped_hole", task.pages)
            task.pages = 0
            self._end(job, TaskState.DONE, "hole")
        else:
            self._take(job, task, grant, end)

    def _take(self, job: Job, task: OffloadTask, grant: StoreGrant, end: int) -> None:
        taken_end = grant.start + grant.taken
        self._counters.add("pages_known", grant.start - task.start_page)
        if taken_end < end:
            task.reason = grant.reason or "full"
            self._counters.add(f"pages_skipped_{task.reason}", end - taken_end)
            self._hold_off(job.record, taken_end, end, task.reason)
        skip = (grant.start - task.start_page) * self._page_units
        task.start_page, task.pages = grant.start, grant.taken
        job.frames = grant.frames
        job.units = task.units[skip : skip + grant.taken * self._page_units]
        self.due.append(job)

    def _refuse(self, job: Job, reason: str, text: str = "") -> None:
        task = job.task
        if text and reason == "refused":
            log.debug("a store of %d pages was refused: %s", task.pages, text)
        self._counters.add(f"pages_skipped_{reason}", task.pages)
        if isinstance(task, OffloadTask):
            self._hold_off(job.record, task.start_page, task.start_page + task.pages, reason)
            if reason == "flushed":  # the KV is older than the flush, and stays so
                job.record.refused = Refusal(0, MAX_KEYS, math.inf, reason)
        task.pages = 0
        self._end(job, TaskState.DONE, reason)

    def _hold_off(self, record: Record, begin: int, end: int, reason: str) -> None:
        record.next_page = min(record.next_page, begin)
        record.refused = Refusal(begin, end, self._link.now() + RETRY_S, reason)

    def _end(self, job: Job, state: TaskState, reason: str) -> None:
        job.task.state, job.task.reason = state, reason
        self.ended.append(job)


def _impossible(grant: StoreGrant, job: Job) -> bool:
    """Whether `grant` cannot be the answer to `job`."""
    frames = grant.frames
    return (
        grant.number != job.number
        or len(frames) != grant.taken
        or grant.start + grant.taken > len(job.keys) // KEY_BYTES
        or (len(frames) > 0 and int(frames.min()) < 0)
    )


_WORDS = {
    Status.FULL: "full",
    Status.BUSY: "busy",
    Status.MISS: "flushed",
    Status.AWAY: "away",
    Status.EXPIRED: "away",
    Status.GONE: "away",
}
