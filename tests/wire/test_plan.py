"""Plans survive the way there, and what is no plan is refused; progress loses nothing without saying so."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import ProtocolError, UsageError
from kvtier.wire.plan import (
    FAILURES,
    LANES,
    PROGRESS_WORDS,
    SHORT_LOAD_BYTES,
    Cancel,
    Copy,
    Failure,
    Kind,
    Lane,
    Progress,
    Reason,
    decode,
    encode,
    lane_of,
    pool_tag,
)

numbers = st.integers(1, 2**63 - 1)
words = st.integers(0, 2**31 - 1)


@st.composite
def copies(draw):
    kind = draw(st.sampled_from(Kind))
    frames = draw(st.lists(words, max_size=8))
    gens = st.lists(st.integers(0, 2**32 - 1), min_size=len(frames), max_size=len(frames))
    return Copy(
        task=draw(numbers),
        kind=kind,
        lane=draw(st.sampled_from(Lane)),
        seq=draw(numbers),
        frames=np.array(frames, np.int32),
        units=np.array(draw(st.lists(words, max_size=20)), np.int32),
        first=draw(words),
        gens=np.array(draw(gens) if kind == Kind.LOAD else [], np.uint32),
    )


commands = st.lists(st.one_of(copies(), st.builds(Cancel, numbers)), max_size=6)


class TestPlans:
    @given(commands, st.binary(max_size=16))
    def test_come_out_as_they_went_in(self, given_, pool):
        plan = encode(given_, pool)
        assert plan.dtype == np.int32
        assert plan.ndim == 1
        assert decode(plan) == (pool_tag(pool), given_)

    @given(commands, st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40))
    def test_may_be_followed_by_padding(self, given_, padding):
        """A carrier of fixed size fills up."""
        plan = np.concatenate([encode(given_), np.array(padding, np.int32)])
        assert decode(plan).commands == given_

    def test_of_nothing_are_four_words(self):
        assert len(encode([])) == 4
        assert decode(encode([])).commands == []

    @given(commands, st.data())
    def test_that_are_cut_or_changed_never_raise_anything_else(self, given_, data):
        plan = encode(given_)
        at = data.draw(st.integers(0, len(plan) - 1))
        plan[at] = data.draw(st.integers(-(2**31), 2**31 - 1))
        cut = data.draw(st.integers(0, len(plan)))
        for broken in (plan, plan[:cut]):
            try:
                decode(broken)
            except ProtocolError:
                continue

    @given(commands)
    def test_that_are_cut_are_refused(self, given_):
        plan = encode(given_)
        with pytest.raises(ProtocolError):
            decode(plan[:-1])

    @given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60))
    def test_are_not_any_array(self, values):
        with pytest.raises(ProtocolError):
            decode(np.array(values, np.int32))

    @pytest.mark.parametrize(
        "plan", [np.zeros(8, np.int64), np.zeros((2, 4), np.int32), [0, 0, 0, 0], np.zeros(0, np.int32)]
    )
    def test_are_int32_arrays(self, plan):
        with pytest.raises(ProtocolError):
            decode(plan)

    def test_do_not_share_the_callers_arrays(self):
        units = np.arange(4, dtype=np.int32)
        copy = Copy(1, Kind.OFFLOAD, Lane.OFFLOADS, 1, np.zeros(1, np.int32), units)
        plan = encode([copy])
        units[:] = 9
        (got,) = decode(plan).commands
        np.testing.assert_array_equal(got.units, [0, 1, 2, 3])

    def test_accept_other_integer_types_that_fit(self):
        copy = Copy(
            1, Kind.LOAD, Lane.SHORT_LOADS, 1, np.array([1]), np.array([2, 3]), gens=np.array([2**32 - 1])
        )
        (got,) = decode(encode([copy])).commands
        assert got.units.dtype == np.int32
        assert got.gens.tolist() == [2**32 - 1]

    @pytest.mark.parametrize(
        "wrong",
        [
            {"task": 0},
            {"task": 2**63},
            {"seq": 0},
            {"first": -1},
            {"units": np.array([-1])},
            {"units": np.array([2**31])},
            {"units": np.zeros((2, 2), np.int32)},
            {"units": np.array([1.5])},
            {"frames": np.array([-1])},
            {"gens": np.array([1, 2], np.uint32)},
        ],
    )
    def test_of_what_does_not_fit_are_not_made(self, wrong):
        right = {
            "task": 1,
            "kind": Kind.LOAD,
            "lane": Lane.SHORT_LOADS,
            "seq": 1,
            "frames": np.array([1]),
            "units": np.array([1]),
            "gens": np.array([1], np.uint32),
        }
        encode([Copy(**right)])
        with pytest.raises(UsageError, match="task"):
            encode([Copy(**{**right, **wrong})])

    def test_name_their_pool(self):
        assert pool_tag(b"one") != pool_tag(b"two")
        assert 0 < pool_tag(b"") < 2**31


def test_lanes_are_chosen_by_kind_and_size():
    assert lane_of(Kind.OFFLOAD, 1 << 40) == Lane.OFFLOADS
    assert lane_of(Kind.LOAD, SHORT_LOAD_BYTES) == Lane.SHORT_LOADS
    assert lane_of(Kind.LOAD, SHORT_LOAD_BYTES + 1) == Lane.LONG_LOADS


class TestProgress:
    def test_one_number_covers_a_lane(self):
        progress = Progress()
        progress.finish(Lane.LONG_LOADS, 7)
        seen = progress.read()
        assert seen.done == (0, 7, 0)
        assert seen.failures == []
        assert not seen.lost

    def test_failures_are_told_once(self):
        progress = Progress()
        progress.fail(5, Reason.CANCELLED)
        progress.fail(2**62, Reason.CHANGED)
        seen = progress.read()
        assert seen.failures == [Failure(5, Reason.CANCELLED), Failure(2**62, Reason.CHANGED)]
        progress.fail(6, Reason.BAD)
        assert progress.read(seen.failed).failures == [Failure(6, Reason.BAD)]
        assert progress.read(3).failures == []

    def test_the_ring_goes_round(self):
        progress, failed = Progress(), 0
        for task in range(1, 5 * FAILURES):
            progress.fail(task, Reason.AWAY)
            if task % 7 == 0:
                seen = progress.read(failed)
                assert [failure.task for failure in seen.failures] == list(range(task - 6, task + 1))
                failed = seen.failed

    def test_a_reader_that_is_too_late_is_told(self):
        progress = Progress()
        for task in range(1, FAILURES + 1):
            progress.fail(task, Reason.AWAY)
        seen = progress.read()
        assert seen.lost
        assert [failure.task for failure in seen.failures] == list(range(2, FAILURES + 1))
        assert not progress.read(seen.failed).lost

    def test_the_words_may_be_anybodys(self):
        words = np.zeros(PROGRESS_WORDS, np.int64)
        Progress(words).finish(Lane.OFFLOADS, 3)
        assert Progress(words).read().done[Lane.OFFLOADS] == 3
        for wrong in (np.zeros(PROGRESS_WORDS, np.int32), np.zeros(PROGRESS_WORDS - 1, np.int64)):
            with pytest.raises(UsageError):
                Progress(wrong)

    def test_a_reader_sees_a_failure_no_later_than_the_end_of_its_task(self):
        """Task n is the n-th of its lane, and every second one fails; the reader runs beside the writer."""
        progress, total = Progress(), 20_000

        def write():
            for task in range(1, total + 1):
                if task % 2 == 0:
                    progress.fail(task, Reason.BROKEN)
                progress.finish(Lane(task % LANES), task)

        writer = threading.Thread(target=write)
        writer.start()
        known, failed, done = set(), 0, 0
        while done < total:
            seen = progress.read(failed)
            failed, done = seen.failed, max(seen.done)
            known |= {failure.task for failure in seen.failures}
            assert all(task % 2 == 0 for task in known)
            if seen.lost:
                known |= set(range(2, done + 1, 2))
            assert {task for task in range(max(2, done - 40), done + 1) if task % 2 == 0} <= known
        writer.join()
