"""Loads and offloads: asked once a step, granted in the next, copied, ended; and what goes wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.config import Options
from kvtier.errors import Status, UsageError
from kvtier.layout import KVLayout, Plane
from kvtier.planner import Planner
from kvtier.tasks import TaskState
from kvtier.wire.messages import Abort, BeginStore, Finish, Lookup
from kvtier.wire.plan import Cancel, Kind, Lane, Reason, decode
from tests.planner.doubles import LAYOUT, FakeClient, FakeMovers, chain_of

PAGE_BYTES = LAYOUT.page_bytes


class Engine:
    """A planner between its doubles; `step` is an engine's step, all answers come between steps."""

    def __init__(self, frames=64, ranks=1, layout=LAYOUT, **options):
        self.client = FakeClient(frames, layout=layout)
        settings = Options(**{"min_load_tokens": 8, "write": "all", **options})
        self.planner = Planner(self.client, ranks, settings, clock=self.client.clock)
        self.movers = FakeMovers(self.client, ranks)

    def step(self):
        final = self.planner.update(self.movers.progress)
        self.movers.apply(self.planner.plan())
        return final

    def lookup(self, request, chain, computed=0):
        self.client.auto = True
        hit = self.planner.lookup(request, chain, computed)
        self.client.auto = False
        return hit

    def until_final(self, steps=8):
        """Steps in which everything is answered and copied."""
        final = []
        for _ in range(steps):
            final += self.step()
            self.client.serve()
            self.movers.finish_all()
        return final

    def settled(self):
        """Stopped, everything comes to its end and nothing is left anywhere."""
        self.planner.stop()
        self.until_final(3)
        self.client.serve()
        assert not self.client.leases
        stats = self.planner.stats()
        assert (stats["live_tasks"], stats["inflight_bytes"], self.planner.copying) == (0, 0, 0)
        self.client.check()
        return stats


def skipped(stats):
    return {
        name.removeprefix("pages_skipped_"): count
        for name, count in stats.items()
        if name.startswith("pages_skipped_") and count
    }


def test_an_offload_is_asked_in_one_step_granted_in_the_next_and_final_when_copied():
    engine = Engine()
    chain = chain_of(32)
    task = engine.planner.offload("r", chain, range(100, 132))
    engine.step()  # the epoch is learnt first: nothing was looked up
    engine.client.serve()
    engine.step()
    assert sum(isinstance(body, BeginStore) for body in engine.client.posted) == 1
    assert not engine.movers.copies
    engine.client.serve()
    assert task.state is TaskState.QUEUED
    engine.step()
    (copy,) = engine.movers.copies
    assert (copy.kind, copy.lane, list(copy.units)) == (Kind.OFFLOAD, Lane.OFFLOADS, list(range(100, 132)))
    assert task.state is TaskState.COPYING
    assert engine.step() == []
    engine.movers.finish_all()
    assert engine.step() == [task]
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 4, "")
    engine.client.serve()
    assert engine.client.visible(chain) == 4  # P15: finished means visible
    engine.settled()


def test_all_offloads_of_a_step_are_asked_for_in_one_message():
    engine = Engine()
    chains = {str(n): chain_of(range(n * 100, n * 100 + 16)) for n in range(5)}
    for name, chain in chains.items():
        engine.lookup(name, chain)
        engine.planner.offload(name, chain, range(16))
    engine.step()
    stores = [body for body in engine.client.posted if isinstance(body, BeginStore)]
    assert [len(body.chains) for body in stores] == [5]
    assert len(engine.until_final()) == 5
    engine.settled()


def test_a_load_copies_the_frames_of_its_hit_into_its_units():
    engine = Engine()
    chain = chain_of(33)
    engine.client.store(chain)
    hit = engine.lookup("r", chain, 11)
    units = np.arange(200, 200 + hit.tokens)
    task = engine.planner.load(hit, units)
    units[:] = 0  # the caller's array is the caller's
    assert task.state is TaskState.QUEUED
    engine.step()
    (copy,) = engine.movers.copies
    frames = [engine.client.pages[chain.keys[at : at + 32]].frame for at in (32, 64, 96)]
    assert (list(copy.frames), copy.first) == (frames, 3)
    assert list(copy.gens) == [engine.client.gens[frame] for frame in frames]
    assert list(copy.units) == list(range(200, 221))
    assert copy.kind is Kind.LOAD
    engine.movers.finish_all()
    assert engine.step() == [task]
    assert (task.state, task.first, task.tokens) == (TaskState.DONE, 11, 21)
    assert any(isinstance(body, Finish) for body in engine.client.posted)
    engine.settled()


def test_long_loads_do_not_hold_up_short_ones():
    layout = KVLayout(8, ((Plane("kv", 1 << 20),),), "large")  # 8 MiB a page
    engine = Engine(layout=layout, frames=256)
    long, short = chain_of(64, layout=layout), chain_of(range(1000, 1017), layout=layout)
    for name, chain in (("long", long), ("short", short)):
        engine.client.store(chain)
        engine.planner.load(hit := engine.lookup(name, chain), range(hit.tokens))
    engine.step()
    assert [copy.lane for copy in engine.movers.copies] == [Lane.LONG_LOADS, Lane.SHORT_LOADS]
    engine.movers.finish(lane=int(Lane.SHORT_LOADS))
    assert [task.request for task in engine.step()] == ["short"]
    engine.movers.finish(lane=int(Lane.LONG_LOADS))
    assert [task.request for task in engine.step()] == ["long"]


def test_final_tasks_come_in_the_order_in_which_they_were_made():
    engine = Engine()
    stored, new = chain_of(32), chain_of(range(500, 532))
    engine.client.store(stored)
    engine.lookup("b", new)
    first = engine.planner.offload("b", new, range(32))
    engine.step()
    engine.client.serve()
    second = engine.planner.load(engine.lookup("a", stored), range(31))
    engine.step()
    engine.movers.finish(lane=int(Lane.SHORT_LOADS))
    engine.movers.finish(lane=int(Lane.OFFLOADS))
    assert engine.step() == [first, second]


def test_chunked_prefill_stores_each_page_once_and_hangs_under_pages_still_being_written():
    engine = Engine()
    chain = chain_of(64)
    engine.lookup("r", chain)
    tasks = []
    for end in (13, 30, 48, 64):
        tasks.append(engine.planner.offload("r", chain, range(end)))
        engine.step()
        engine.client.serve()
    assert [(task.start_page, task.pages) for task in tasks] == [(0, 1), (1, 2), (3, 3), (6, 2)]
    engine.until_final()
    assert engine.client.visible(chain) == 8
    assert [int(copy.units[0]) for copy in engine.movers.copies] == [0, 8, 24, 48]
    engine.settled()


def test_a_call_with_nothing_new_sends_nothing_and_comes_back():
    engine = Engine()
    chain = chain_of(16)
    engine.lookup("r", chain)
    engine.planner.offload("r", chain, range(16))
    engine.until_final()
    posted = len(engine.client.posted)
    task = engine.planner.offload("r", chain, range(16))
    assert task.final
    assert engine.step() == [task]
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "")
    assert len(engine.client.posted) == posted


def test_what_others_have_stored_is_not_copied_again():
    engine = Engine()
    chain = chain_of(64)
    engine.lookup("r", chain)
    engine.client.store(chain, pages=5)
    task = engine.planner.offload("r", chain, range(64))
    engine.until_final()
    assert (task.start_page, task.pages) == (5, 3)
    assert list(engine.movers.copies[0].units) == list(range(40, 64))
    stats = engine.settled()
    assert (stats["pages_known"], stats["pages_stored"]) == (5, 3)


def test_everything_stored_already_is_done_with_no_page():
    engine = Engine()
    chain = chain_of(64)
    engine.lookup("r", chain)
    engine.client.store(chain)
    task = engine.planner.offload("r", chain, range(64))
    engine.until_final()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "stored")
    engine.settled()


def test_start_is_where_the_units_begin():
    engine = Engine()
    chain = chain_of(64)
    engine.client.store(chain, pages=3)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(24, 64), start=24)
    engine.until_final()
    assert (task.start_page, task.pages) == (3, 5)
    assert list(engine.movers.copies[0].units) == list(range(24, 64))
    engine.settled()


def test_a_page_evicted_before_the_units_begin_is_a_hole_and_stored_by_a_later_call():
    engine = Engine()
    chain = chain_of(64)
    engine.client.store(chain, pages=4)
    engine.lookup("r", chain)
    engine.planner.forget("r")
    engine.step()
    engine.client.serve()
    engine.lookup("r", chain)  # 4 pages are known to be there
    engine.planner.cancel("r")
    engine.client.serve()
    engine.lookup("r", chain_of(64))
    for key in [chain.keys[at : at + 32] for at in (64, 96)]:
        page = engine.client.pages.pop(key)
        engine.client.free.append(page.frame)
    for lease in engine.client.leases.values():
        lease.pinned = lease.pinned[:2]
    task = engine.planner.offload("r", chain, range(64))
    assert task.start_page == 4
    engine.until_final()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "hole")
    again = engine.planner.offload("r", chain, range(64))
    engine.until_final()
    assert (again.start_page, again.pages) == (2, 6)
    assert engine.client.visible(chain) == 8


def test_a_full_pool_takes_what_fits_and_the_rest_comes_later():
    engine = Engine(frames=4)
    chain = chain_of(64)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(64))
    engine.until_final()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 4, "full")
    assert skipped(engine.planner.stats()) == {"full": 4}
    posted = len(engine.client.posted)
    early = engine.planner.offload("r", chain, range(64))
    assert (early.reason, len(engine.client.posted)) == ("full", posted)  # not at once again
    engine.client.clock.now += 0.051
    later = engine.planner.offload("r", chain, range(64))
    assert (later.start_page, later.state) == (4, TaskState.QUEUED)
    engine.until_final()
    assert (later.state, later.pages, later.reason) == (TaskState.DONE, 0, "full")
    engine.settled()


def test_above_the_in_flight_limit_an_offload_is_cut_and_tried_again_from_the_first_page_not_stored():
    engine = Engine(max_inflight_bytes=3 * PAGE_BYTES)
    chain = chain_of(64)
    engine.lookup("r", chain)
    first = engine.planner.offload("r", chain, range(64))
    second = engine.planner.offload("r", chain, range(64))
    assert (first.pages, first.reason) == (3, "inflight")
    assert (second.state, second.pages, second.reason) == (TaskState.DONE, 0, "inflight")
    assert engine.planner.stats()["inflight_bytes"] == 3 * PAGE_BYTES
    engine.until_final()
    third = engine.planner.offload("r", chain, range(64))
    engine.until_final()
    assert (third.start_page, third.pages) == (3, 3)
    assert skipped(engine.settled()) == {"inflight": 5 + 5 + 2}


def test_a_page_larger_than_the_limit_goes_alone():
    engine = Engine(max_inflight_bytes=1)
    chain = chain_of(32)
    engine.lookup("r", chain)
    assert engine.planner.offload("r", chain, range(32)).pages == 1
    assert engine.planner.offload("r", chain, range(32)).pages == 0
    engine.until_final()
    engine.settled()


@pytest.mark.parametrize(("policy", "pages"), [("prompt", 4), ("all", 6), ("off", 0)])
def test_write_policies(policy, pages):
    engine = Engine(write=policy)
    chain = chain_of(35)
    engine.lookup("r", chain)
    engine.planner.offload("r", chain, range(35))
    chain.extend(list(range(35, 50)))  # generated
    engine.planner.offload("r", chain, range(50))
    engine.until_final()
    assert engine.client.visible(chain) == pages
    engine.settled()


def test_only_tokens_whose_units_are_given_are_stored():
    engine = Engine()
    chain = chain_of(64)
    engine.lookup("r", chain)
    assert engine.planner.offload("r", chain, range(39)).pages == 4
    assert engine.planner.offload("r", chain, range(40, 64), start=40).pages == 3


def test_units_of_several_tokens():
    layout = KVLayout(8, ((Plane("a", 16, 4),),), "coarse")
    engine = Engine(layout=layout)
    chain = chain_of(33, layout=layout)
    engine.lookup("r", chain)
    engine.planner.offload("r", chain, range(50, 59))
    engine.until_final()
    (copy,) = engine.movers.copies
    assert list(copy.units) == list(range(50, 58))
    hit = engine.lookup("other", chain, 4)
    engine.planner.load(hit, range(70, 77))
    engine.until_final()
    assert engine.movers.copies[1].first == 4
    engine.settled()


def test_a_store_waits_for_the_epoch_and_is_skipped_when_nobody_tells():
    engine = Engine()
    task = engine.planner.offload("r", chain_of(32), range(32))
    engine.step()
    assert isinstance(engine.client.posted[-1], Lookup)
    engine.client.late()
    engine.step()
    engine.step()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "away")
    engine.settled()


def test_kv_older_than_a_flush_is_not_stored_and_not_asked_for_again():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    engine.client.epoch += 1  # R13
    task = engine.planner.offload("r", chain, range(32))
    engine.until_final()
    assert (task.pages, task.reason) == (0, "flushed")
    posted = len(engine.client.posted)
    engine.client.clock.now += 1000
    assert engine.planner.offload("r", chain, range(32)).reason == "flushed"
    assert len(engine.client.posted) == posted
    engine.planner.forget("r")
    engine.lookup("r", chain)
    assert engine.planner.offload("r", chain, range(32)).pages == 4
    engine.until_final()
    engine.settled()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(Status.BUSY, "busy"), (Status.FULL, "full"), (Status.GONE, "away"), (Status.BAD, "refused")],
)
def test_a_refused_store_is_a_finished_task_with_no_page(status, reason):
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    engine.client.refuse = status
    task = engine.planner.offload("r", chain, range(32))
    engine.until_final()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, reason)
    assert skipped(engine.settled()) == {reason: 4}


def test_an_absent_sidecar_finishes_offloads_at_once():
    engine = Engine()
    engine.client.down = True
    task = engine.planner.offload("r", chain_of(32), range(32))
    engine.step()
    assert engine.step() == [task]
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "away")


def test_a_failed_load_says_so_and_gives_its_lease_back():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    task = engine.planner.load(engine.lookup("r", chain), range(31))
    engine.step()
    engine.movers.finish(failure=Reason.CHANGED)
    assert engine.step() == [task]
    assert (task.state, task.reason) == (TaskState.FAILED, "changed")
    stats = engine.settled()
    assert (stats["protocol_violations"], stats["tokens_load_failed"], stats["tokens_loaded"]) == (1, 31, 0)


def test_a_failed_offload_is_aborted_and_its_pages_are_tried_again():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(32))
    engine.step()
    engine.client.serve()
    engine.step()
    engine.movers.finish(failure=Reason.BROKEN)
    assert engine.step() == [task]
    assert (task.state, task.reason) == (TaskState.FAILED, "broken")
    engine.client.serve()
    assert engine.client.visible(chain) == 0
    again = engine.planner.offload("r", chain, range(32))
    engine.until_final()
    assert (again.start_page, again.pages, engine.client.visible(chain)) == (0, 4, 4)
    engine.settled()


def test_pages_dropped_with_their_ancestor_are_counted_and_stored_again():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    engine.planner.offload("r", chain, range(16))
    engine.step()
    engine.client.serve()
    engine.planner.offload("r", chain, range(32))
    engine.step()
    engine.client.serve()
    engine.step()
    engine.movers.finish(failure=Reason.BROKEN)  # the first two pages
    engine.until_final()
    assert engine.planner.stats()["pages_dropped"] == 2  # R7
    again = engine.planner.offload("r", chain, range(32))
    engine.until_final()
    assert (again.start_page, engine.client.visible(chain)) == (0, 4)
    engine.settled()


def test_pages_dropped_with_anothers_are_stored_again():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("q", chain)
    engine.lookup("r", chain)
    engine.planner.offload("q", chain, range(16))
    engine.step()
    engine.client.serve()
    below = engine.planner.offload("r", chain, range(32))
    engine.step()
    engine.client.serve()
    engine.step()
    engine.movers.finish(failure=Reason.BROKEN)  # of q, under which r's pages hang
    engine.until_final()
    assert (below.start_page, below.pages, engine.client.visible(chain)) == (2, 2, 0)
    for _ in range(2):  # a hole first: its units were not at hand
        engine.planner.offload("r", chain, range(32))
        engine.until_final()
        engine.client.clock.now += 0.1
    assert engine.client.visible(chain) == 4
    engine.settled()


def test_requests_that_were_stored_are_forgotten_in_the_end():
    engine = Engine(frames=8)
    for number in range(4200):
        chain = chain_of(range(number, number + 9))
        engine.lookup(str(number), chain)
        engine.planner.offload(str(number), chain, range(9))
        engine.until_final(3)
    assert engine.planner.stats()["known_requests"] == 4096


def test_more_failures_than_the_ring_holds_fail_whatever_finished_meanwhile():
    engine = Engine(frames=256)
    tasks = []
    for number in range(80):
        chain = chain_of(range(number * 100, number * 100 + 9))
        engine.lookup(str(number), chain)
        tasks.append(engine.planner.offload(str(number), chain, range(8)))
    engine.step()
    engine.client.serve()
    engine.step()
    for _ in range(80):
        engine.movers.finish(failure=Reason.BROKEN)
    assert engine.step() == tasks
    assert all(task.state is TaskState.FAILED for task in tasks)
    assert {task.reason for task in tasks} == {"broken", "unknown"}
    engine.settled()


# --- cancel ---


def test_cancel_before_anything_was_asked():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(32))
    engine.planner.cancel("r")
    assert engine.step() == [task]
    assert task.state is TaskState.CANCELLED
    assert not any(isinstance(body, BeginStore) for body in engine.client.posted)
    engine.settled()


def test_cancel_between_asking_and_the_grant_undoes_the_grant():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(32))
    engine.step()
    engine.planner.cancel("r")
    assert engine.step() == [task]
    assert task.state is TaskState.CANCELLED
    engine.client.serve()
    engine.settled()
    assert engine.client.visible(chain) == 0


def test_cancel_after_the_grant_gives_the_frames_back():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(32))
    engine.step()
    engine.client.serve()
    engine.planner.update(engine.movers.progress)
    engine.planner.cancel("r")
    assert engine.step() == [task]
    assert task.state is TaskState.CANCELLED
    assert not engine.movers.copies
    engine.settled()


def test_cancel_of_a_queued_load_gives_its_lease_back():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    task = engine.planner.load(engine.lookup("r", chain), range(31))
    engine.planner.cancel("r")
    assert engine.step() == [task]
    assert task.state is TaskState.CANCELLED
    assert not engine.movers.copies
    engine.settled()


@pytest.mark.parametrize("begun", [False, True])
def test_cancel_of_a_copy_that_the_mover_has(begun):
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    task = engine.planner.load(engine.lookup("r", chain), range(31))
    engine.step()
    if begun:
        engine.movers.begin(0, engine.movers.lanes()[0])
    engine.planner.cancel("r")
    assert engine.step() == []
    assert task.state is TaskState.COPYING
    assert engine.client.leases  # frames are held until the task is final
    engine.movers.finish_all()
    assert engine.step() == [task]
    expected = (TaskState.DONE, "") if begun else (TaskState.FAILED, "cancelled")
    assert (task.state, task.reason) == expected
    engine.settled()


def test_a_plan_says_cancel_once():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    task = engine.planner.load(engine.lookup("r", chain), range(31))
    engine.step()
    engine.planner.cancel("r")
    assert decode(engine.planner.plan()).commands == [Cancel(task.id)]
    assert decode(engine.planner.plan()).commands == []


def test_forget_lets_tasks_run_on():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    task = engine.planner.offload("r", chain, range(32))
    engine.planner.forget("r")
    assert engine.until_final() == [task]
    assert (task.state, engine.client.visible(chain)) == (TaskState.DONE, 4)
    engine.settled()


# --- the sidecar goes, and another comes ---


def test_a_new_session_fails_what_has_not_begun_and_forgets_old_leases():
    engine = Engine()
    stored, new = chain_of(32), chain_of(range(500, 532))
    engine.client.store(stored)
    hit = engine.lookup("kept", stored)
    load = engine.planner.load(engine.lookup("r", stored), range(31))
    engine.lookup("w", new)
    asked = engine.planner.offload("w", new, range(32))
    engine.client.drop_session()
    assert engine.step() == [load, asked]
    assert {(task.state, task.reason) for task in (load, asked)} == {(TaskState.FAILED, "gone")}
    late = engine.planner.load(hit, range(31))  # the hit was offered in good faith
    assert (late.state, late.reason) == (TaskState.FAILED, "gone")
    assert engine.step() == [late]
    assert engine.planner.stats()["held_pages"] == 0
    assert engine.lookup("kept", stored).reason == "absent"
    again = engine.planner.offload("w", new, range(32))
    engine.until_final()
    assert (again.start_page, again.state) == (0, TaskState.DONE)
    engine.settled()


def test_what_is_asked_of_a_session_that_was_not_noticed_yet_is_not_lost_with_the_old_one():
    engine = Engine()
    chain = chain_of(32)
    engine.client.drop_session()
    engine.client.store(chain)
    engine.planner.ask("r", chain)  # the client has a new session, nobody has polled since
    engine.client.serve()
    assert engine.planner.lookup("r", chain, 0).tokens == 31
    engine.settled()


def test_ends_that_an_old_session_was_owed_do_not_reach_the_new_one():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    engine.lookup("r", chain)
    engine.planner.cancel("r")  # its abort waits for the next step
    engine.client.drop_session()
    engine.client.posted.clear()
    engine.step()
    assert engine.client.posted == []


def test_copies_under_way_come_back_after_a_new_session_and_end_no_lease_of_it():
    engine = Engine()
    stored, new = chain_of(32), chain_of(range(500, 532))
    engine.client.store(stored)
    load = engine.planner.load(engine.lookup("r", stored), range(31))
    engine.lookup("w", new)
    offload = engine.planner.offload("w", new, range(32))
    engine.step()
    engine.client.serve()
    engine.step()
    assert load.state is offload.state is TaskState.COPYING
    engine.client.drop_session()
    engine.client.posted.clear()
    assert engine.step() == []
    engine.movers.finish_all()
    assert engine.step() == [load, offload]
    assert (load.state, offload.state, offload.reason) == (TaskState.DONE, TaskState.FAILED, "gone")
    engine.step()
    assert not any(isinstance(body, Finish | Abort) for body in engine.client.posted)
    engine.settled()


def test_an_offload_that_ends_while_nobody_is_there_promises_nothing():
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("w", chain)
    task = engine.planner.offload("w", chain, range(32))
    engine.step()
    engine.client.serve()
    engine.step()
    engine.client.drop_session(back=False)
    engine.movers.finish_all()
    assert engine.step() == [task]
    assert (task.state, task.reason) == (TaskState.FAILED, "gone")


# --- answers that cannot be true ---

LONG, NEGATIVE = np.arange(9, dtype=np.int32), np.full(4, -1, np.int32)


@pytest.mark.parametrize(
    "lie",
    [
        {"number": 77},
        {"taken": 3},
        {"frames": LONG},
        {"start": 2},
        {"start": 1, "taken": 9, "frames": LONG},
        {"frames": NEGATIVE},
    ],
)
def test_an_impossible_store_is_refused_and_undone(lie):
    engine = Engine()
    chain = chain_of(32)
    engine.lookup("r", chain)
    engine.client.distort = lambda grant: replace(grant, **lie)
    task = engine.planner.offload("r", chain, range(32))
    engine.until_final()
    assert (task.state, task.pages, task.reason) == (TaskState.DONE, 0, "refused")
    assert not engine.movers.copies
    engine.settled()


@pytest.mark.parametrize(
    "lie",
    [
        {"number": 77},
        {"frames": LONG},
        {"frames": LONG, "gens": np.ones(9, np.uint32)},
        {"gens": np.ones(3, np.uint32)},
        {"frames": NEGATIVE},
        {"frames": LONG[:0], "gens": np.ones(0, np.uint32)},
    ],
)
def test_an_impossible_load_is_a_miss_and_undone(lie):
    engine = Engine()
    chain = chain_of(33)
    engine.client.store(chain)
    engine.client.distort = lambda grant: replace(grant, **lie)
    hit = engine.lookup("r", chain)
    assert (hit.tokens, hit.reason) == (0, "refused")
    engine.settled()


# --- several ranks ---


def test_a_task_is_final_when_all_ranks_are():
    engine = Engine(ranks=3)
    chain = chain_of(32)
    engine.client.store(chain)
    task = engine.planner.load(engine.lookup("r", chain), range(31))
    engine.step()
    for rank in (2, 0):
        engine.movers.finish(rank)
        assert engine.step() == []
    engine.movers.finish(1, failure=Reason.CHANGED)
    assert engine.step() == [task]
    assert task.state is TaskState.FAILED  # one rank's failure is everybody's
    (end,) = next(body for body in engine.client.posted if isinstance(body, Abort)).ends
    assert end.quiet == (0, 1, 2)  # R9
    engine.settled()


def test_progress_of_too_few_ranks_is_a_mistake():
    engine = Engine(ranks=2)
    with pytest.raises(UsageError, match="expected 2"):
        engine.planner.update(engine.movers.progress[:1])


# --- mistakes and the end ---


def test_callers_mistakes_change_nothing():
    engine = Engine()
    chain = chain_of(32)
    for units, start in (
        ([[1]], 0),
        (["a"], 0),
        ([0.5] * 8, 0),
        (range(8), 3),
        (range(8), -8),
        ([-1] * 8, 0),
    ):
        with pytest.raises(UsageError):
            engine.planner.offload("r", chain, units, start)
    stats = engine.planner.stats()
    assert (stats["live_tasks"], stats["offloads"], stats["pages_offered"]) == (0, 0, 0)
    assert engine.planner.offload("r", chain, range(32)).pages == 4


def test_close_gives_everything_back():
    engine = Engine()
    stored, new = chain_of(32), chain_of(range(500, 532))
    engine.client.store(stored)
    engine.lookup("a", stored)
    load = engine.planner.load(engine.lookup("b", stored), range(31))
    engine.lookup("w", new)
    offload = engine.planner.offload("w", new, range(32))
    engine.planner.ask("c", stored)
    engine.client.auto = True
    engine.planner.close(1.0)
    assert {load.state, offload.state} == {TaskState.CANCELLED}
    assert not engine.client.leases
    engine.client.check()


def test_close_waits_no_longer_than_told():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    engine.lookup("a", chain)
    before = engine.client.clock.now
    engine.planner.close(0.2)
    assert engine.client.clock.now - before == pytest.approx(0.2)


def test_a_flush_through_the_own_client_voids_what_is_held():
    engine = Engine()
    chain = chain_of(32)
    engine.client.store(chain)
    hit = engine.lookup("a", chain)
    engine.planner.flushed(b"")
    task = engine.planner.load(hit, range(31))
    assert (task.state, task.reason) == (TaskState.FAILED, "gone")
    engine.settled()


def test_pages_offered_are_all_accounted_for():
    engine = Engine(frames=8, max_inflight_bytes=6 * PAGE_BYTES)
    for number in range(6):
        chain = chain_of(range(number // 2 * 100, number // 2 * 100 + 40))
        engine.lookup(str(number), chain)
        engine.planner.offload(str(number), chain, range(40))
        if number % 3 == 2:
            engine.planner.cancel(str(number))
        engine.until_final(2)
    stats = engine.settled()
    where = (
        stats["pages_stored"] + stats["pages_known"] + stats["pages_failed"] + sum(skipped(stats).values())
    )
    assert stats["pages_offered"] == where
