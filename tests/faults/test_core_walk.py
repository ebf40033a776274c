"""The core at random for long, its writes replayed into real tables; after each single step of them the
tables are walked as a rebuild would (R17).

A frame that the walk accepts must hold, whole, the page whose key its line says, at every moment at which the
server may be killed (R15); and between two events the walk accepts exactly what a load could get.
`KVTIER_WALK_STEPS` says how many events (default 8,000).
"""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import pytest

from kvtier.core.host_cache import HostCache
from kvtier.core.writes import READY
from kvtier.errors import Status
from kvtier.keys import KEY_BYTES
from kvtier.shm.shape import PoolShape
from kvtier.shm.tables import Tables

STEPS = int(os.environ.get("KVTIER_WALK_STEPS", "8000"))
FRAMES = 48
SPACES = [bytes([ns]) * 16 for ns in (1, 2, 3)]
PATIENCE_S = 5.0


def keys_of(ns: bytes, path: tuple[int, ...]) -> bytes:
    keys, last = [], ns
    for token in path:
        last = hashlib.sha256(last + bytes([token])).digest()
        keys.append(last)
    return b"".join(keys)


def walk(tables: Tables) -> dict[int, bytes]:
    """What a rebuild accepts (R17): the key of each frame."""
    lines = tables.frames
    roots = {-1 - at: bytes(row["ns"])[:8] for at, row in enumerate(tables.namespaces) if row["used"]}
    ready = np.flatnonzero(lines["state"] == READY).tolist()
    parents = {frame: int(lines["parent"][frame]) for frame in ready}
    accepted: dict[int, bytes] = {}

    def accept(frame: int) -> bool:
        chain = []
        while frame in parents and frame not in accepted and frame not in chain:
            chain.append(frame)
            frame = parents[frame]
        for below in reversed(chain):
            above = parents[below]
            tag = roots.get(above) if above < 0 else accepted.get(above, b"")[:8]
            if not tag or bytes(lines["tag"][below]) != tag:
                return False
            accepted[below] = bytes(lines["key"][below])
        return True

    for frame in ready:
        accept(frame)
    return accepted


class Engine:
    """A planner and its movers; `leases`: number -> (keys from page 0, start, frames, is it a store)."""

    def __init__(self, name: str, sids: list[int]) -> None:
        self.name = name
        self.planner, *self.movers = sids
        self.number = 0
        self.leases: dict[int, tuple[bytes, int, list[int], bool]] = {}


class Long:
    """`content[frame]`: the key of the page that is whole in it; b"" while it is being written."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        spaces = self.random.choice((2, 4))  # with 2 one is given up for another again and again
        self.cache = HostCache(FRAMES, sessions=16, leases=24, namespaces=spaces, patience_s=PATIENCE_S)
        shape = PoolShape((16, 4096), FRAMES, FRAMES)
        self.tables = Tables(shape, sessions=16, leases=24, namespaces=spaces)
        self.now = 0.0
        self.next_sid = 1
        self.engines: list[Engine] = []
        self.content: dict[int, bytes] = {}
        self.counts: dict[str, int] = {}
        self.limit = 0

    def run(self, steps: int) -> None:
        acts = [self.begin_store] * 6 + [self.begin_load] * 4 + [self.end] * 9
        acts += [
            self.attach,
            self.sweep,
            self.wait,
            self.wait,
            self.grow,
            self.long_wait,
            self.mover_is_quiet,
        ]
        rare = [self.die, self.die, self.leave, self.flush, self.mover_dies]
        acts += [self.suspect]
        for step in range(steps):
            act = self.random.choice(rare if self.random.random() < 0.03 else acts)
            self.counts[act.__name__] = self.counts.get(act.__name__, 0) + 1
            act()
            self.replay()
            self.cache.check() if step % 3 == 0 else self.cache.check(20)
            self.compare()

    # -- the tables --

    def replay(self) -> None:
        for _ in self.tables.steps(self.cache.take_writes()):
            for frame, key in walk(self.tables).items():
                assert self.content.get(frame) == key, f"frame {frame} is accepted with other bytes"

    def compare(self) -> None:
        visible = {}
        for space in self.cache._book.spaces.by_ns.values():
            stack = list((space.root.children or {}).values())
            while stack:
                node = stack.pop()
                if node.state == READY:
                    keys = [node.edge[at : at + KEY_BYTES] for at in range(0, len(node.edge), KEY_BYTES)]
                    visible.update(zip(node.pages(), keys, strict=True))
                    stack += (node.children or {}).values()
        assert walk(self.tables) == visible
        states = self.tables.frames["state"][: self.limit]
        stats = self.cache.stats()
        assert int((states == 0).sum()) == stats["frames_free"]
        assert int((states == 1).sum()) == stats["frames_writing"]
        assert int((states == 4).sum()) == stats["frames_quarantined"]
        kinds = self.tables.leases["kind"]
        assert int((kinds != 0).sum()) == stats["leases"]
        assert int((self.tables.sessions["role"] != 0).sum()) == stats["sessions"]

    # -- events --

    def attach(self) -> None:
        if len(self.engines) >= 4:
            broken = [engine for engine in self.engines if not self.cache.complete(engine.planner)]
            if broken:
                self.die(self.random.choice(broken))
            return
        ranks = self.random.choice((1, 1, 2))
        roles = [("planner", 0)] + [("mover", rank) for rank in range(ranks)]
        sids = []
        name = f"e{self.next_sid}"
        for role, rank in roles:
            if self.cache.attach(self.next_sid, name, role, rank, ranks, self.now).status != Status.OK:
                break
            self.cache.mapped(self.next_sid, self.random.choice((self.limit, self.limit, 8)))
            sids.append(self.next_sid)
            self.next_sid += 1
        if len(sids) == len(roles):
            self.engines.append(Engine(name, sids))
        else:
            for sid in sids:
                self.cache.died(sid, self.now)

    def grow(self) -> None:
        self.limit = min(FRAMES, self.limit + self.random.choice((4, 16)))
        self.cache.grow(self.limit)
        for engine in self.engines:
            for sid in (engine.planner, *engine.movers):
                self.cache.mapped(sid, self.limit - self.random.choice((0, 0, 3)))

    def some_path(self) -> tuple[bytes, bytes]:
        ns = self.random.choice(SPACES[: self.random.choice((1, 1, 3))])
        path = tuple(self.random.random() < 0.1 for _ in range(self.random.randint(1, 14)))
        return ns, keys_of(ns, path)

    def some_engine(self) -> Engine | None:
        return self.random.choice(self.engines) if self.engines else None

    def begin_store(self) -> None:
        engine = self.some_engine()
        if engine is None:
            return
        ns, keys = self.some_path()
        engine.number += self.random.randint(1, 3)
        epoch = self.cache.epoch(ns) - (self.random.random() < 0.03)
        grant = self.cache.begin_store(
            engine.planner, engine.number, ns, keys, epoch, self.now, self.random.choice((None, None, 0.5))
        )
        if grant.taken:
            assert grant.status == Status.OK
            self.replay()  # only after the answer does anybody write into the frames
            for frame in grant.frames:
                self.content[frame] = b""
            engine.leases[engine.number] = (keys, grant.start, list(grant.frames), True)

    def begin_load(self) -> None:
        engine = self.some_engine()
        if engine is None:
            return
        ns, keys = self.some_path()
        engine.number += 1
        first = self.random.randint(0, 2)
        grant = self.cache.begin_load(
            engine.planner, engine.number, ns, keys, min(first, len(keys) // KEY_BYTES), 1, self.now
        )
        if grant.status == Status.OK:
            engine.leases[engine.number] = (keys, first, list(grant.frames), False)
            self.right_bytes(engine.leases[engine.number])

    def right_bytes(self, lease: tuple[bytes, int, list[int], bool]) -> None:
        keys, start, frames, _ = lease
        for page, frame in enumerate(frames, start):
            assert self.content[frame] == keys[page * KEY_BYTES : (page + 1) * KEY_BYTES], "wrong KV"

    def end(self) -> None:
        engine = self.some_engine()
        if engine is None or not engine.leases:
            return
        number = self.random.choice(list(engine.leases))
        keys, start, frames, is_store = lease = engine.leases.pop(number)
        everyone = range(len(engine.movers))
        quiet = [rank for rank in everyone if self.random.random() < 0.9]
        whole = self.random.random() < 0.8
        if not is_store:
            self.right_bytes(lease)  # whatever happened since, what is leased has not changed
        elif whole:
            for page, frame in enumerate(frames, start):
                self.content[frame] = keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
        ended = (self.cache.finish if whole else self.cache.abort)(engine.planner, number, quiet, self.now)
        assert ended.status == Status.OK
        if self.random.random() < 0.2:
            self.replay()
            assert self.cache.finish(engine.planner, number, everyone, self.now).status == Status.DONE

    def mover_is_quiet(self) -> None:
        engine = self.some_engine()
        if engine is not None and engine.number:
            number = self.random.randint(1, engine.number)
            if number not in engine.leases:  # a mover that copies still is not quiet
                self.cache.quiet(self.random.choice(engine.movers), engine.planner, number, self.now)

    def die(self, engine: Engine | None = None) -> None:
        engine = engine or self.some_engine()
        if engine is None:
            return
        for lease in engine.leases.values():
            if not lease[3]:
                self.right_bytes(lease)
        sids = [engine.planner, *engine.movers]
        self.random.shuffle(sids)
        for sid in sids:
            self.cache.died(sid, self.now)
            self.replay()
        self.engines.remove(engine)

    def mover_dies(self) -> None:
        engine = self.some_engine()
        if engine is not None:
            self.cache.died(self.random.choice(engine.movers), self.now)

    def leave(self) -> None:
        engine = self.some_engine()
        if engine is None:
            return
        quiet = self.random.random() < 0.7
        for sid in (engine.planner, *engine.movers):
            self.cache.detach(sid, quiet, self.now)
        if quiet:
            self.engines.remove(engine)

    def suspect(self) -> None:
        engine = self.some_engine()
        if engine is not None:
            for sid in (engine.planner, *engine.movers):
                self.cache.suspect(sid, self.random.random() < 0.1)

    def flush(self) -> None:
        self.cache.flush(self.random.choice((None, *SPACES)), self.now)

    def sweep(self) -> None:
        self.cache.sweep(self.random.randint(0, 6))

    def wait(self) -> None:
        self.now += self.random.uniform(0, 1)

    def long_wait(self) -> None:
        self.now += 2 * PATIENCE_S


@pytest.mark.parametrize("seed", [int(os.environ.get("KVTIER_WALK_SEED", "1"))])
def test_what_a_rebuild_would_accept_is_right_at_every_single_step(seed):
    """R4 to R13, R15, R17, R28: no wrong page is accepted, no visible one is lost."""
    long = Long(seed)
    long.run(STEPS)
    stats = long.cache.stats()
    assert min(stats[name] for name in ("superseded", "evicted", "dropped", "stored", "hits")) > 10, stats
    for engine in list(long.engines):
        for sid in (engine.planner, *engine.movers):
            long.cache.died(sid, long.now)
    long.cache.sweep(FRAMES)
    long.replay()
    stats = long.cache.stats()
    assert stats["leases"] == stats["sessions"] == stats["frames_held"] == 0
    assert stats["frames_free"] + stats["frames_ready"] == FRAMES
    long.tables.close()
