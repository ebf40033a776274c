"""A Worker with a real sidecar: bytes go out and come back, edges hold, and everything ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier import KVBuffers, KVLayout, Options, Plane, Worker
from kvtier.device.testing import HeldCopier, HeldStream
from kvtier.errors import GeometryError, UsageError, WrongThreadError
from kvtier.tasks import TaskState
from tests.server.sidecar import Sidecar, until
from tests.worker.engine import LAYOUT, OPTIONS, attached, buffers, chain_of, finals, found


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    with Sidecar(tmp_path_factory.mktemp("worker") / "run") as sidecar:
        yield sidecar


@pytest.fixture(autouse=True)
def emptied(sidecar):
    """Each test finds the pool empty."""
    with sidecar.client(layout=LAYOUT, group="cleaner", role="planner") as client:
        client.flush(timeout_s=10)


def rows(own, slots):
    return [plane[torch.as_tensor(np.asarray(slots), dtype=torch.long)].clone() for plane in own.planes]


def same(left, right):
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def test_what_one_worker_stores_another_loads_bit_for_bit(sidecar):
    chain, scattered = chain_of(range(160)), np.random.default_rng(1).permutation(2048)[:160]
    with attached(sidecar.run_dir) as one:
        own = one._mover.buffers
        kept = rows(own, scattered)
        finals(one, one.offload("a", chain, scattered))
    other_buffers = buffers(seed=2)
    with attached(sidecar.run_dir, buffers=other_buffers) as other:
        hit = found(other, "b", chain, 37)
        assert (hit.first, hit.tokens) == (37, 122)
        slots = np.random.default_rng(3).permutation(2048)[:122]
        untouched = np.setdiff1d(np.arange(2048), slots)
        before = rows(other_buffers, untouched)
        load = other.load(hit, slots)
        finals(other, load)
        assert load.state is TaskState.DONE
        assert same(rows(other_buffers, slots), [row[37:159] for row in kept])
        assert same(rows(other_buffers, untouched), before)  # valid units are never overwritten


def test_chunks_of_prefill_are_found_by_another_request_at_once(sidecar):
    with attached(sidecar.run_dir) as worker:
        chain = chain_of(range(160))
        found(worker, "a", chain)
        tasks, back = [], []
        for end in range(16, 161, 16):
            tasks.append(worker.offload("a", chain, np.arange(end)))
            back += worker.step()
        finals(worker, *(task for task in tasks if task not in back))
        assert sum(task.pages for task in tasks) == 10
        assert found(worker, "b", chain).tokens == 159  # P15: finished means visible


def test_wait_on_a_queued_load_starts_it(sidecar):
    with attached(sidecar.run_dir) as worker:
        own = worker._mover.buffers
        chain = chain_of(range(160))
        finals(worker, worker.offload("a", chain, np.arange(160)))
        hit = found(worker, "b", chain)
        load = worker.load(hit, np.arange(1000, 1159))
        load.wait()
        assert same(rows(own, range(1000, 1159)), rows(own, range(159)))
        assert not load.final  # only `step` says whether it failed
        finals(worker, load)
        assert load.state is TaskState.DONE
        load.wait()  # nothing to wait for


def test_an_offload_waits_for_what_was_launched_before_it(sidecar):
    compute = HeldStream()
    with attached(sidecar.run_dir) as worker:
        own = worker._mover.buffers
        chain = chain_of(range(160))
        found(worker, "a", chain)
        compute.hold()
        compute.run(lambda: [plane[:160].fill_(7) for plane in own.planes])
        task = worker.offload("a", chain, np.arange(160))
        until(lambda: bool(worker.step(compute)) or task.state is TaskState.COPYING, "it was not planned")
        worker.wait(0.05)
        assert worker.step(compute) == []
        compute.let_go()
        finals(worker, task)
        hit = found(worker, "b", chain)
        finals(worker, worker.load(hit, np.arange(1000, 1159)))
        assert all(bool((plane[1000:1159] == 7).all()) for plane in own.planes)


def test_a_stream_waits_for_a_load_that_is_held(sidecar):
    own = buffers()
    copier, compute = HeldCopier(own, hold=False), HeldStream()
    with attached(sidecar.run_dir, buffers=own, copier=copier) as worker:
        chain = chain_of(range(160))
        finals(worker, worker.offload("a", chain, np.arange(160)))
        copier.hold()
        load = worker.load(found(worker, "b", chain), np.arange(1000, 1159))
        worker.step(compute)
        load.wait(compute)
        seen = []
        compute.run(lambda: seen.append(same(rows(own, range(1000, 1159)), rows(own, range(159)))))
        copier.wait_held(1)
        assert not seen
        copier.let_go()
        assert compute.synchronize(10)
        assert seen == [True]
        finals(worker, load)


def test_offloads_go_on_while_a_load_is_held(sidecar):
    own = buffers()
    copier = HeldCopier(own, hold=False)
    with attached(sidecar.run_dir, buffers=own, copier=copier) as worker:
        chain = chain_of(range(160))
        finals(worker, worker.offload("a", chain, np.arange(160)))
        copier.hold()
        load = worker.load(found(worker, "b", chain), np.arange(1000, 1159))
        worker.step()
        copier.wait_held(1)
        offload = worker.offload("c", chain_of(range(900, 1060)), np.arange(160))
        until(lambda: bool(worker.step()) or offload.state is TaskState.COPYING, "it was not planned")
        assert load.state is TaskState.COPYING
        copier.let_go()
        finals(worker, load, offload)


def test_the_sidecar_counts_a_hit_once_and_only_if_it_was_loaded(sidecar):
    with attached(sidecar.run_dir) as worker:
        chain = chain_of(range(160))
        finals(worker, worker.offload("a", chain, np.arange(160)))
        before = sidecar.stats()["hits"]
        assert found(worker, "b", chain).tokens == 159
        worker.cancel("b")
        worker.ask("c", chain)
        hit = found(worker, "c", chain)
        finals(worker, worker.load(hit, np.arange(159)))
        worker.step()
        until(lambda: sidecar.stats()["hits"] != before, "the load was not counted")
        assert sidecar.stats()["hits"] == before + 10
        stats = worker.stats()
        assert (stats["tokens_hit"], stats["tokens_loaded"]) == (159 + 159, 159)


def test_a_flush_makes_misses_of_hits(sidecar):
    with attached(sidecar.run_dir) as worker:
        chain = chain_of(range(160))
        finals(worker, worker.offload("a", chain, np.arange(160)))
        hit = found(worker, "b", chain)
        assert worker.flush(chain.namespace, timeout_s=10) is not None
        load = worker.load(hit, np.arange(159))
        finals(worker, load)
        assert (load.state, load.reason) == (TaskState.FAILED, "gone")
        assert found(worker, "c", chain).reason == "absent"
        again = worker.offload("c", chain, np.arange(160))
        finals(worker, again)
        assert again.pages == 10


def test_wait_is_bounded_and_ends_early_when_something_came(sidecar):
    with attached(sidecar.run_dir) as worker:
        chain = chain_of(range(160))
        found(worker, "a", chain)
        begun = time.monotonic()
        worker.wait(0.05)
        assert time.monotonic() - begun >= 0.04  # nothing is due
        task = worker.offload("a", chain, np.arange(160))
        begun = time.monotonic()
        for _ in range(50):
            if task in worker.step():
                break
            worker.wait(10.0)
        assert task.final
        assert time.monotonic() - begun < 5.0  # woken each time, not waited out


def test_close_waits_for_a_copy_no_longer_than_told(sidecar):
    own = buffers()
    copier = HeldCopier(own, hold=False)
    worker = attached(sidecar.run_dir, buffers=own, copier=copier)
    chain = chain_of(range(160))
    finals(worker, worker.offload("a", chain, np.arange(160)))
    copier.hold()
    load = worker.load(found(worker, "b", chain), np.arange(159))
    worker.step()
    copier.wait_held(1)
    begun = time.monotonic()
    worker.close(0.3)
    assert time.monotonic() - begun < 5.0
    assert not load.final
    copier.let_go()


def test_a_closed_worker_says_so_and_may_be_closed_again(sidecar):
    worker = attached(sidecar.run_dir)
    worker.close()
    worker.close()
    with pytest.raises(UsageError, match="closed"):
        worker.step()
    with pytest.raises(UsageError, match="closed"):
        worker.lookup("a", chain_of(range(160)), 0)


def test_another_thread_is_refused(sidecar):
    with attached(sidecar.run_dir) as worker:
        worker.step()
        seen = []

        def other():
            for call in (worker.step, lambda: worker.cancel("a"), lambda: worker.flush()):
                with pytest.raises(WrongThreadError):
                    call()
                seen.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(10)
        assert len(seen) == 3


def test_units_that_the_buffers_do_not_have_are_refused(sidecar):
    with attached(sidecar.run_dir) as worker, pytest.raises(UsageError, match="2047"):
        worker.offload("a", chain_of(range(160)), np.arange(2000, 2160))


def test_another_geometry_is_refused_with_what_helps(sidecar):
    other = KVLayout(32, ((Plane("kv", 512),),), "other")
    with attached(sidecar.run_dir):
        threads = threading.active_count()
        with pytest.raises(GeometryError, match="kvtier serve"):
            Worker(
                KVBuffers(other, (torch.zeros((64, 512), dtype=torch.uint8),)),
                run_dir=sidecar.run_dir,
                options=OPTIONS,
            )
        assert threading.active_count() == threads


def test_closing_leaves_no_session_no_lease_and_no_thread(sidecar):
    threads = threading.active_count()
    sessions, leases = (sidecar.stats()[name] for name in ("sessions", "leases"))
    worker = attached(sidecar.run_dir, options=Options(min_load_tokens=16))
    chain = chain_of(range(160))
    worker.offload("a", chain, np.arange(160))
    worker.step()
    worker.ask("b", chain)
    worker.close()
    until(lambda: sidecar.stats()["sessions"] == sessions, "a session is left")
    assert sidecar.stats()["leases"] == leases
    assert threading.active_count() == threads
