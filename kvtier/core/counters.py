"""Counts of what was asked and given, and why the rest was not. Standard library only.

The unit is the owner's: `HostCache` counts pages, a planner counts tokens. Counters only rise.
"""

from __future__ import annotations


class Counters:
    """How much was asked, how much of it was hit, and a reason for each unit that missed.

    Always true: `asked == hit + sum(missed.values())`.
    """

    __slots__ = ("asked", "hit", "missed")

    def __init__(self) -> None:
        self.asked = 0
        self.hit = 0
        self.missed: dict[str, int] = {}

    def add(self, asked: int, hit: int, reason: str) -> None:
        """`asked` units were wanted, `hit` of them given, the others not because of `reason`."""
        self.asked += asked
        self.hit += hit
        if asked > hit:
            self.missed[reason] = self.missed.get(reason, 0) + asked - hit

    def as_dict(self, prefix: str = "") -> dict[str, int]:
        """All counters by name: `<prefix>asked`, `<prefix>hits`, `<prefix>missed_<reason>`."""
        counts = {f"{prefix}asked": self.asked, f"{prefix}hits": self.hit}
        counts.update({f"{prefix}missed_{reason}": n for reason, n in sorted(self.missed.items())})
        return counts
