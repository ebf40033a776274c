"""What a planner counts: tokens asked for and why they missed, pages offered and why they were not stored.

Always true: tokens_requested == tokens_hit + the sum of tokens_missed_*; pages_offered == pages_stored +
pages_known + pages_failed + the sum of pages_skipped_* + what is still under way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MISSES = (
    "absent",  # the host does not have the page
    "pending",  # it, or one before it, is being written
    "short",  # fewer tokens than min_load_tokens would be brought
    "partial",  # the last page is not whole, so it has no key
    "held",  # requests not yet admitted hold a quarter of the pool already
    "late",  # no answer within lookup_ms
    "away",  # no sidecar
    "cap",  # the session has as many frames pinned as it may
    "incomplete",  # not all movers of the group are attached yet
    "unmapped",  # a mover has not mapped that part of the pool yet
)
"""Why a token that was asked for was not offered by `lookup`; other words are the sidecar's own."""

SKIPS = (
    "inflight",  # max_inflight_bytes were under way
    "full",  # the pool had no frame that could be taken
    "cap",  # the session has as many frames pinned as it may
    "incomplete",  # not all movers of the group are attached yet
    "unmapped",  # a mover has not mapped that part of the pool yet
    "away",  # no sidecar, or no answer in time
    "hole",  # an earlier page has been evicted since; it comes first at the next try
    "flushed",  # the namespace was flushed after the request's look-up
    "cancelled",
    "gone",  # the sidecar was lost before the copy began
)
"""Why a page that was offered was not stored; other words are the sidecar's own."""


@dataclass(frozen=True)
class Outcome:
    """How one look-up ended, in tokens."""

    requested: int
    hit: int
    missed: Mapping[str, int] = field(default_factory=dict)


class Counters:
    """Plain numbers, rising; `settle` may take back the earlier outcome of a request that asks again."""

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        """Raise one counter."""
        self.values[name] += amount

    def settle(self, outcome: Outcome, instead_of: Outcome | None) -> None:
        """Count a look-up; a request that was looked up before without being loaded counts once."""
        for one, sign in ((instead_of, -1), (outcome, 1)):
            if one is not None:
                self.values["lookups"] += sign
                self.values["tokens_requested"] += sign * one.requested
                self.values["tokens_hit"] += sign * one.hit
                for reason, tokens in one.missed.items():
                    self.values[f"tokens_missed_{reason}"] += sign * tokens

    def report(self, names: Iterable[str]) -> dict[str, int]:
        """All counters; `names` are there also when they are 0."""
        known = [
            *names,
            *(f"tokens_missed_{why}" for why in MISSES),
            *(f"pages_skipped_{why}" for why in SKIPS),
        ]
        return {name: self.values[name] for name in dict.fromkeys([*known, *self.values])}
