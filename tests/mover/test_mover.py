"""The mover over a fake session: what it copies, in what order, behind which edges, and how it ends."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from kvtier.device.base import KVBuffers, Piece
from kvtier.device.cpu import CpuEvent, CpuStream, fired
from kvtier.device.testing import HeldCopier, HeldStream
from kvtier.errors import GeometryError, ProtocolError, UsageError, WrongThreadError
from kvtier.mover import Mover
from kvtier.mover.lanes import Job
from kvtier.wire.plan import FAILURES, PROGRESS_WORDS, Cancel, Kind, Lane, Progress, Reason, encode, pool_tag
from tests.device import buffers as shapes
from tests.mover.fakes import POOL, FakeClient, rig

SHORT_S = 0.2
"""Long enough for a copy that nothing holds back to be over (it takes well under a millisecond)."""


def reasons(seen):
    return {failure.task: failure.reason for failure in seen.failures}


class TestCopies:
    @pytest.mark.parametrize("kind", shapes.KINDS)
    def test_pages_come_back_as_they_went(self, monkeypatch, kind):
        buffers = shapes.KINDS[kind](slots=80) if kind != "blocks" else shapes.blocks(units=20)
        shapes.fill_random(buffers)
        count = 3 * buffers.page_units
        units = shapes.units_for(buffers, 0, count)
        with rig(monkeypatch, buffers) as r:
            out = r.copy(Kind.OFFLOAD, [5, 63, 27], units)
            r.give(out)
            assert not r.finished(out).failures
            before = shapes.image(buffers)
            for plane in buffers.planes:
                plane.zero_()
            back = r.copy(Kind.LOAD, [5, 63, 27], units)
            r.give(back)
            assert not r.finished(back).failures
            for plane, now, then in zip(buffers.layout.shards[0], shapes.image(buffers), before, strict=True):
                rows = np.unique(units // (plane.unit_tokens // buffers.unit_tokens))
                np.testing.assert_array_equal(now[rows], then[rows])
            assert r.mover.stats()["loads"] == r.mover.stats()["offloads"] == 1

    @given(first=st.integers(0, 7), count=st.integers(1, 24), seed=st.integers(0, 99))
    def test_a_load_may_begin_and_end_inside_pages(self, first, count, seed):
        with pytest.MonkeyPatch.context() as monkeypatch:
            buffers = shapes.mixed_units(slots=80)
            with rig(monkeypatch, buffers) as r:
                r.pages[:] = np.random.default_rng(seed).integers(0, 256, r.pages.shape)
                frames = np.arange(-(-(first + count) // 8)) + 3
                units = shapes.units_for(buffers, first, count, seed)
                expected = shapes.image(buffers)
                for at, unit in enumerate(units):
                    frame, inside = divmod(first + at, 8)
                    piece = Piece(True, r.pages[3 + frame], inside, units[at : at + 1])
                    shapes.reference(buffers, expected, r.pages[3 + frame], piece)
                    del unit
                copy = r.copy(Kind.LOAD, frames, units, first=first)
                r.give(copy)
                assert not r.finished(copy).failures
                for now, then in zip(shapes.image(buffers), expected, strict=True):
                    np.testing.assert_array_equal(now, then)

    def test_first_is_in_tokens_and_units_are_the_engines(self, monkeypatch):
        buffers = shapes.blocks(unit_tokens=4, units=10, page_tokens=8)
        with rig(monkeypatch, buffers) as r:
            r.pages[0] = 7
            copy = r.copy(Kind.LOAD, [0], [6], first=4)
            r.give(copy)
            assert not r.finished(copy).failures
            assert [int(plane[6].min()) for plane in buffers.planes] == [7, 7]
            assert sum(int(plane.sum()) for plane in buffers.planes) == 7 * 96 * 2

    def test_pages_of_several_pieces_arrive_whole(self, monkeypatch):
        monkeypatch.setattr("kvtier.device.cpu.PIECE_BYTES", 48)
        buffers = shapes.mixed_units(slots=80, page_tokens=16)
        shapes.fill_random(buffers)
        with rig(monkeypatch, buffers) as r:
            units = shapes.units_for(buffers, 0, 32)
            expected = np.zeros_like(r.pages)
            for page in range(2):
                piece = Piece(False, expected[page], 0, units[16 * page : 16 * page + 16])
                shapes.reference(buffers, shapes.image(buffers), expected[page], piece)
            copy = r.copy(Kind.OFFLOAD, [0, 1], units)
            r.give(copy)
            r.finished(copy)
            np.testing.assert_array_equal(r.pages, expected)

    def test_pieces_end_where_pieces_of_the_page_end(self, monkeypatch):
        """So that no coarse row is moved in two parts, wherever a load begins."""
        monkeypatch.setattr("kvtier.device.cpu.PIECE_BYTES", 1)
        buffers = shapes.mixed_units(slots=80, page_tokens=24)
        copier = HeldCopier(buffers)
        assert copier.piece_units == 8
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.LOAD, [0, 1], shapes.units_for(buffers, 3, 40), first=3)
            r.give(copy)
            pieces = [held.piece for held in copier.wait_held(6)]
            got = [(piece.first, len(piece.units)) for piece in pieces]
            assert got == [(3, 5), (8, 8), (16, 8), (0, 8), (8, 8), (16, 3)]
            copier.let_go()
            assert not r.finished(copy).failures

    def test_replicas_take_turns_by_frame_when_offloading(self, monkeypatch):
        whole = shapes.joined(slots=80)
        buffers = KVBuffers(whole.layout, whole.planes, replica=1, replicas=2)
        for plane in buffers.planes:
            plane.fill_(9)
        with rig(monkeypatch, buffers) as r:
            copy = r.copy(Kind.OFFLOAD, [0, 1, 2, 3], np.arange(32))
            r.give(copy)
            assert not r.finished(copy).failures
            assert [bool(r.pages[frame].any()) for frame in range(4)] == [False, True, False, True]
            for plane in buffers.planes:
                plane.zero_()
            r.pages[:4] = 5
            back = r.copy(Kind.LOAD, [0, 1, 2, 3], np.arange(32))
            r.give(back)
            r.finished(back)
            assert all(bool((plane[:32] == 5).all()) for plane in buffers.planes)

    def test_the_plan_is_copied(self, monkeypatch):
        """An engine reuses its buffers; index arrays belong to the task (TRT-LLM#15546)."""
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            r.pages[:] = 3
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            plan = encode([copy], POOL)
            r.mover.apply(plan)
            plan[:] = 0
            copier.wait_held(1)
            copier.finish()
            r.finished(copy)
            assert bool((buffers.planes[0][:8] == 3).all())
            assert not buffers.planes[0][8:].any()


class TestEdges:
    """Each stream edge, with the copy or the compute delayed; each fails when the edge is taken out."""

    def offload_behind_compute(self, r, stream) -> bool:
        """Compute of step N is still running when its offload is planned. Did the pool get its result?"""
        stream.hold()
        stream.run(lambda: [plane.fill_(42) for plane in r.buffers.planes])
        r.mover.mark(stream)
        copy = r.copy(Kind.OFFLOAD, [0], np.arange(8))
        r.give(copy)
        early = r.mover.wait_progress(SHORT_S)
        stream.let_go()
        assert stream.synchronize(5)
        r.finished(copy)
        used = r.buffers.layout.plane_bytes(r.buffers.layout.shards[0][0]) * len(r.buffers.planes)
        return not early and bool((r.pages[0][:used] == 42).all())

    def load_behind_readers(self, r, stream) -> bool:
        """Units are loaded while compute launched before still reads what they held. Was it right?"""
        for plane in r.buffers.planes:
            plane.fill_(1)
        r.pages[:] = 2
        read = []
        stream.hold()
        stream.run(lambda: read.append(int(r.buffers.planes[0][:8].max())))
        r.mover.mark(stream)
        copy = r.copy(Kind.LOAD, [0], np.arange(8))
        r.give(copy)
        early = r.mover.wait_progress(SHORT_S)
        stream.let_go()
        assert stream.synchronize(5)
        r.finished(copy)
        return not early and read == [1]

    def compute_behind_load(self, r, stream, copier) -> bool:
        """Compute on loaded units is launched while the load is still running. Did it see the load?"""
        r.pages[:] = 2
        copy = r.copy(Kind.LOAD, [0], np.arange(8))
        r.give(copy)
        copier.wait_held(1)
        read = []
        r.mover.wait(copy.task, stream)
        stream.run(lambda: read.append(int(r.buffers.planes[0][:8].min())))
        early = stream.record().synchronize(SHORT_S)
        copier.finish()
        r.finished(copy)
        assert stream.synchronize(5)
        return not early and read == [2]

    @pytest.fixture
    def stream(self):
        stream = HeldStream()
        yield stream
        assert stream.close()

    @pytest.mark.parametrize("double", [False, True], ids=["cpu", "double"])
    def test_an_offload_waits_for_the_compute_before_its_mark(self, monkeypatch, stream, double):
        buffers = shapes.joined()
        copier = HeldCopier(buffers, hold=False) if double else None
        with rig(monkeypatch, buffers, copier) as r:
            assert self.offload_behind_compute(r, stream)

    @pytest.mark.parametrize("double", [False, True], ids=["cpu", "double"])
    def test_a_load_waits_for_old_readers_of_its_units(self, monkeypatch, stream, double):
        buffers = shapes.joined()
        copier = HeldCopier(buffers, hold=False) if double else None
        with rig(monkeypatch, buffers, copier) as r:
            assert self.load_behind_readers(r, stream)

    def test_compute_waits_for_the_load(self, monkeypatch, stream):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            assert self.compute_behind_load(r, stream, copier)

    @pytest.mark.parametrize("scene", ["offload_behind_compute", "load_behind_readers"])
    def test_these_tests_see_a_missing_edge_before_the_copy(self, monkeypatch, stream, scene):
        with rig(monkeypatch, shapes.joined()) as r:
            monkeypatch.setattr(r.mover, "mark", lambda stream: setattr(r.mover, "_edge", fired()))
            assert not getattr(self, scene)(r, stream)

    def test_these_tests_see_a_missing_edge_after_the_load(self, monkeypatch, stream):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            monkeypatch.setattr(r.mover, "wait", lambda task, stream: None)
            assert not self.compute_behind_load(r, stream, copier)

    def test_the_calling_thread_waits_where_no_stream_is_named(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            r.pages[:] = 2
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            copier.wait_held(1)
            timer = threading.Timer(0.05, copier.finish)
            timer.start()
            r.mover.wait(copy.task)
            assert int(buffers.planes[0][:8].min()) == 2
            timer.join()

    def test_a_copy_is_bound_to_the_last_mark_not_to_later_ones(self, monkeypatch, stream):
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(copy)
            stream.hold()
            r.mover.mark(stream)
            r.finished(copy)
            stream.let_go()

    def test_compute_that_failed_fails_the_copy(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            stream = CpuStream()
            stream.run(lambda: 1 // 0)
            r.mover.mark(stream)
            copy = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BROKEN}
            assert not r.pages.any()
            assert stream.close()

    def test_waiting_for_a_finished_or_unknown_task_does_nothing(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            r.finished(copy)
            stream = CpuStream()
            r.mover.wait(copy.task, stream)
            r.mover.wait(999, stream)
            assert stream.synchronize(5)
            assert stream.close()


class TestLanes:
    def test_a_lane_is_first_in_first_out(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            first = r.copy(Kind.LOAD, [0], np.arange(8))
            second = r.copy(Kind.LOAD, [1], np.arange(8, 16))
            r.give(first, second)
            held = copier.wait_held(2)
            held[1].finish()
            assert not r.mover.wait_progress(SHORT_S)
            assert not r.done(second)
            held[0].finish()
            r.finished(first, second)

    def test_a_short_load_is_not_held_up_by_a_long_one(self, monkeypatch):
        buffers = shapes.joined(slots=200)
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            long = r.copy(Kind.LOAD, np.arange(20), np.arange(160), lane=Lane.LONG_LOADS)
            r.give(long)
            copier.wait_held(8)
            short = r.copy(Kind.LOAD, [30], np.arange(160, 168))
            r.give(short)
            held = copier.wait_held(9)
            held[8].finish()
            r.finished(short)
            assert not r.done(long)
            copier.let_go()
            r.finished(long)

    def test_a_short_load_waits_for_a_piece_of_each_other_lane_at_most(self, monkeypatch):
        """On the CPU the copy thread itself copies: lanes take turns piece by piece."""
        buffers = shapes.joined(slots=400)
        order = []
        with rig(monkeypatch, buffers) as r:
            copy = r.mover._copier.copy
            short = r.copy(Kind.LOAD, [60], np.arange(392, 400))

            def traced(piece, after):
                order.append((piece.load, int(piece.units[0])))
                if len(order) == 4:
                    r.mover._copying.tell([Job(short, pool_tag(POOL), fired())])
                return copy(piece, after)

            monkeypatch.setattr(r.mover._copier, "copy", traced)
            long = r.copy(Kind.LOAD, np.arange(20), np.arange(160), lane=Lane.LONG_LOADS)
            offload = r.copy(Kind.OFFLOAD, np.arange(20, 40), np.arange(160, 320))
            r.give(long, offload)
            r.finished(long, offload, short)
            assert 4 <= order.index((True, 392)) <= 6
            loads = [load for load, unit in order if unit != 392]
            assert loads[:10] == [True, False] * 5

    def test_offloads_and_loads_do_not_wait_for_each_other(self, monkeypatch):
        buffers = shapes.joined()
        with rig(monkeypatch, buffers) as r:
            never = CpuEvent()
            r.mover._edge = never
            held = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(held)
            r.mover.mark()
            load = r.copy(Kind.LOAD, [1], np.arange(8, 16))
            r.give(load)
            r.finished(load)
            assert not r.done(held)
            never.fire()
            r.finished(held)

    def test_no_wake_up_is_lost(self, monkeypatch):
        """Edges fire at any moment of the copy thread's round; it sleeps for a minute if it misses one."""
        with rig(monkeypatch, shapes.joined()) as r:
            stream = CpuStream()
            for number in range(500):
                stream.run(lambda: None)
                r.mover.mark(stream)
                copy = r.copy(Kind(number % 2 + 1), [number % 64], np.arange(8))
                r.give(copy)
                assert not r.finished(copy).failures
            assert stream.close()

    def test_a_device_gets_a_bounded_number_of_pieces(self, monkeypatch):
        buffers = shapes.joined(slots=200)
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.LOAD, np.arange(20), np.arange(160))
            r.give(copy)
            copier.wait_held(8)
            assert not copier.wait_submitted(9, SHORT_S)
            copier.finish(1)
            assert copier.wait_submitted(9)
            copier.let_go()
            assert not r.finished(copy).failures


class TestFailures:
    def test_a_load_whose_frames_were_given_away_has_failed(self, monkeypatch):
        """R31."""
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.LOAD, [4, 5], np.arange(16))
            r.give(copy)
            copier.wait_held(2)
            r.client.generations[5] += 1
            copier.finish()
            assert reasons(r.finished(copy)) == {copy.task: Reason.CHANGED}
            assert r.mover.stats()["protocol_violations"] == 1
            again = r.copy(Kind.LOAD, [4, 5], np.arange(16))
            r.give(again)
            copier.wait_held(2)
            copier.finish()
            assert not r.finished(again).failures
            assert r.mover.stats()["protocol_violations"] == 1

    def test_an_offload_does_not_ask_for_generations(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.OFFLOAD, [4], np.arange(8))
            r.give(copy)
            copier.wait_held(1)
            r.client.generations[4] += 1
            copier.finish()
            assert not r.finished(copy).failures

    @pytest.mark.parametrize(
        ("units", "frames", "first"),
        [
            ([0, 1, 40], [0], 0),
            ([2**31 - 1], [0], 0),
            (range(9), [0], 0),
            (range(8), [0, 1], 0),
            (range(8), [0], 1),
            ([], [], 0),
            (range(1), [0], 8),
        ],
    )
    def test_what_does_not_fit_fails_and_touches_nothing(self, monkeypatch, units, frames, first):
        with rig(monkeypatch, shapes.joined(slots=40)) as r:
            r.pages[:] = 1
            copy = r.copy(Kind.LOAD, frames, list(units), first=first)
            good = r.copy(Kind.LOAD, [0], np.arange(8, 16))
            r.give(copy, good)
            assert reasons(r.finished(copy, good)) == {copy.task: Reason.BAD}
            assert not r.buffers.planes[0][:8].any()
            assert r.buffers.planes[0][8:16].all()

    @pytest.mark.parametrize("units", [[1, 2, 3, 4], [0, 1, 2, 7], [3, 2, 1, 0], [0, 5, 2, 3]])
    def test_units_of_one_coarse_row_stay_together(self, monkeypatch, units):
        with rig(monkeypatch, shapes.mixed_units()) as r:
            copy = r.copy(Kind.LOAD, [0], units)
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BAD}

    def test_a_first_inside_a_unit_fails(self, monkeypatch):
        with rig(monkeypatch, shapes.blocks()) as r:
            copy = r.copy(Kind.LOAD, [0], [1], first=2)
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BAD}

    def test_a_plan_for_another_pool_fails(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(copy, pool_id=b"another")
            assert reasons(r.finished(copy)) == {copy.task: Reason.OTHER_POOL}
            assert not r.pages.any()

    def test_a_frame_that_is_not_mapped_fails(self, monkeypatch):
        """R28."""
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.OFFLOAD, [63], np.arange(8))
            r.client.pool.frames = 63
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.NOT_MAPPED}
            assert not r.pages.any()

    def test_a_copy_that_the_device_fails_is_a_failed_task(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.LOAD, [0, 1], np.arange(16))
            r.give(copy)
            copier.wait_held(2)
            copier.fail(1)
            assert not r.mover.wait_progress(SHORT_S)  # the other piece still runs
            copier.finish(1)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BROKEN}

    def test_a_copier_that_raises_is_a_failed_task_and_the_thread_lives(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            monkeypatch.setattr(r.mover._copier, "copy", lambda piece, after: 1 // 0)
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BROKEN}
            monkeypatch.undo()
            again = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(again)
            assert not r.finished(again).failures

    def test_more_failures_than_the_ring_holds_are_told(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            copies = [r.copy(Kind.OFFLOAD, [0], np.arange(9)) for _ in range(FAILURES + 5)]
            r.give(*copies)
            seen = r.finished(copies[-1])
            assert seen.lost or len(seen.failures) == len(copies)


class TestCancel:
    def test_what_has_not_begun_is_taken_back(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            edge = CpuEvent()
            r.mover._edge = edge
            first = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            second = r.copy(Kind.OFFLOAD, [1], np.arange(8))
            r.give(first, second)
            r.give(Cancel(second.task))
            edge.fire()
            assert reasons(r.finished(first, second)) == {second.task: Reason.CANCELLED}
            assert not r.pages[1].any()

    def test_what_has_begun_runs_on(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            r.pages[:] = 2
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            copier.wait_held(1)
            r.give(Cancel(copy.task))
            assert not r.mover.wait_progress(SHORT_S)
            copier.finish()
            assert not r.finished(copy).failures
            assert buffers.planes[0][:8].all()

    def test_of_an_unknown_task_does_nothing(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(Cancel(77), copy)
            assert not r.finished(copy).failures


class TestServerGone:
    """R24."""

    def test_nothing_new_begins_and_what_runs_finishes_before_the_pool_is_let_go(self, monkeypatch):
        buffers = shapes.joined(slots=200)
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            r.pages[:] = 2
            running = r.copy(Kind.LOAD, np.arange(12), np.arange(96))
            r.give(running)
            copier.wait_held(8)
            r.client.go_away()
            other = r.copy(Kind.OFFLOAD, [30], np.arange(96, 104))
            r.give(other)
            assert reasons(r.finished(other)) == {other.task: Reason.AWAY}
            assert not r.client.released.is_set()
            copier.let_go()
            assert not r.finished(running).failures
            assert bool((buffers.planes[0][:96] == 2).all())
            assert r.client.released.wait(5)

    def test_what_waits_for_its_edge_fails(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            r.mover._edge = CpuEvent()
            copy = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(copy)
            r.client.go_away()
            assert reasons(r.finished(copy)) == {copy.task: Reason.AWAY}
            assert r.client.released.wait(5)

    def test_an_idle_mover_lets_the_pool_go_and_attaches_again(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            r.client.go_away()
            assert r.client.released.wait(5)
            away = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(away)
            assert reasons(r.finished(away)) == {away.task: Reason.AWAY}
            assert not r.mover.attached
            r.client.come_back(b"the next pool")
            stale = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            # Attaching takes a moment; a plan for the old pool never runs, whichever comes first.
            r.give(stale)
            assert reasons(r.finished(stale))[stale.task] in (Reason.AWAY, Reason.OTHER_POOL)
            for plane in r.buffers.planes:
                plane.fill_(4)
            fresh = r.copy(Kind.OFFLOAD, [0], np.arange(8))
            r.give(fresh, pool_id=b"the next pool")
            assert not r.finished(fresh).failures
            assert r.pages[0].any()

    def test_without_a_sidecar_everything_is_away(self, monkeypatch):
        monkeypatch.setattr(FakeClient, "_attach", lambda self: None)
        with rig(monkeypatch, shapes.joined()) as r:
            assert not r.mover.attached
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.AWAY}


class TestTheEnd:
    def test_close_lets_what_runs_run_out_and_takes_back_the_rest(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            running = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(running)
            copier.wait_held(1)
            waiting = [r.copy(Kind.LOAD, [n], np.arange(8)) for n in range(1, 12)]
            r.give(*waiting)
            copier.wait_held(8)
            threading.Timer(0.05, copier.let_go).start()
            assert r.mover.close(5)
            seen = r.mover.progress().read()
            assert seen.done[Lane.SHORT_LOADS] == waiting[-1].seq
            assert set(reasons(seen)) == {copy.task for copy in waiting[7:]}
            assert set(reasons(seen).values()) == {Reason.CLOSED}
            assert r.client.closed == [True]

    def test_close_is_bounded_and_says_that_something_still_runs(self, monkeypatch):
        buffers = shapes.joined()
        copier = HeldCopier(buffers)
        with rig(monkeypatch, buffers, copier) as r:
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            copier.wait_held(1)
            assert not r.mover.close(0.1)
            r.mover._copying._thread.join(5)
            assert r.client.closed == [False]  # R11: its frames wait for the process's death
            assert not r.done(copy)

    def test_closed_twice_is_closed_once(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            assert r.mover.close()
            assert r.mover.close()
            assert r.client.closed == [True]
            with pytest.raises(UsageError, match="closed"):
                r.mover.mark()

    def test_a_dead_copy_thread_fails_what_it_had_and_what_comes(self, monkeypatch):
        """P11: no silent thread death."""
        died = []
        monkeypatch.setattr(threading, "excepthook", lambda args: died.append(args.exc_type))
        with rig(monkeypatch, shapes.joined()) as r:
            monkeypatch.setattr(r.client, "poll", lambda: 1 // 0)
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            assert reasons(r.finished(copy)) == {copy.task: Reason.BROKEN}
            r.mover._copying._thread.join(5)
            assert died == [ZeroDivisionError]
            later = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(later)
            assert reasons(r.finished(later, timeout_s=0)) == {later.task: Reason.BROKEN}
            assert not r.mover.attached

    def test_a_refused_layout_raises(self, monkeypatch):
        def refuse(self):
            self.refused = GeometryError("the pool has pages of 64 tokens")

        monkeypatch.setattr(FakeClient, "_attach", refuse)
        with pytest.raises(GeometryError, match="64 tokens"), rig(monkeypatch, shapes.joined()):
            pass

    def test_a_mover_that_is_dropped_ends_its_thread(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            other = FakeClient()
            monkeypatch.setattr(
                "kvtier.mover.mover.CacheClient", lambda run_dir, **given: other.start(**given)
            )
            mover = Mover(r.buffers, "/nowhere", "group")
            thread = mover._copying._thread
            del mover
            thread.join(5)
            assert not thread.is_alive()
            assert other.closed == [True]

    def test_a_forked_child_has_an_inert_mover(self, monkeypatch):
        """R21."""
        with rig(monkeypatch, shapes.joined()) as r:
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            monkeypatch.setattr(os, "getpid", lambda: r.mover._pid + 1)
            r.mover.mark()
            r.give(copy)
            r.mover.wait(copy.task)
            assert r.mover.close()
            monkeypatch.undo()
            assert r.client.closed == []
            assert r.mover._copying.jobs == {}


class TestCallers:
    def test_copies_before_any_mark_are_a_mistake(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            r.mover._edge = None
            r.give()
            with pytest.raises(UsageError, match="mark"):
                r.give(r.copy(Kind.LOAD, [0], np.arange(8)))
            assert r.mover._copying.jobs == {}

    def test_what_is_no_plan_raises_and_queues_nothing(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            plan = encode([r.copy(Kind.LOAD, [0], np.arange(8)), Cancel(9)], POOL)
            plan[-1] = -5
            with pytest.raises(ProtocolError):
                r.mover.apply(plan)
            assert r.mover._copying.jobs == {}

    def test_another_thread_is_a_mistake(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            raised = []

            def call():
                try:
                    r.mover.mark()
                except WrongThreadError as error:
                    raised.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            assert len(raised) == 1

    @pytest.mark.parametrize(("group", "rank", "ranks"), [("", 0, 1), ("g", 1, 1), ("g", -1, 2)])
    def test_settings_are_checked(self, group, rank, ranks):
        with pytest.raises(UsageError):
            Mover(shapes.joined(), "/nowhere", group, rank, ranks)

    def test_attaches_as_its_groups_mover(self, monkeypatch):
        with rig(monkeypatch, shapes.joined()) as r:
            wanted = {"group": "group", "role": "mover", "rank": 0, "ranks": 1, "manual_release": True}
            assert wanted.items() <= r.client.settings.items()
            assert r.mover.units == 40

    def test_progress_may_lie_in_memory_that_others_read(self, monkeypatch):
        words = np.zeros(PROGRESS_WORDS, np.int64)
        with rig(monkeypatch, shapes.joined(), progress_words=words) as r:
            copy = r.copy(Kind.LOAD, [0], np.arange(8))
            r.give(copy)
            r.finished(copy)
            assert Progress(words).read().done[Lane.SHORT_LOADS] == copy.seq
