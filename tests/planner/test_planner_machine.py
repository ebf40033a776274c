"""A planner against everything that can happen in any order, and a naive account of what must hold.

The doubles keep frames and leases by the protocol's rules and raise when the planner breaks one. The machine
itself knows, for each task, its chain and its units, and checks at every step that: each task comes back
once and its state never goes back; a copy moves the frames of its own pages and the units of its own tokens;
its frames stay its own until it is final; unadmitted requests hold at most a quarter of the pool,
but for one; the counters add up; and that in the end no lease, frame or task is left.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvtier.config import Options
from kvtier.errors import Status
from kvtier.keys import KEY_BYTES
from kvtier.planner import Planner
from kvtier.planner.counters import MISSES
from kvtier.tasks import LoadTask, TaskState
from kvtier.wire.plan import Kind, Reason
from tests.planner.doubles import LAYOUT, FakeClient, FakeMovers, chain_of

PAGE = LAYOUT.page_tokens
NAMES = st.sampled_from("abc")
FAMILIES = st.integers(0, 1)
FRAMES = 16
LEAST = 8

FORWARD = {
    TaskState.QUEUED: set(TaskState),
    TaskState.COPYING: {TaskState.COPYING, TaskState.DONE, TaskState.FAILED},
    TaskState.DONE: {TaskState.DONE},
    TaskState.FAILED: {TaskState.FAILED},
    TaskState.CANCELLED: {TaskState.CANCELLED},
}


class Request:
    """An engine's request: tokens [0, filled) have their KV in units base, base + 1, ..."""

    def __init__(self, name: str, family: int, tokens: int, number: int) -> None:
        self.name = name
        self.chain = chain_of(range(family * 1000, family * 1000 + tokens))
        self.family = family
        self.filled = 0
        self.base = number * 1000
        self.hit = None


class PlannerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.client = FakeClient(FRAMES)
        self.ranks = 2
        self.planner = Planner(
            self.client,
            self.ranks,
            Options(min_load_tokens=LEAST, write="all", max_inflight_bytes=12 * LAYOUT.page_bytes),
            clock=self.client.clock,
        )
        self.movers = FakeMovers(self.client, self.ranks)
        self.requests: dict[str, Request] = {}
        self.made = 0
        self.tasks: dict[
            int, tuple[object, bytes, int, int]
        ] = {}  # task, keys, attachment, base of its units
        self.states: dict[int, TaskState] = {}
        self.back: list[object] = []
        self.seen_copies = 0

    # --- the engine ---

    def _request(self, name, family, tokens=60):
        """The request of this name, arriving now if there is none."""
        if name not in self.requests:
            self.made += 1
            self.requests[name] = Request(name, family, tokens, self.made)
        return self.requests[name]

    @rule(name=NAMES, family=FAMILIES, tokens=st.integers(1, 60))
    def arrive(self, name, family, tokens):
        if name not in self.requests:
            self.planner.ask(name, self._request(name, family, tokens).chain)

    @rule(
        name=NAMES,
        family=FAMILIES,
        wait=st.sampled_from([0.0, 0.001, 0.03]),
        served=st.sampled_from([True, True, False]),
        where=st.sampled_from([0, 0, 3, 8, 29, 51]),
    )
    def lookup(self, name, family, wait, served, where):
        request = self._request(name, family)
        computed = min(where, request.chain.tokens)
        before = self.client.clock.now
        self.client.auto = served
        request.hit = self.planner.lookup(name, request.chain, computed, wait)
        self.client.auto = False
        assert self.client.clock.now - before <= wait + 1e-9
        hit = request.hit
        if hit is not None:
            assert hit.first == computed
            assert hit.tokens == 0 or LEAST <= hit.tokens <= request.chain.tokens - 1 - computed
            assert hit.tokens or hit.reason

    @rule(name=NAMES, family=FAMILIES, where=st.sampled_from([0, 5, 24]), served=st.just(True))
    def lookup_and_load(self, name, family, where, served):
        self.lookup(name, family, 0.001, served, where)
        self.load(name)

    @rule(name=NAMES)
    def load(self, name):
        request = self.requests.get(name)
        if request is None or request.hit is None or not request.hit.tokens:
            return
        hit, request.hit = request.hit, None
        units = range(request.base + hit.first, request.base + hit.first + hit.tokens)
        self._made(self.planner.load(hit, units), request)
        request.filled = max(request.filled, hit.first + hit.tokens)

    @rule(
        name=NAMES,
        family=FAMILIES,
        more=st.sampled_from([7, 16, 40, 60]),
        generated=st.sampled_from([0, 0, 1, 9]),
        start=st.sampled_from([0, 0, 0, 1, 3]),
    )
    def compute_and_offload(self, name, family, more, generated, start):
        request = self._request(name, family)
        last = request.chain.tokens
        first = request.family * 1000 + last
        request.chain.extend(list(range(first, first + generated)))
        request.filled = min(request.filled + more, last)
        at = min(start * PAGE, request.filled // PAGE * PAGE)
        units = range(request.base + at, request.base + request.filled)
        self._made(self.planner.offload(name, request.chain, units, at), request)

    @rule(name=NAMES, forget=st.booleans())
    def end(self, name, forget):
        if self.requests.pop(name, None) is not None:
            (self.planner.forget if forget else self.planner.cancel)(name)

    @rule(steps=st.integers(1, 3))
    def good_steps(self, steps):
        """Everything is answered and copied at once."""
        for _ in range(steps):
            self.client.serve()
            self.step()
            self.movers.finish_all()

    @rule()
    def served_step(self):
        self.client.serve()
        self.step()

    @rule()
    def step(self):
        for task in self.planner.update(self.movers.progress):
            assert task.id in self.tasks
            assert task not in self.back
            assert task.final
            self.back.append(task)
        self.movers.apply(self.planner.plan())
        for copy in self.movers.copies[self.seen_copies :]:
            self._check_copy(copy)
        self.seen_copies = len(self.movers.copies)

    # --- everybody else ---

    @rule(count=st.integers(1, 5))
    def serve(self, count):
        self.client.serve(count)

    @rule()
    def answers_come_too_late(self):
        self.client.late()

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.06, 5.0]))
    def time_passes(self, seconds):
        self.client.clock.now += seconds

    @rule(status=st.sampled_from([None, None, None, None, Status.BUSY, Status.FULL, Status.BAD]))
    def refuse(self, status):
        self.client.refuse = status

    @rule(
        lane=st.integers(0, 2), rank=st.integers(0, 1), failure=st.sampled_from([None, None, None, *Reason])
    )
    def copy_finishes(self, lane, rank, failure):
        if lane in self.movers.lanes(rank):
            self.movers.finish(rank, lane, failure)

    @rule(lane=st.integers(0, 2), rank=st.integers(0, 1))
    def copy_begins(self, lane, rank):
        if lane in self.movers.lanes(rank):
            self.movers.begin(rank, lane)

    @rule(family=FAMILIES, pages=st.integers(1, 7))
    def somebody_else_stores(self, family, pages):
        if len(self.client.free) >= pages:
            self.client.store(chain_of(range(family * 1000, family * 1000 + 60)), pages)

    @rule(happens=st.integers(0, 5))
    def somebody_flushes(self, happens):
        self.client.epoch += not happens

    @rule(happens=st.integers(0, 7), back=st.booleans())
    def sidecar_dies_or_comes_back(self, happens, back):
        if self.client.down:
            self.client.come_back()
        elif not happens:
            self.client.drop_session(back)

    # --- what must hold ---

    def _made(self, task, request):
        assert task.id not in self.tasks
        self.tasks[task.id] = (task, request.chain.keys, self.client.attachment_no, request.base)
        self.states[task.id] = TaskState.QUEUED

    def _check_copy(self, copy):
        task, keys, attachment, base = self.tasks[copy.task]
        assert attachment == self.client.attachment_no or self.client.down or not isinstance(task, LoadTask)
        if isinstance(task, LoadTask):
            assert copy.kind is Kind.LOAD
            first, begin, count = task.first // PAGE, task.first, task.tokens
            assert copy.first == task.first % PAGE
        else:
            assert copy.kind is Kind.OFFLOAD
            first, begin, count = task.start_page, task.start_page * PAGE, task.pages * PAGE
            assert copy.first == 0
        assert list(copy.units) == list(range(base + begin, base + begin + count))
        if not self.client.down:
            wanted = [
                keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] for at in range(first, first + len(copy.frames))
            ]
            assert [self._key_of(frame) for frame in copy.frames] == wanted

    def _key_of(self, frame):
        for page in self.client.pages.values():
            if page.frame == frame:
                return page.key
        for lease in self.client.leases.values():
            for page in lease.pages:
                if page.frame == frame:
                    return page.key
        return None

    @invariant()
    def frames_of_copies_are_held(self):
        if self.client.down:
            return
        held = {page.frame for lease in self.client.leases.values() for page in (*lease.pages, *lease.pinned)}
        for copy in self.movers.copies:
            task, _, _, _ = self.tasks[copy.task]
            job = self._job(copy.task)
            if job is not None and job.attachment == self.client.attachment_no and not task.final:
                assert {int(frame) for frame in copy.frames} <= held

    def _job(self, task):
        return next((job for job in self.planner._copies.jobs() if job.task.id == task), None)

    @invariant()
    def nothing_leaks_in_the_sidecar(self):
        self.client.check()

    @invariant()
    def states_go_forward(self):
        for number, (task, _, _, _) in self.tasks.items():
            assert task.state in FORWARD[self.states[number]]
            self.states[number] = task.state

    @invariant()
    def unadmitted_requests_hold_at_most_a_quarter_but_for_one(self):
        held = sorted(record.held for record in self.planner._records.all())
        assert self.planner.stats()["held_pages"] == sum(held)
        if sum(held) > FRAMES // 4:
            large = self.planner._lookups._large
            assert large is not None
            assert sum(held) - large.held <= FRAMES // 4

    @invariant()
    def the_counters_add_up(self):
        stats = self.planner.stats()
        missed = {name: count for name, count in stats.items() if name.startswith("tokens_missed_")}
        assert stats["tokens_requested"] == stats["tokens_hit"] + sum(missed.values())
        assert min(stats.values()) >= 0
        assert {name.removeprefix("tokens_missed_") for name in missed} >= set(MISSES)
        assert stats["live_tasks"] == len(self.tasks) - len(self.back)

    def teardown(self):
        self.client.refuse = None
        if self.client.down:
            self.client.come_back()
        self.planner.stop()
        for _ in range(4):
            self.client.serve()
            self.step()
            self.movers.finish_all()
        self.client.serve()
        self.step()
        assert not self.client.leases
        assert len(self.back) == len(self.tasks)
        assert all(task.final for task, _, _, _ in self.tasks.values())
        stats = self.planner.stats()
        assert (stats["live_tasks"], stats["inflight_bytes"], stats["held_pages"]) == (0, 0, 0)
        assert stats["known_requests"] == 0
        skipped = sum(count for name, count in stats.items() if name.startswith("pages_skipped_"))
        where = stats["pages_stored"] + stats["pages_known"] + stats["pages_failed"] + skipped
        assert stats["pages_offered"] == where
        self.client.check()


def test_a_planner_survives_everything_in_any_order():
    run_state_machine_as_test(PlannerMachine, settings=settings(max_examples=200, stateful_step_count=50))
