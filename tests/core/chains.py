"""Keys, and a cache with one engine attached, for the core's tests."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable

from hypothesis import settings

from kvtier.core.host_cache import HostCache
from kvtier.core.results import LoadGrant, StoreGrant
from kvtier.errors import Status

NS = b"n" * 16
OTHER = b"o" * 16


def machine_settings(examples: int, steps: int) -> settings:
    """For a state machine: these, unless a deeper profile has been loaded (KVTIER_HYPOTHESIS=nightly)."""
    deep = settings.default
    if deep is not None and deep.max_examples > 100:
        return deep
    return settings(max_examples=examples, stateful_step_count=steps)


def keys(path: Iterable[Hashable], width: int = 32) -> bytes:
    """Chained keys: equal paths have equal keys, and a page's key depends on all before it."""
    at, packed = b"root", b""
    for part in path:
        at = hashlib.sha256(at + repr(part).encode()).digest()
        packed += (at * (width // 32 + 1))[:width]
    return packed


class Engine:
    """A planner and its movers in a cache, with lease numbers that rise."""

    def __init__(self, cache: HostCache, group: str = "g", ranks: int = 1, sid: int = 100) -> None:
        self.cache, self.sid, self.ranks, self.number = cache, sid, ranks, 0
        self.all = frozenset(range(ranks))
        self.movers = [sid + 1 + rank for rank in range(ranks)]
        assert cache.attach(sid, group, "planner", 0, ranks, 0.0).status == Status.OK
        for rank, mover in enumerate(self.movers):
            assert cache.attach(mover, group, "mover", rank, ranks, 0.0).status == Status.OK
            cache.mapped(mover, cache.limit)

    def load(self, path: Iterable[Hashable], first: int = 0, at_least: int = 1, ns: bytes = NS) -> LoadGrant:
        self.number += 1
        return self.cache.begin_load(self.sid, self.number, ns, keys(path), first, at_least, 0.0)

    def store(
        self,
        path: Iterable[Hashable],
        epoch: int | None = None,
        now: float = 0.0,
        patience_s: float | None = None,
        ns: bytes = NS,
    ) -> StoreGrant:
        self.number += 1
        epoch = self.cache.epoch(ns) if epoch is None else epoch
        return self.cache.begin_store(self.sid, self.number, ns, keys(path), epoch, now, patience_s)

    def finish(self, number: int | None = None, quiet: Iterable[int] | None = None):
        number = self.number if number is None else number
        return self.cache.finish(self.sid, number, self.all if quiet is None else quiet, 0.0)

    def abort(self, number: int | None = None, quiet: Iterable[int] | None = None):
        number = self.number if number is None else number
        return self.cache.abort(self.sid, number, self.all if quiet is None else quiet, 0.0)

    def fill(self, path: Iterable[Hashable], ns: bytes = NS) -> list[int]:
        """Store and finish; the frames."""
        grant = self.store(path, ns=ns)
        assert grant.status == Status.OK, grant
        self.finish()
        return list(grant.frames)


def make(frames: int = 32, **options) -> HostCache:
    cache = HostCache(frames, **options)
    cache.grow(frames)
    return cache


def ready(cache: HostCache, path: Iterable[Hashable], ns: bytes = NS) -> int:
    return cache.lookup(ns, keys(path)).ready
