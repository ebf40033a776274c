"""Look-ups: what the host has of a request, and the leases that unadmitted requests hold.

One `begin_load` is both question and lease. Always true: what requests hold that are not admitted yet,
together with what they have asked for, is at most a quarter of the pool, a page counted once for each
request; only one request that is being looked up may hold more, else a prompt of more than a quarter of the
pool could never be loaded whole. A lease is a record's `answer`, or has been handed to a load, or aborted.

Longer than 300 lines: asking, deciding and holding share each record's one question and one answer.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

from kvtier.client import CacheClient
from kvtier.config import Options
from kvtier.errors import Status, UsageError
from kvtier.keys import KEY_BYTES, PageChain
from kvtier.planner.counters import Counters, Outcome
from kvtier.planner.link import Link
from kvtier.planner.records import Question, Record
from kvtier.tasks import Hit
from kvtier.wire.messages import (
    MAX_KEYS,
    BeginLoad,
    LoadChain,
    LoadGrant,
    LoadReply,
    Lookup,
    LookupReply,
    Reply,
)

log = logging.getLogger("kvtier")

FRESH_S = 0.05
"""An answer that has lain here longer is asked for again."""
HELD_SHARE = 4
"""Requests not yet admitted hold at most one in so many frames of the pool."""


class Want(NamedTuple):
    """What a look-up is about: tokens [computed, end); those before `keyed` lie in whole pages.

    `first`: the page of `computed`; `least`: pages from there on without which nothing is loaded.
    """

    computed: int
    end: int
    keyed: int
    first: int
    least: int


class Lookups:
    """Asks, keeps answers, and offers hits. `Planner.lookup` says what callers may rely on."""

    def __init__(
        self, client: CacheClient, link: Link, options: Options, counters: Counters, ranks: tuple[int, ...]
    ) -> None:
        self._client = client
        self._link = link
        self._counters = counters
        self._ranks = ranks
        self._page_tokens = client.layout.page_tokens
        self._unit_tokens = client.layout.unit_tokens
        self._least_tokens = max(options.min_load_tokens, self._unit_tokens)
        self._patience_s = options.lookup_ms / 1000
        self.held = 0
        """Pages that unadmitted requests hold or have asked for."""
        self._large: Record | None = None  # the one that may hold more than the quarter leaves

    def ask(self, record: Record, chain: PageChain) -> None:
        """Post the question of a request that has just arrived, unless it cannot bring anything."""
        if record.asked is not None or record.answer is not None or record.hit is not None:
            return
        if not self._client.attached:
            return
        want = self._want(chain, 0, None)
        if want.keyed < self._least_tokens or self._pages(want, self._room(record)) < self._pages(want):
            self.learn(record, chain.namespace, chain.keys)  # the rest is for the look-up
        else:
            self._post(record, want, chain.keys, self._pages(want))

    def learn(self, record: Record, ns: bytes, keys: bytes) -> bool:
        """Ask for what a store must know, without a lease: the namespace's epoch, and what is there already.

        True when the answer is on its way, or has come.
        """
        if record.epoch or record.asked is not None or record.learning:
            return True
        question = Lookup(ns, keys[: MAX_KEYS * KEY_BYTES])
        record.learning = self._link.post(question, partial(self._learned, record, len(question.keys)))
        return record.learning

    def lookup(
        self, record: Record, chain: PageChain, computed: int, wait_s: float, limit: int | None
    ) -> Hit | None:
        """See `Planner.lookup`. The caller has polled: what has been answered by now is known."""
        record.hit = None
        want = self._want(chain, computed, limit)
        if want.keyed - computed < self._least_tokens:
            self.learn(record, chain.namespace, chain.keys)
            return self._miss(
                record, want, "partial" if want.end - computed >= self._least_tokens else "short"
            )
        if not self._client.attached:
            return self._miss(record, want, "away")
        now = self._link.now()
        if record.since is None:
            record.since = now
        deadline = min(now + wait_s, record.since + self._patience_s)
        keys = chain.keys
        while True:
            if record.answer is not None and self._fresh(record, want, keys, now):
                return self._offer(record, want)
            if record.asked is not None and not self._about(record.asked, record, want, keys):
                self._withdraw(record)
            if record.asked is None:
                pages = self._pages(want, None if self._may_be_large(record) else self._room(record))
                if min(pages * self._page_tokens, want.keyed) - computed < self._least_tokens:
                    return self._give_up(record, want, keys, "held")
                if not self._post(record, want, keys, pages):
                    return self._give_up(record, want, keys, "away")
            now = self._link.now()
            if now >= deadline:
                break
            self._link.wait(deadline - now)
            self._link.poll()
            now = self._link.now()
        if now >= record.since + self._patience_s:
            return self._give_up(record, want, keys, "late")
        return None

    def take(self, record: Record) -> Question:
        """Hand over the lease behind the record's hit; from now on the caller ends it."""
        answer = record.answer
        if answer is None:
            raise UsageError(f"request {record.request!r} holds no lease")
        self._withdraw(record)
        self._hold(record, record.asked, None)
        record.hit, record.outcome = None, None
        return answer

    def drop(self, record: Record) -> None:
        """Give back whatever the record has asked for or holds."""
        self._withdraw(record)
        self._give_back(record)
        record.hit, record.since, record.outcome = None, None, None

    def lose(self, record: Record) -> None:
        """The session is gone, and its leases with it. A hit that was offered stays, to fail when it is
        loaded.
        """
        self._hold(record, None, None)

    def void(self, record: Record) -> None:
        """What is held was flushed: give it back. A hit that was offered fails when it is loaded."""
        self._withdraw(record)
        self._give_back(record)

    # --- asking ---

    def _want(self, chain: PageChain, computed: int, limit: int | None) -> Want:
        end = chain.tokens - 1 if limit is None else min(chain.tokens - 1, limit)
        end = max(end // self._unit_tokens * self._unit_tokens, computed)
        keyed = max(min(end, chain.pages * self._page_tokens), computed)
        first = computed // self._page_tokens
        least = -(-(computed + self._least_tokens) // self._page_tokens) - first
        return Want(computed, end, keyed, first, least)

    def _pages(self, want: Want, room: int | None = None) -> int:
        """Pages from page 0 on to ask for: all that is wanted, or as many from `first` on as have room."""
        pages = min(-(-want.keyed // self._page_tokens), MAX_KEYS)
        return pages if room is None else min(pages, want.first + room)

    def _room(self, record: Record) -> int:
        """Pages that `record` may hold within the quarter."""
        quarter = max(self._client.pool.shape.frames // HELD_SHARE, 1) if self._client.attached else 0
        large = self._large.held if self._large not in (None, record) else 0
        return max(quarter - (self.held - record.held - large), 0)

    def _may_be_large(self, record: Record) -> bool:
        return self._large is None or self._large is record

    def _post(self, record: Record, want: Want, keys: bytes, pages: int) -> bool:
        question = Question(
            number=self._client.next_number(),
            attachment=self._link.attachment,
            ns=record.ns,
            keys=keys[: pages * KEY_BYTES],
            first=want.first,
            at_least=max(1, min(want.least, pages - want.first)),
            cut=pages < self._pages(want),
        )
        chain = LoadChain(question.number, question.ns, question.keys, question.first, question.at_least)
        if not self._link.post(BeginLoad((chain,)), partial(self._answered, record, question)):
            return False
        if question.pages > self._room(record):
            self._large = record
        self._hold(record, question, record.answer)
        return True

    def _answered(self, record: Record, question: Question, reply: Reply) -> None:
        if record.asked is not question:
            return  # withdrawn: its abort has been posted, or went with the session
        grant = _grant(reply, question)
        status = reply.status if grant is None else grant.status
        if status in _NOT_TOLD and record.answer is not None:
            self._hold(record, None, record.answer)  # an older lease is better than no answer
            return
        self._give_back(record)
        question.answered_at = self._link.now()
        if grant is not None:
            question.ready = min(grant.ready, len(question.keys) // KEY_BYTES)
            record.epoch = grant.epoch or record.epoch
            record.next_page = max(record.next_page, question.ready)
            if status is Status.OK:
                question.frames, question.gens = grant.frames, grant.gens
        if grant is None or status is not Status.OK:
            word = "" if grant is None else grant.reason
            question.reason = _SHORTER.get(word, word) or _WORDS.get(status, "refused")
        else:
            question.reason = grant.reason
        if grant is None and status is Status.OK:
            self._link.abort(question.number, self._ranks)
        if question.reason == "refused":
            text = reply.text if grant is None else grant.text
            log.debug("a look-up was answered with %s: %s", status.name, text)
        self._hold(record, None, question)

    def _learned(self, record: Record, asked_bytes: int, reply: Reply) -> None:
        record.learning = False
        if isinstance(reply.body, LookupReply) and reply.status is Status.OK:
            record.epoch = reply.body.epoch
            record.next_page = max(record.next_page, min(reply.body.ready, asked_bytes // KEY_BYTES))

    # --- deciding ---

    def _about(self, question: Question, record: Record, want: Want, keys: bytes) -> bool:
        """Whether the (possible) answer to `question` serves `want`."""
        return (
            question.ns == record.ns
            and question.first <= want.first
            and (question.keys.startswith(keys) or keys.startswith(question.keys))
            and (len(question.frames) > 0 or question.first + question.at_least <= want.first + want.least)
        )

    def _fresh(self, record: Record, want: Want, keys: bytes, now: float) -> bool:
        answer = record.answer
        if answer is None:
            return False
        if not self._about(answer, record, want, keys):
            self._give_back(record)
            return False
        if answer.cut and self._may_be_large(record):
            return False  # now there is room for the rest
        # What was answered since the first of these calls is new, however long the engine's steps are.
        asked_for_this = record.since is not None and answer.answered_at >= record.since
        return asked_for_this or now - answer.answered_at <= FRESH_S

    def _offer(self, record: Record, want: Want) -> Hit:
        answer = record.answer
        if answer is None:
            return self._miss(record, want, "away")
        self._withdraw(record)
        granted = self._inside(
            want, (answer.first + len(answer.frames)) if len(answer.frames) else want.first
        )
        tokens = granted - want.computed
        enough = tokens >= self._least_tokens
        if not enough:
            granted = want.computed
        asked = max(self._inside(want, len(answer.keys) // KEY_BYTES), granted)
        why = answer.reason or "absent"
        missed = {"partial": want.end - want.keyed, "held": want.keyed - asked}
        missed[why] = missed.get(why, 0) + asked - granted
        if not enough:
            if len(answer.frames):
                self._give_back(record)
            return self._settle(record, want, Hit(want.computed, 0, why, record.request), missed)
        hit = Hit(want.computed, tokens, "", record.request)
        self._settle(record, want, hit, missed)
        record.hit = hit
        return hit

    def _inside(self, want: Want, pages: int) -> int:
        """The end of `pages` whole pages, in tokens, within what is wanted."""
        return max(min(pages * self._page_tokens, want.keyed), want.computed)

    def _give_up(self, record: Record, want: Want, keys: bytes, reason: str) -> Hit:
        """Time is up: an older answer's lease is as good as ever, else it is a miss."""
        self._withdraw(record)
        answer = record.answer
        if answer is not None and self._client.attached and self._about(answer, record, want, keys):
            return self._offer(record, want)
        return self._miss(record, want, reason)

    def _miss(self, record: Record, want: Want, reason: str) -> Hit:
        self._withdraw(record)
        self._give_back(record)
        missed = {"partial": want.end - want.keyed}
        missed[reason] = missed.get(reason, 0) + want.keyed - want.computed
        return self._settle(record, want, Hit(want.computed, 0, reason, record.request), missed)

    def _settle(self, record: Record, want: Want, hit: Hit, missed: dict[str, int]) -> Hit:
        kept = {reason: tokens for reason, tokens in missed.items() if tokens}
        outcome = Outcome(want.end - want.computed, hit.tokens, kept)
        self._counters.settle(outcome, instead_of=record.outcome)
        record.outcome, record.since = outcome, None
        return hit

    # --- holding ---

    def _withdraw(self, record: Record) -> None:
        if record.asked is not None:
            self._link.abort(record.asked.number, self._ranks)
            self._hold(record, None, record.answer)

    def _give_back(self, record: Record) -> None:
        answer = record.answer
        if answer is not None:
            if len(answer.frames) and answer.attachment == self._link.attachment:
                self._link.abort(answer.number, self._ranks)
            self._hold(record, record.asked, None)

    def _hold(self, record: Record, asked: Question | None, answer: Question | None) -> None:
        """The one place where a record's question and answer change, so that `held` is right."""
        before = record.held
        record.asked, record.answer = asked, answer
        self.held += record.held - before
        if self._large is record and not record.held:
            self._large = None


def _grant(reply: Reply, question: Question) -> LoadGrant | None:
    """The answer to `question`; None if it is none, or cannot be true."""
    if not isinstance(reply.body, LoadReply) or len(reply.body.grants) != 1:
        return None
    grant = reply.body.grants[0]
    frames = grant.frames
    if grant.number != question.number or len(frames) > question.pages or len(grant.gens) != len(frames):
        return None
    if grant.status is Status.OK and (len(frames) < question.at_least or int(frames.min()) < 0):
        return None
    return grant


_WORDS = {
    Status.OK: "refused",
    Status.MISS: "absent",
    Status.FULL: "busy",
    Status.BUSY: "busy",
    Status.EXPIRED: "late",
    Status.AWAY: "late",
    Status.GONE: "away",
}
"""Why a look-up brought nothing, where the sidecar gives no word of its own."""
_SHORTER = {"too_few": "short"}
_NOT_TOLD = (Status.AWAY, Status.EXPIRED, Status.GONE)
