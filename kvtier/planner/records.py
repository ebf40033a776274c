"""What a planner knows of each request, and how long it remembers.

Always true: a record with a lease, a question under way or a live task is never forgotten by itself; of the
others the 4,096 used last are kept, and forgetting one costs no more than one needless message.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.keys import KEY_BYTES, PageChain
from kvtier.planner.counters import Outcome
from kvtier.tasks import Hit
from kvtier.wire.messages import NO_FRAMES, NO_GENS, Frames, Gens

KEEP = 4096


@dataclass(slots=True, eq=False)
class Question:
    """One `begin_load` and, once it has come, its answer: with frames it is a lease that is held.

    `keys` from the chain's page 0 on, pages from `first` on wanted, at least `at_least` of them. `ready`:
    pages that the host has, from page 0 on. `reason`: why there are not more.
    """

    number: int
    attachment: int
    ns: bytes
    keys: bytes
    first: int
    at_least: int
    cut: bool = False
    """More was wanted, but others held too much."""
    answered_at: float = 0.0
    frames: Frames = field(default_factory=lambda: NO_FRAMES)
    gens: Gens = field(default_factory=lambda: NO_GENS)
    ready: int = 0
    reason: str = ""

    @property
    def pages(self) -> int:
        """Pages that were asked for: what it counts against the quarter of the pool until it is answered."""
        return len(self.keys) // KEY_BYTES - self.first


class Refusal(NamedTuple):
    """Pages [begin, end) were refused: until `until` the same are not asked for again."""

    begin: int
    end: int
    until: float
    reason: str


@dataclass(slots=True, eq=False)
class Record:
    """One request. `next_page`: the first page not stored, and not being stored, as far as is known."""

    request: str
    ns: bytes
    prompt_tokens: int
    epoch: int = 0
    """The namespace's, as of the last answer to this request; 0 = not heard yet."""
    learning: bool = False
    """A question about the epoch is under way."""
    # look-up
    asked: Question | None = None
    answer: Question | None = None
    hit: Hit | None = None
    since: float | None = None
    outcome: Outcome | None = None
    # store
    next_page: int = 0
    refused: Refusal | None = None
    live: int = 0

    @property
    def idle(self) -> bool:
        """Whether nothing hangs on it."""
        return (
            not (self.live or self.learning)
            and self.asked is None
            and (self.answer is None or not len(self.answer.frames))
        )

    @property
    def held(self) -> int:
        """Pages that it holds, or may hold once answered, without being admitted."""
        asked = self.asked.pages if self.asked is not None else 0
        return max(asked, len(self.answer.frames) if self.answer is not None else 0)


class Records:
    """Records by the engine's name of the request, the one used last at the end."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._records: OrderedDict[str, Record] = OrderedDict()

    def get(self, request: str) -> Record | None:
        """The record, if there is one; does not count as a use."""
        return self._records.get(request)

    def use(self, request: str, chain: PageChain) -> Record:
        """The record of `request`, made if need be from its `chain`: the first seen is the prompt."""
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = Record(request, chain.namespace, chain.tokens)
            self._trim()
        elif record.ns != chain.namespace:
            record.ns, record.prompt_tokens = chain.namespace, chain.tokens
            record.next_page, record.epoch, record.refused = 0, 0, None
        self._records.move_to_end(request)
        return record

    def drop(self, request: str) -> Record | None:
        """Forget `request`. What hangs on the record is the caller's to end."""
        return self._records.pop(request, None)

    def all(self) -> list[Record]:
        """Every record, the one used last at the end."""
        return list(self._records.values())

    def __len__(self) -> int:
        return len(self._records)

    def _trim(self) -> None:
        # At most two looks for each new record: busy ones move to the end and are met again later.
        for _ in range(2):
            if len(self._records) <= self._keep:
                return
            request, record = next(iter(self._records.items()))
            if record.idle:
                del self._records[request]
            else:
                self._records.move_to_end(request)
