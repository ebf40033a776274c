"""Each call of a Worker against a sidecar that is absent, stopped, killed, full or answers garbage.

No exception, and no wait beyond the call's bound. The bounds asserted here are those of a call that hangs;
`benchmarks/engine_thread.py` measures.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import kvtier.worker
from kvtier import KVBuffers, KVLayout, Plane, Worker
from kvtier.client import attacher
from kvtier.device.testing import HeldCopier
from kvtier.errors import Status
from kvtier.shm.attach import Refusal
from kvtier.tasks import TaskState
from tests.server.sidecar import Sidecar, until
from tests.worker.engine import OPTIONS, attached, buffers, chain_of, finals, found

HANGS_S = 2.0


class Timed:
    """A worker whose every call is bounded."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __getattr__(self, name):
        call = getattr(self._worker, name)
        if not callable(call):
            return call

        def bounded(*args, **kwargs):
            begun = time.monotonic()
            result = call(*args, **kwargs)
            assert time.monotonic() - begun < HANGS_S, f"{name} hangs"
            return result

        return bounded


def a_day(worker, first=0):
    """Every call once, in an engine's order. What came back."""
    chain = chain_of(range(first, first + 160))
    worker.ask("day", chain)
    hit = found(worker, "day", chain)
    back = []
    if hit.tokens:
        task = worker.load(hit, np.arange(hit.tokens))
        back += finals(worker, task)
        task.wait()
    task = worker.offload("day", chain, np.arange(160))
    back += finals(worker, task)
    doomed = worker.offload("gone", chain_of(range(first + 1000, first + 1160)), np.arange(160))
    worker.cancel("gone")
    worker.forget("day")
    back += finals(worker, doomed)
    worker.flush(timeout_s=0.05)
    assert worker.stats()["live_tasks"] == 0
    return back


def stored(back) -> int:
    """Pages that tasks brought to their end."""
    return sum(task.pages for task in back if task.state is TaskState.DONE)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def sidecar(run_dir):
    with Sidecar(run_dir) as sidecar:
        yield sidecar


def test_without_a_sidecar_everything_is_a_miss_and_one_that_comes_is_used(run_dir):
    worker = Timed(Worker(buffers(), run_dir=run_dir, options=OPTIONS))
    assert not worker.attached
    assert found(worker, "a", chain_of(range(160))).reason == "away"
    assert stored(a_day(worker)) == 0
    assert not worker.wait_attached(0.05)
    with Sidecar(run_dir):
        assert worker._worker.wait_attached(20)
        offload = worker.offload("b", chain_of(range(160)), np.arange(160))
        finals(worker, offload)
        assert (offload.state, offload.pages) == (TaskState.DONE, 10)
        worker.close(1.0)


def test_a_sidecar_that_stands_still_is_a_late_miss_and_goes_on_later(sidecar, run_dir):
    worker = Timed(attached(run_dir))
    a_day(worker)
    chain = chain_of(range(5000, 5160))
    held = worker.offload("kept", chain, np.arange(160))
    finals(worker, held)
    assert held.pages == 10
    sidecar.send(signal.SIGSTOP)
    for day in range(3):
        assert stored(a_day(worker, first=day * 5000 + 10_000)) == 0
    missed = worker.stats()["tokens_missed_late"] + worker.stats()["tokens_missed_away"]
    assert missed > 0
    sidecar.send(signal.SIGCONT)
    until(lambda: found(worker, "again", chain).tokens == 159 or bool(worker.forget("again")), "no hit again")
    until(lambda: (worker.step(), sidecar.stats()["leases"])[1] <= 1, "leases were not given back")
    worker.close(1.0)


def test_close_against_a_sidecar_that_stands_still_is_bounded(sidecar, run_dir):
    worker = Timed(attached(run_dir))
    worker.offload("a", chain_of(range(160)), np.arange(160))
    worker.step()
    sidecar.send(signal.SIGSTOP)
    worker.ask("b", chain_of(range(300, 460)))
    worker.close(0.5)


def test_close_does_not_wait_for_attempts_to_attach(run_dir, monkeypatch):
    attempts, go_on = threading.Semaphore(0), threading.Event()

    def connect_at_last(*args, **kwargs):
        attempts.release()
        go_on.wait(60)
        return Refusal(Status.AWAY, "nobody")

    monkeypatch.setattr(attacher, "connect", connect_at_last)
    monkeypatch.setattr(kvtier.worker, "ATTACH_WAIT_S", 0.0)
    worker = Worker(buffers(), run_dir=run_dir, options=OPTIONS)
    try:
        assert attempts.acquire(timeout=30)  # the planner's client
        assert attempts.acquire(timeout=30)  # the mover's
        begun = time.monotonic()
        worker.close(0.1)
        assert time.monotonic() - begun < attacher.ATTEMPT_S
    finally:
        go_on.set()


def test_a_killed_sidecar_is_missed_and_the_next_one_used(sidecar, run_dir):
    worker = Timed(attached(run_dir))
    chain = chain_of(range(160))
    a_day(worker)
    hit_chain = chain_of(range(7000, 7160))
    finals(worker, worker.offload("h", hit_chain, np.arange(160)))
    hit = found(worker, "h", hit_chain)
    queued = worker.offload("q", chain_of(range(9000, 9160)), np.arange(160))
    sidecar.kill()
    load = worker.load(hit, np.arange(hit.tokens))
    back = finals(worker, queued, load)
    assert {task.state for task in back} <= {TaskState.DONE, TaskState.FAILED}
    a_day(worker)
    sidecar.again()
    assert worker._worker.wait_attached(20)
    offload = worker.offload("n", chain, np.arange(160))
    finals(worker, offload)
    assert offload.pages == 10
    assert found(worker, "m", chain).tokens == 159
    assert worker.stats()["attachments_lost"] >= 1
    worker.close(1.0)


def test_a_load_that_has_begun_survives_its_sidecar(sidecar, run_dir):
    held = buffers()
    copier = HeldCopier(held, hold=False)
    worker = attached(run_dir, buffers=held, copier=copier)
    chain = chain_of(range(160))
    finals(worker, worker.offload("a", chain, np.arange(160)))
    before = [plane[:159].clone() for plane in held.planes]
    copier.hold()
    hit = found(worker, "b", chain)
    load = worker.load(hit, np.arange(1000, 1159))
    worker.step()
    copier.wait_held(1)
    sidecar.kill()
    until(lambda: not worker.attached or bool(worker.step()), "the worker did not notice")
    copier.let_go()
    finals(worker, load)
    if load.state is TaskState.DONE:
        assert all(
            torch.equal(plane[1000:1159], kept) for plane, kept in zip(held.planes, before, strict=True)
        )
    else:
        assert load.state is TaskState.FAILED
    worker.close(1.0)


def test_a_full_sidecar_is_a_reason_and_no_error(run_dir):
    large = KVLayout(16, ((Plane("0.kv", 64 * 1024),),), "large")  # 1 MiB a page, 16 frames
    own = KVBuffers(large, (torch.zeros((400, 64 * 1024), dtype=torch.uint8),))
    with Sidecar(run_dir) as sidecar:
        worker = Timed(attached(run_dir, buffers=own))
        until(lambda: sidecar.stats()["frames_free"] == 16, "the pool was not reserved")
        chain = chain_of(range(320), large)
        offload = worker.offload("a", chain, np.arange(320))
        finals(worker, offload)
        assert 0 < offload.pages < 20
        assert offload.reason in ("full", "cap")
        assert found(worker, "b", chain).tokens == offload.pages * 16
        other = worker.offload("c", chain_of(range(900, 1220), large), np.arange(320))
        finals(worker, other)
        worker.close(1.0)


@pytest.mark.parametrize(
    "mode", ["noise", "short", "silent", "kind", "empty", "frames", "numbers", "status", "attach"]
)
def test_garbage_answers_are_misses_and_no_error(run_dir, mode):
    script = Path(__file__).with_name("liar.py")
    liar = subprocess.Popen(
        [sys.executable, str(script), str(run_dir), mode], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert liar.stdout is not None
        assert liar.stdout.readline()
        own = buffers()
        before = [plane.clone() for plane in own.planes]
        worker = Timed(Worker(own, run_dir=run_dir, options=OPTIONS))
        if mode not in ("noise", "short", "attach"):
            assert worker._worker.wait_attached(20)
        for day in range(3):
            back = a_day(worker, first=day * 5000)
            assert stored(back) == 0
        assert worker.stats()["tokens_loaded"] == 0
        assert (worker.stats()["tokens_load_failed"] > 0) == (mode == "frames")
        assert all(torch.equal(one, other) for one, other in zip(own.planes, before, strict=True))
        worker._worker.close(0.5)
    finally:
        liar.kill()
        liar.wait(10)
        liar.stdout.close()
