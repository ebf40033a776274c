"""What every stream and event promises: a thread, the calling thread and the double, in the same tests."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

from kvtier.device.base import DeviceError
from kvtier.device.cpu import CallerStream, CpuEvent, CpuStream, fired
from kvtier.device.testing import HeldStream
from kvtier.errors import UsageError

STREAMS = {"thread": CpuStream, "caller": CallerStream, "double": HeldStream}


@pytest.fixture(params=STREAMS.values(), ids=STREAMS.keys())
def stream(request):
    made = request.param()
    yield made
    if isinstance(made, CpuStream):
        assert made.close()


class TestEveryStream:
    def test_does_its_work_in_order(self, stream):
        done = []
        for number in range(100):
            stream.run(lambda number=number: done.append(number))
        assert stream.synchronize(5)
        assert done == list(range(100))

    def test_an_event_has_fired_when_what_stands_before_it_is_done(self, stream):
        done = []
        stream.run(lambda: done.append(1))
        event = stream.record()
        assert event.synchronize(5)
        assert event.query()
        assert done == [1]

    def test_work_behind_an_event_begins_after_it(self, stream):
        other, order, gate = CpuStream(), [], threading.Event()
        other.run(gate.wait)
        other.run(lambda: order.append("first"))
        event = other.record()
        threading.Timer(0.05, gate.set).start()
        stream.wait(event)
        stream.run(lambda: order.append("second"))
        assert stream.synchronize(5)
        assert order == ["first", "second"]
        assert other.close()

    def test_failed_work_fails_what_stands_behind_it(self, stream):
        done = []
        before = stream.record()
        stream.run(lambda: 1 // 0)
        stream.run(lambda: done.append(1))
        after = stream.record()
        assert before.synchronize(5)
        with pytest.raises(DeviceError, match="division"):
            after.synchronize(5)
        with pytest.raises(DeviceError, match="division"):
            after.query()
        with pytest.raises(DeviceError, match="division"):
            stream.synchronize(5)
        assert done == []

    def test_calls_back_once_when_an_event_fires(self, stream):
        called = threading.Semaphore(0)
        event = stream.record()
        event.then(called.release)
        assert called.acquire(timeout=5)
        event.then(called.release)
        assert called.acquire(timeout=5)
        assert not called.acquire(blocking=False)


class TestEvents:
    def test_not_fired_until_fired(self):
        event = CpuEvent()
        assert not event.query()
        assert not event.synchronize(0.01)
        event.fire()
        assert event.query()
        event.fire(ValueError("too late"))
        assert event.query()

    def test_calls_back_at_the_moment_it_fires_also_when_it_fails(self):
        event, calls = CpuEvent(), []
        event.then(lambda: calls.append(1))
        assert calls == []
        event.fire(ValueError("no"))
        assert calls == [1]
        with pytest.raises(DeviceError, match="no"):
            event.query()

    def test_fired_has_fired(self):
        assert fired().query()


class TestThreads:
    def test_a_stream_runs_beside_its_submitter(self):
        stream, gate = CpuStream(), threading.Event()
        stream.run(lambda: gate.wait(5))
        event = stream.record()
        assert not event.query()
        assert not stream.synchronize(0.01)
        gate.set()
        assert event.synchronize(5)
        assert stream.close()

    def test_waiting_for_failed_work_fails_the_waiting_stream(self):
        stream, event, done = CpuStream(), CpuEvent(), []
        stream.wait(event)
        stream.run(lambda: done.append(1))
        event.fire(ValueError("upstream"))
        with pytest.raises(DeviceError, match="upstream"):
            stream.synchronize(5)
        assert done == []
        assert stream.close()

    def test_closing_drops_what_waits_and_fails_its_events(self):
        stream, never = CpuStream(), CpuEvent()
        stream.wait(never)
        event = stream.record()
        assert stream.close(5)
        with pytest.raises(DeviceError):
            event.synchronize(5)
        with pytest.raises(UsageError):
            stream.run(lambda: None)

    def test_closing_is_bounded_by_what_runs(self):
        stream, gate, begun = CpuStream(), threading.Event(), threading.Event()
        stream.run(lambda: (begun.set(), gate.wait(5)))
        assert begun.wait(5)
        assert not stream.close(0.01)
        gate.set()
        assert stream.close(5)

    def test_the_calling_thread_does_not_wait_for_ever(self):
        with pytest.raises(DeviceError, match=r"0\.01"):
            CallerStream(timeout_s=0.01).wait(CpuEvent())

    def test_a_held_stream_goes_on_when_let_go(self):
        stream, done = HeldStream(), []
        stream.hold()
        stream.run(lambda: done.append(1))
        assert not stream.synchronize(0.02)
        assert done == []
        stream.let_go()
        assert stream.synchronize(5)
        assert done == [1]
        assert stream.close()
