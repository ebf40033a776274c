"""A naive host cache: every page by itself in a dict, every question answered by counting.

It predicts all answers of `HostCache` except which frames are taken and which idle pages are evicted;
for these it takes what it is told, and raises where a rule forbids it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier.core.writes import DOOMED, FREE, QUARANTINED, READY, WRITING

Path = tuple[int, ...]
LOAD, STORE = 1, 2


@dataclass
class Page:
    state: int
    frame: int
    lease: tuple[int, int] | None = None


@dataclass
class ModelLease:
    kind: int
    ns: bytes
    since: float
    path: Path | None  # what it pins in the tree
    out: list[int] = field(default_factory=list)  # frames of a store that left the tree
    kept: list[int] = field(default_factory=list)  # frames that a load reads after a flush
    place: tuple[int, Path] = (0, ())  # where those are
    quiet: set[int] = field(default_factory=set)
    ended: bool = False
    dropped: int = 0
    superseded: int = 0
    granted: int = 0

    @property
    def charge(self) -> int:
        return len(self.path) if self.path is not None else len(self.kept) or len(self.out)


@dataclass
class ModelSession:
    group: str
    role: str
    rank: int
    last: int = 0
    suspect: bool = False
    closed: bool = False
    dead: bool = False


@dataclass
class ModelGroup:
    ranks: int
    planner: int | None = None
    movers: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    complete: bool = False
    used: bool = False


class Model:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.free = set(range(limit))
        # What flushes left: frame -> (tree, path, state in the table).
        self.left: dict[int, tuple[int, Path, int]] = {}
        self.trees: dict[bytes, dict[Path, Page]] = {}
        self.epochs: dict[bytes, int] = {}
        self.counter = self.absent = 1
        self.leases: dict[tuple[int, int], ModelLease] = {}
        self.sessions: dict[int, ModelSession] = {}
        self.groups: dict[str, ModelGroup] = {}
        self.evicted: set[int] = set()
        self.hits = 0
        self.dropped_trees = 0

    # -- counting ------------------------------------------------------------------------------------

    def tree(self, ns: bytes) -> dict[Path, Page]:
        return self.trees.setdefault(ns, {})

    def epoch(self, ns: bytes) -> int:
        return self.epochs.get(ns, self.absent)

    def held(self, ns: bytes, path: Path) -> bool:
        return any(
            lease.ns == ns and lease.path is not None and lease.path[: len(path)] == path
            for lease in self.leases.values()
        )

    def idle(self) -> int:
        return sum(not self.held(ns, path) for ns, tree in self.trees.items() for path in tree)

    def kept(self) -> set[int]:
        return {frame for lease in self.leases.values() for frame in lease.kept}

    def total_held(self) -> int:
        pages = sum(len(tree) for tree in self.trees.values())
        return pages - self.idle() + sum(len(lease.out) for lease in self.leases.values()) + len(self.kept())

    def cap(self) -> int:
        engines = sum(group.complete for group in self.groups.values())
        return max(self.limit // (1 + max(engines, 1)), 1)

    def charge(self, sid: int) -> int:
        return sum(lease.charge for key, lease in self.leases.items() if key[0] == sid)

    def matched(self, ns: bytes, path: Path, only_ready: bool) -> int:
        tree = self.tree(ns)
        for count in range(len(path)):
            page = tree.get(path[: count + 1])
            if page is None or (only_ready and page.state != READY):
                return count
        return len(path)

    def refusal(self, sid: int) -> bool:
        session = self.sessions[sid]
        group = self.groups[session.group]
        movers = [self.sessions[mover] for mover in group.movers.values()]
        whole = group.complete and len(movers) == group.ranks
        return not whole or session.suspect or any(m.suspect or m.closed for m in movers)

    # -- begins --------------------------------------------------------------------------------------

    def load_pages(self, sid: int, ns: bytes, path: Path) -> tuple[int, int]:
        """Visible pages, and how many of them the session may pin."""
        ready = self.matched(ns, path, True)
        held = sum(self.held(ns, path[: count + 1]) for count in range(ready))
        by_sum = self.cap() - self.charge(sid)
        by_all = held + self.cap() - self.total_held() if self.total_held() <= self.cap() else 0
        return ready, max(min(ready, max(by_sum, by_all)), 0)

    def load(
        self, sid: int, number: int, ns: bytes, path: Path, pages: int, first: int, now: float
    ) -> list[int]:
        self.groups[self.sessions[sid].group].used = True
        self.leases[sid, number] = ModelLease(LOAD, ns, now, path[:pages], granted=pages - first)
        return [self.tree(ns)[path[: count + 1]].frame for count in range(first, pages)]

    def store_plan(self, sid: int, ns: bytes, path: Path, stale_before: float) -> tuple[int, int, int, int]:
        """start, want, pending, and how many frames may be taken."""
        tree = self.tree(ns)
        match = self.matched(ns, path, False)
        writing = [
            self.leases[tree[path[: at + 1]].lease].since if tree[path[: at + 1]].state == WRITING else None
            for at in range(match)
        ]
        stale = [since is not None and since < stale_before for since in writing]
        start = stale.index(True) if True in stale else match
        stop = start
        while stop < match and stale[stop]:
            stop += 1
        want = len(path) - start if stop == match else stop - start
        pending = sum(since is not None and not start <= at < stop for at, since in enumerate(writing))
        newly = sum(not self.held(ns, path[: at + 1]) for at in range(match))
        room = max(self.cap() - self.charge(sid) - start, self.cap() - self.total_held() - newly)
        can = len(self.free) + len(self.left) + self.idle() - newly
        return start, want, pending, max(min(want, room, can), 0)

    def store(
        self, sid: int, number: int, ns: bytes, path: Path, start: int, frames: list[int], now: float
    ) -> None:
        tree = self.tree(ns)
        self.epochs.setdefault(ns, self.absent)
        for at, frame in enumerate(frames, start):
            assert frame in self.free or frame in self.evicted, f"frame {frame} was not free"
            self.free.discard(frame)
            old = tree.get(path[: at + 1])
            if old is not None:
                loser = self.leases[old.lease]
                loser.out.append(old.frame)
                loser.superseded += 1
            tree[path[: at + 1]] = Page(WRITING, frame, (sid, number))
        assert len(set(frames)) == len(frames)
        self.groups[self.sessions[sid].group].used = True
        self.leases[sid, number] = ModelLease(STORE, ns, now, path[: start + len(frames)])
        for key, lease in self.leases.items():
            owns = any(page.lease == key for page in tree.values())
            if lease.kind == STORE and lease.path is not None and lease.ns == ns and not owns:
                lease.path = None

    def evict(self, frames: list[int]) -> None:
        """Frames that were freed for a store: pages that nobody holds, tails first."""
        for frame in frames:
            ns, path = next(
                (ns, p) for ns, t in self.trees.items() for p, page in t.items() if page.frame == frame
            )
            tree = self.trees[ns]
            assert tree[path].state == READY
            assert not self.held(ns, path), "a held page was evicted"
            assert not any(len(other) > len(path) and other[: len(path)] == path for other in tree), (
                "not a tail"
            )
            del tree[path]
            self.free.add(frame)

    # -- ends ----------------------------------------------------------------------------------------

    def settled(self, key: tuple[int, int]) -> bool:
        group = self.groups[self.sessions[key[0]].group]
        return self.leases[key].quiet | group.gone >= set(range(group.ranks))

    def doom(self, ns: bytes, top: Path) -> int:
        """A writer's page is lost, and all below it; how many READY ones."""
        tree = self.tree(ns)
        freed = 0
        for path in [path for path in tree if path[: len(top)] == top]:
            page = tree.pop(path)
            if page.state == READY:
                self.free.add(page.frame)
                freed += 1
            else:
                lease = self.leases[page.lease]
                lease.out.append(page.frame)
                lease.dropped += 1
        for lease in self.leases.values():
            if lease.ns == ns and lease.path is not None and lease.path[: len(top)] == top:
                lease.path = None
        return freed

    def own(self, key: tuple[int, int]) -> list[Path]:
        tree = self.tree(self.leases[key].ns)
        return sorted((path for path, page in tree.items() if page.lease == key), key=len)

    def end(self, key: tuple[int, int], quiet: set[int], whole: bool) -> tuple[int, int, int]:
        """visible, dropped, superseded."""
        lease = self.leases[key]
        tree = self.tree(lease.ns)
        lease.quiet |= quiet
        lease.ended = True
        visible = 0
        if lease.kind == LOAD and whole:
            self.hits += lease.granted
        own = self.own(key)
        if own:
            ranks = self.groups[self.sessions[key[0]].group].ranks
            if whole and lease.quiet == set(range(ranks)):
                for path in own:
                    tree[path].state, tree[path].lease = READY, None
                visible = sum(
                    all(tree[path[: at + 1]].state == READY for at in range(len(path))) for path in own
                )
                lease.path = None
            else:
                self.doom(lease.ns, own[0])
        answer = visible, lease.dropped, lease.superseded
        self.settle(key)
        return answer

    def settle(self, key: tuple[int, int]) -> None:
        lease = self.leases[key]
        if not lease.ended or not self.settled(key):
            return
        del self.leases[key]
        self.free.update(lease.out)
        for depth in range(len(lease.kept), 0, -1):
            frame, at = lease.kept[depth - 1], (lease.place[0], lease.place[1][:depth])
            if frame in self.kept():
                continue
            if any(tree == at[0] and path[:depth] == at[1] for tree, path, _ in self.left.values()):
                self.left[frame] = (*at, DOOMED)  # goes when all below has been swept
            else:
                self.free.add(frame)
        if self.sessions[key[0]].dead and not any(other[0] == key[0] for other in self.leases):
            self.forget(key[0])

    def forget(self, sid: int) -> None:
        session = self.sessions.pop(sid)
        group = self.groups[session.group]
        group.complete = group.complete and group.used
        if session.role == "planner":
            group.planner = None
        else:
            del group.movers[session.rank]
            if group.complete:
                group.gone.add(session.rank)
        if group.planner is None and not group.movers:
            del self.groups[session.group]

    def leave(self, sid: int, quiet: bool) -> None:
        session = self.sessions[sid]
        group = self.groups[session.group]
        said = set(range(group.ranks)) if quiet else set()
        if session.role == "planner":
            session.dead = True
            for key in [key for key in self.leases if key[0] == sid]:
                if key not in self.leases:
                    continue
                if self.leases[key].ended:
                    self.leases[key].quiet |= said
                    self.settle(key)
                else:
                    self.end(key, said, whole=False)
            if sid in self.sessions and not any(key[0] == sid for key in self.leases):
                self.forget(sid)
            return
        self.forget(sid)
        for key in [key for key in self.leases if key[0] == group.planner]:
            if key in self.leases:
                self.settle(key)

    # -- flush ---------------------------------------------------------------------------------------

    def flush(self, ns: bytes | None) -> tuple[int, int]:
        self.counter += 1
        self.absent = self.counter
        freed = doomed = 0
        for name in [name for name in self.epochs if ns is None or name == ns]:
            self.dropped_trees += 1
            del self.epochs[name]
            tree = self.trees.pop(name)
            self.trees[name] = {}
            read: dict[Path, int] = {}
            stores = [
                (key, lease) for key, lease in self.leases.items() if lease.ns == name and lease.kind == STORE
            ]
            for key, lease in stores:
                mine = [page.frame for page in tree.values() if page.lease == key]
                lease.out += mine
                lease.dropped += len(mine)
                lease.path = None
                doomed += len(mine)
            for lease in self.leases.values():
                if lease.ns == name and lease.path is not None:
                    lease.kept = [tree[lease.path[: at + 1]].frame for at in range(len(lease.path))]
                    lease.place = (self.dropped_trees, lease.path)
                    read.update({lease.path[: at + 1]: 1 for at in range(len(lease.path))})
                    lease.path = None
            doomed += len(read)
            for path, page in tree.items():
                if page.state != READY or path in read:
                    continue
                freed += 1
                # What hung under a writer is freed at once, the rest is left to the sweeper.
                under = any(tree[path[: at + 1]].state == WRITING for at in range(len(path)))
                if under:
                    self.free.add(page.frame)
                else:
                    self.left[page.frame] = (self.dropped_trees, path, READY)
        return freed, doomed

    def swept(self, frames: list[int]) -> None:
        """The sweeper freed these: tails before heads, and none that a reader's page hangs below."""
        for frame in frames:
            tree, path, _ = self.left.pop(frame)
            below = [(t, p) for t, p, _ in self.left.values()]
            below += [lease.place for lease in self.leases.values() if lease.kept]
            assert not any(t == tree and p[: len(path)] == path for t, p in below), (
                "freed before what is below"
            )
            self.free.add(frame)

    # -- the table -----------------------------------------------------------------------------------

    def states(self) -> dict[int, int]:
        """What the shared table must say of each frame."""
        states = dict.fromkeys(self.free, FREE)
        for tree in self.trees.values():
            states.update({page.frame: page.state for page in tree.values()})
        for lease in self.leases.values():
            states.update(dict.fromkeys(lease.out, QUARANTINED if lease.ended else DOOMED))
            states.update(dict.fromkeys(lease.kept, DOOMED))
        states.update({frame: state for frame, (_, _, state) in self.left.items()})
        return states
