"""HostCache, and the table that its writes make, against the naive model: any events in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtier.core.host_cache import HostCache
from kvtier.core.writes import READY, WRITING, Free
from kvtier.errors import Status
from tests.core.chains import keys, machine_settings
from tests.core.model import Model, ModelGroup, ModelLease, ModelSession, Path
from tests.core.naive_table import NaiveTable

SPACES = (b"a" * 16, b"b" * 16)
PATIENCE_S = 10.0

paths = st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(0, 4)).map(
    lambda drawn: (0,) * drawn[0] + (drawn[1],) * drawn[2] or (1,)
)
spaces = st.sampled_from([SPACES[0], SPACES[0], SPACES[0], SPACES[1]])
picks = st.integers(0, 1 << 20)
ranks_quiet = st.sets(st.integers(0, 1))
mostly_all = st.one_of(st.just({0, 1}), st.just({0, 1}), ranks_quiet)
seldom = st.integers(0, 7).map(lambda drawn: drawn == 7)


class HostCacheMachine(RuleBasedStateMachine):
    @initialize(limit=st.integers(6, 28), spare=st.integers(0, 6), ranks=st.integers(1, 2))
    def start(self, limit: int, spare: int, ranks: int) -> None:
        self.cache = HostCache(limit + spare, patience_s=PATIENCE_S)
        self.cache.grow(limit)
        self.model = Model(limit)
        self.table = NaiveTable(limit + spare)
        self.now = 0.0
        self.next_sid = 1
        self.next_group = 0
        self.attach(ranks, 0)

    # -- choosing ------------------------------------------------------------------------------------

    def planners(self) -> list[int]:
        return [
            s for s, m in self.model.sessions.items() if m.role == "planner" and not m.dead and not m.closed
        ]

    def pick_planner(self, pick: int) -> int:
        planners = self.planners()
        return planners[pick % len(planners)]

    def pick_lease(self, pick: int) -> tuple[int, int]:
        leases = [key for key in self.model.leases if not self.model.sessions[key[0]].dead]
        return leases[pick % len(leases)]

    def drain(self) -> list[Any]:
        """The writes since the last event, applied to the table."""
        writes = self.cache.take_writes()
        self.table.apply(writes)
        return writes

    # -- sessions ------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.model.groups) < 3)
    @rule(ranks=st.integers(1, 2), missing=st.sampled_from([0, 0, 0, 1]), really=seldom)
    def attach_group(self, ranks: int, missing: int, really: bool) -> None:
        if really or not self.planners():
            self.attach(ranks, missing)

    def attach(self, ranks: int, missing: int) -> None:
        name = f"group {self.next_group}"
        self.next_group += 1
        members = [("planner", 0)] + [("mover", rank) for rank in range(ranks)]
        group = self.model.groups[name] = ModelGroup(ranks)
        for role, rank in members[missing:]:
            sid = self.next_sid
            self.next_sid += 1
            self.model.sessions[sid] = ModelSession(name, role, rank)
            if role == "planner":
                group.planner = sid
            else:
                group.movers[rank] = sid
            group.complete = group.planner is not None and len(group.movers) == ranks
            attached = self.cache.attach(sid, name, role, rank, ranks, self.now)
            assert (attached.status, attached.complete) == (Status.OK, group.complete)
            self.cache.mapped(sid, self.model.limit)
            assert self.cache.complete(sid) == group.complete
        self.drain()

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks, suspect=seldom)
    def suspect(self, pick: int, suspect: bool) -> None:
        sid = list(self.model.sessions)[pick % len(self.model.sessions)]
        self.model.sessions[sid].suspect = suspect
        assert self.cache.suspect(sid, suspect) == Status.OK

    @precondition(lambda self: self.model.sessions)
    @rule(pick=picks, how=st.sampled_from(["died", "detach", "detach not quiet"]), really=seldom)
    def leave(self, pick: int, how: str, really: bool) -> None:
        if not really:
            return
        sid = list(self.model.sessions)[pick % len(self.model.sessions)]
        if how == "died":
            assert self.cache.died(sid, self.now) == Status.OK
            self.model.leave(sid, quiet=False)
        elif how == "detach":
            assert self.cache.detach(sid, True, self.now) == Status.OK
            self.model.leave(sid, quiet=True)
        else:
            assert self.cache.detach(sid, False, self.now) == Status.OK
            self.model.sessions[sid].closed = True
        self.drain()

    @precondition(lambda self: self.model.groups)
    @rule(pick=picks, order=st.booleans(), really=seldom)
    def engine_is_killed(self, pick: int, order: bool, really: bool) -> None:
        """All processes of a group die, in one order or the other."""
        if not really:
            return
        name = list(self.model.groups)[pick % len(self.model.groups)]
        sids = [
            sid for sid, session in self.model.sessions.items() if session.group == name and not session.dead
        ]
        for sid in sids if order else reversed(sids):
            self.cache.died(sid, self.now)
            self.model.leave(sid, quiet=False)
            self.drain()

    @rule(sid=st.integers(1000, 1010))
    def unknown_session(self, sid: int) -> None:
        assert self.cache.died(sid, self.now) == Status.GONE
        assert self.cache.begin_load(sid, 1, SPACES[0], b"", 0, 1, self.now).status == Status.GONE
        assert self.cache.finish(sid, 1, (), self.now).status == Status.GONE

    @precondition(lambda self: self.model.limit < self.cache.stats()["frames"])
    @rule(more=st.integers(1, 3))
    def grow(self, more: int) -> None:
        old = self.model.limit
        self.model.limit = min(old + more, self.cache.stats()["frames"])
        self.model.free.update(range(old, self.model.limit))
        self.cache.grow(self.model.limit)
        for sid in self.model.sessions:
            self.cache.mapped(sid, self.model.limit)

    # -- begins --------------------------------------------------------------------------------------

    @rule(ns=spaces, path=paths)
    def lookup(self, ns: bytes, path: Path) -> None:
        found = self.cache.lookup(ns, keys(path))
        ready = self.model.matched(ns, path, True)
        assert found == (Status.OK, ready, self.model.matched(ns, path, False) - ready, self.model.epoch(ns))
        assert self.cache.take_writes() == []

    @precondition(lambda self: self.planners())
    @rule(pick=picks, ns=spaces, path=paths, first=st.integers(0, 3), at_least=st.integers(0, 3))
    def load(self, pick: int, ns: bytes, path: Path, first: int, at_least: int) -> None:
        self.load_as(self.pick_planner(pick), ns, path, first, at_least)

    def load_as(self, sid: int, ns: bytes, path: Path, first: int, at_least: int) -> None:
        first = min(first, len(path))
        number = self.model.sessions[sid].last = self.model.sessions[sid].last + 1
        grant = self.cache.begin_load(sid, number, ns, keys(path), first, at_least, self.now)
        self.drain()
        assert grant.epoch == self.model.epoch(ns)
        if self.model.refusal(sid):
            assert grant.status == Status.BUSY
            return
        ready, pages = self.model.load_pages(sid, ns, path)
        if pages - first < max(at_least, 1):
            assert grant.status == (Status.BUSY if pages < ready else Status.MISS)
            assert not grant.frames
            return
        assert grant.status == Status.OK
        assert grant.ready == ready
        assert list(grant.frames) == self.model.load(sid, number, ns, path, pages, first, self.now)
        assert bool(grant.reason) == (pages < len(path))

    @precondition(lambda self: self.planners())
    @rule(
        pick=picks,
        ns=spaces,
        path=paths,
        behind=st.sampled_from([0, 0, 0, 0, 1]),
        patience_s=st.sampled_from([None, None, 0.5]),
    )
    def store(self, pick: int, ns: bytes, path: Path, behind: int, patience_s: float | None) -> None:
        self.store_as(self.pick_planner(pick), ns, path, behind, patience_s)

    @precondition(lambda self: self.planners())
    @rule(pick=picks, ns=spaces, path=paths, more=paths)
    def fill(self, pick: int, ns: bytes, path: Path, more: Path) -> None:
        """Two turns of a chat, stored and finished."""
        sid = self.pick_planner(pick)
        self.fill_as(sid, ns, path)
        self.fill_as(sid, ns, path + more)

    def fill_as(self, sid: int, ns: bytes, path: Path) -> None:
        self.store_as(sid, ns, path, 0, None)
        key = sid, self.model.sessions[sid].last
        if key in self.model.leases:
            self.end_as(key, {0, 1}, True)

    @precondition(lambda self: self.planners())
    @rule(pick=picks, other=picks, ns=spaces, path=paths, share=st.integers(1, 10), more=paths)
    def writer_hangs(self, pick: int, other: int, ns: bytes, path: Path, share: int, more: Path) -> None:
        """A store is begun, nothing happens for long, then another one wants some of its pages (R8)."""
        self.store_as(self.pick_planner(pick), ns, path, 0, None)
        self.now += 2 * PATIENCE_S
        self.store_as(self.pick_planner(other), ns, path[:share] + more, 0, None)

    @precondition(lambda self: self.planners())
    @rule(pick=picks, ns=spaces, paths=st.lists(paths, min_size=1, max_size=3), pages=st.integers(0, 12))
    def flush_under_readers(self, pick: int, ns: bytes, paths: list[Path], pages: int) -> None:
        """Loads are running when their namespace is flushed and swept (R13)."""
        sid = self.pick_planner(pick)
        for path in paths:
            self.fill_as(sid, ns, path)
        for path in paths:
            self.load_as(sid, ns, path[: -(-len(path) // 2)], 0, 1)
        self.flush_now(ns)
        self.sweep(pages)

    def store_as(self, sid: int, ns: bytes, path: Path, behind: int, patience_s: float | None) -> None:
        model = self.model
        number = model.sessions[sid].last = model.sessions[sid].last + 1
        epoch = model.epoch(ns) - behind
        grant = self.cache.begin_store(sid, number, ns, keys(path), epoch, self.now, patience_s)
        writes = self.drain()
        if model.refusal(sid):
            assert (grant.status, grant.taken) == (Status.BUSY, 0)
            return
        if behind:
            assert (grant.status, grant.taken, grant.reason) == (Status.MISS, 0, "flushed")
            return
        if path:
            model.epochs.setdefault(ns, model.absent)
        stale_before = self.now - (PATIENCE_S if patience_s is None else patience_s)
        start, want, pending, taken = model.store_plan(sid, ns, path, stale_before)
        assert (grant.start, grant.pending, grant.taken) == (start, pending, taken)
        assert bool(grant.reason) == (start + taken < len(path))
        for write in writes:
            if isinstance(write, Free):
                swept = [frame for frame in write.frames if frame in model.left]
                model.swept(swept)
                model.evict([frame for frame in write.frames if frame not in swept])
        if not taken:
            assert grant.status == (Status.OK if not want else grant.status)
            assert grant.status in (Status.OK, Status.FULL, Status.BUSY)
            return
        assert grant.status == Status.OK
        assert len(grant.frames) == taken
        model.store(sid, number, ns, path, start, list(grant.frames), self.now)

    @precondition(lambda self: self.planners())
    @rule(pick=picks, back=st.integers(0, 3))
    def number_used_again(self, pick: int, back: int) -> None:
        sid = self.pick_planner(pick)
        number = max(self.model.sessions[sid].last - back, 0)
        assert self.cache.begin_load(sid, number, SPACES[0], b"", 0, 1, self.now).status == Status.BAD
        assert self.cache.begin_store(sid, number, SPACES[0], b"", 1, self.now).status == Status.BAD

    # -- ends ----------------------------------------------------------------------------------------

    @precondition(lambda self: any(not self.model.sessions[key[0]].dead for key in self.model.leases))
    @rule(pick=picks, quiet=mostly_all, whole=st.sampled_from([True, True, False]))
    def end(self, pick: int, quiet: set[int], whole: bool) -> None:
        self.end_as(self.pick_lease(pick), quiet, whole)

    def end_as(self, key: tuple[int, int], quiet: set[int], whole: bool) -> None:
        ranks = self.model.groups[self.model.sessions[key[0]].group].ranks
        quiet = {rank for rank in quiet if rank < ranks}
        call = self.cache.finish if whole else self.cache.abort
        ended = call(*key, quiet, self.now)
        self.drain()
        lease = self.model.leases[key]
        if lease.ended:
            assert ended.status == Status.DONE
            lease.quiet |= quiet
            self.model.settle(key)
            return
        assert ended[:4] == (Status.OK, *self.model.end(key, quiet, whole))

    @precondition(lambda self: self.planners())
    @rule(pick=picks, ahead=st.integers(-3, 2))
    def abort_unknown(self, pick: int, ahead: int) -> None:
        sid = self.pick_planner(pick)
        session = self.model.sessions[sid]
        number = session.last + ahead
        if number < 1 or (sid, number) in self.model.leases:
            return
        assert self.cache.abort(sid, number, (), self.now).status == Status.DONE
        session.last = max(session.last, number)
        assert self.cache.finish(sid, number, (), self.now).status == Status.DONE
        self.drain()

    @precondition(lambda self: self.model.leases)
    @rule(pick=picks, rank=st.integers(0, 1))
    def mover_says_quiet(self, pick: int, rank: int) -> None:
        key = list(self.model.leases)[pick % len(self.model.leases)]
        mover = self.model.groups[self.model.sessions[key[0]].group].movers.get(rank)
        if mover is None:
            return
        assert self.cache.quiet(mover, *key, self.now).status == Status.OK
        self.drain()
        self.model.leases[key].quiet.add(rank)
        self.model.settle(key)

    # -- time and flushes ----------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(ns=st.sampled_from([None, *SPACES]), really=seldom)
    def flush(self, ns: bytes | None, really: bool) -> None:
        if really:
            self.flush_now(ns)

    def flush_now(self, ns: bytes | None) -> None:
        flushed = self.cache.flush(ns, self.now)
        self.drain()
        assert flushed == (*self.model.flush(ns), self.model.counter)

    @rule(pages=st.integers(0, 4))
    def sweep(self, pages: int) -> None:
        left = self.cache.sweep(pages)
        for write in self.drain():
            assert isinstance(write, Free)
            self.model.swept(list(write.frames))
        assert left == len(self.model.left)

    # -- after every step ----------------------------------------------------------------------------

    @invariant()
    def checks_itself(self) -> None:
        self.cache.check()
        self.cache.check(budget=3)

    @invariant()
    def same_counts(self) -> None:
        stats, model = self.cache.stats(), self.model
        pages = [page for tree in model.trees.values() for page in tree.values()]
        assert stats["frames_free"] == len(model.free)
        assert stats["frames_ready"] == sum(page.state == READY for page in pages)
        assert stats["frames_writing"] == sum(page.state == WRITING for page in pages)
        assert stats["frames_clearing"] == len(model.left)
        assert stats["frames_held"] == model.total_held()
        assert stats["leases"] == len(model.leases)
        assert stats["sessions"] == len(model.sessions)
        assert stats["hits"] == model.hits

    @invariant()
    def same_table(self) -> None:
        table, model = self.table, self.model
        assert table.state[: model.limit] == [state for _, state in sorted(model.states().items())]
        assert len(table.sessions) == len(model.sessions)
        for record in table.sessions.values():
            assert record.last_number == model.sessions[record.sid].last
        visible = set()
        names = {record.ns: -1 - record.ns_index for record in table.spaces.values()}
        for ns, tree in model.trees.items():
            for path, page in tree.items():
                above = tree[path[:-1]].frame if len(path) > 1 else names[ns]
                assert table.key[page.frame] == keys(path)[-32:]
                assert table.parent[page.frame] == above
                if model.matched(ns, path, True) == len(path):
                    visible.add((ns, keys(path)[-32:]))
        assert table.visible() == visible
        records = {(record.sid, record.number): record for record in table.leases.values()}
        assert set(records) == set(model.leases)
        for key, lease in model.leases.items():
            self.same_record(records[key], lease)

    def same_record(self, record: Any, lease: ModelLease) -> None:
        deepest, pages = -1, 0
        if lease.path is not None:
            deepest, pages = self.model.trees[lease.ns][lease.path].frame, len(lease.path)
        elif lease.kept:
            deepest, pages = lease.kept[-1], len(lease.kept)
        assert (record.kind, record.deepest_frame, record.pages) == (lease.kind, deepest, pages)
        assert record.quiet_mask == sum(1 << rank for rank in lease.quiet)


TestHostCacheMachine = HostCacheMachine.TestCase
TestHostCacheMachine.settings = machine_settings(100, 50)
