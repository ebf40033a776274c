"""How the core says that it found itself broken."""

from __future__ import annotations

from kvtier.errors import KVTierError


class BrokenInvariantError(KVTierError):
    """Something that must always be true is not: a fault in kvtier itself, never the caller's."""


def require(true: bool, what: str) -> None:
    """Raise BrokenInvariantError unless `true`."""
    if not true:
        raise BrokenInvariantError(f"broken invariant: {what}")
