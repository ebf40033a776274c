"""The mover with a real sidecar: leases, the pool's own memory, and a sidecar that goes and comes back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.client import CacheClient
from kvtier.device.testing import HeldCopier
from kvtier.errors import GeometryError, Status
from kvtier.mover import Mover
from kvtier.wire.messages import End, LoadChain, LookupReply, StoreChain
from kvtier.wire.plan import Copy, Kind, Lane, Reason, encode
from tests.device import buffers as shapes
from tests.server.sidecar import Sidecar, until

NS = b"tests of movers "


class Engine:
    """A planner's client and a mover, attached."""

    def __init__(self, sidecar: Sidecar, buffers, copier=None) -> None:
        self.buffers = buffers
        self.mover = Mover(buffers, sidecar.run_dir, "g", copier=copier)
        self.client = CacheClient(sidecar.run_dir, layout=buffers.layout, group="g", timeout_s=10.0)
        self.tasks = 0
        self.failed = 0

    def ready(self) -> bool:
        self.client.poll()
        return self.client.attached and self.client.complete and self.mover.attached

    def wait_ready(self) -> None:
        until(self.ready, "the engine did not attach")

    def give(self, kind: Kind, frames, units, gens=()) -> Copy:
        self.tasks += 1
        lane = Lane.SHORT_LOADS if kind == Kind.LOAD else Lane.OFFLOADS
        arrays = (np.array(frames, np.int32), np.array(units, np.int32))
        copy = Copy(self.tasks, kind, lane, self.tasks, *arrays, 0, np.array(gens, np.uint32))
        self.mover.mark()
        self.mover.apply(encode([copy], self.client.pool_id))
        return copy

    def finish(self, copy: Copy) -> list[Reason]:
        while True:
            seen = self.mover.progress().read(self.failed)
            if seen.done[copy.lane] >= copy.seq:
                self.failed = seen.failed
                return [failure.reason for failure in seen.failures]
            assert self.mover.wait_progress(10)

    def store(self, keys: bytes, units) -> None:
        found = self.client.lookup(NS, keys)
        assert isinstance(found.body, LookupReply)
        grants = []

        def granted() -> bool:
            """FULL until the whole group has mapped the first chunk (R28)."""
            self.client.poll()
            number = self.client.next_number()
            grants[:] = self.client.begin_store([StoreChain(number, NS, keys, found.body.epoch)])
            return grants[0].status != Status.FULL

        until(granted, "no frame was mapped by all of the group")
        (grant,) = grants
        assert grant.status == Status.OK
        assert self.finish(self.give(Kind.OFFLOAD, grant.frames, units)) == []
        (ended,) = self.client.finish([End(grant.number, (0,))])
        assert ended.visible == len(keys) // 32

    def begin_load(self, keys: bytes):
        number = self.client.next_number()
        (grant,) = self.client.begin_load([LoadChain(number, NS, keys)])
        return grant

    def close(self) -> None:
        self.client.close()
        assert self.mover.close()


@pytest.fixture
def sidecar(tmp_path: Path):
    with Sidecar(tmp_path / "run", "4MiB") as server:
        yield server


def test_kv_comes_back_through_the_pool(sidecar):
    buffers = shapes.mixed_units(slots=80)
    shapes.fill_random(buffers)
    engine = Engine(sidecar, buffers)
    engine.wait_ready()
    keys, units = os.urandom(32 * 4), shapes.units_for(buffers, 0, 32)
    engine.store(keys, units)
    before = shapes.image(buffers)
    for plane in buffers.planes:
        plane.zero_()
    grant = engine.begin_load(keys)
    assert grant.status == Status.OK
    assert engine.finish(engine.give(Kind.LOAD, grant.frames, units, grant.gens)) == []
    engine.client.finish([End(grant.number, (0,))])
    for plane, now, then in zip(buffers.layout.shards[0], shapes.image(buffers), before, strict=True):
        rows = np.unique(units // (plane.unit_tokens // buffers.unit_tokens))
        np.testing.assert_array_equal(now[rows], then[rows])
    engine.close()
    assert sidecar.stats()["sessions"] == 0


def test_generations_of_a_lease_that_is_not_ours_are_a_failed_load(sidecar):
    """R31: the table is read again after the copy."""
    buffers = shapes.joined()
    engine = Engine(sidecar, buffers)
    engine.wait_ready()
    keys = os.urandom(32)
    engine.store(keys, np.arange(8))
    grant = engine.begin_load(keys)
    stale = np.array(grant.gens) - 1
    assert engine.finish(engine.give(Kind.LOAD, grant.frames, np.arange(8), stale)) == [Reason.CHANGED]
    assert engine.mover.stats()["protocol_violations"] == 1
    engine.close()


def test_a_copy_outlives_its_sidecar_and_the_next_pool_is_attached_when_it_is_quiet(sidecar):
    """R24, with SIGKILL in the middle of a load."""
    buffers = shapes.joined(slots=80)
    shapes.fill_random(buffers)
    copier = HeldCopier(buffers, hold=False)
    engine = Engine(sidecar, buffers, copier)
    engine.wait_ready()
    keys, units = os.urandom(32 * 2), np.arange(16)
    before = shapes.image(buffers)
    engine.store(keys, units)
    for plane in buffers.planes:
        plane.zero_()
    grant = engine.begin_load(keys)
    copier.hold()
    load = engine.give(Kind.LOAD, grant.frames, units, grant.gens)
    copier.wait_held(2)
    sidecar.kill()
    assert engine.finish(engine.give(Kind.OFFLOAD, grant.frames, units)) == [Reason.AWAY]
    sidecar.again()
    old = engine.mover._copying._client.pool
    engine.mover.wait_progress(0)  # what has finished already
    assert not engine.mover.wait_progress(0.2)  # the new sidecar is there; while the load runs ...
    assert not engine.mover.attached  # ... nothing is attached
    assert old.frames > 0
    copier.let_go()
    assert engine.finish(load) == []
    for now, then in zip(shapes.image(buffers), before, strict=True):
        np.testing.assert_array_equal(now[:16], then[:16])
    engine.wait_ready()
    engine.store(keys, units)
    engine.close()


def test_without_a_sidecar_copies_fail_and_a_late_one_is_found(tmp_path):
    buffers = shapes.joined()
    mover = Mover(buffers, tmp_path / "run", "g", attach_timeout_s=0.1)
    mover.mark()
    copy = Copy(1, Kind.OFFLOAD, Lane.OFFLOADS, 1, np.zeros(1, np.int32), np.arange(8, dtype=np.int32))
    mover.apply(encode([copy], b""))
    assert mover.wait_progress(5)
    assert [failure.reason for failure in mover.progress().read().failures] == [Reason.AWAY]
    with Sidecar(tmp_path / "run", "4MiB"):
        until(lambda: mover.attached, "the mover did not attach")
        assert mover.close()


def test_another_geometry_is_refused_at_once(sidecar):
    first = Mover(shapes.joined(), sidecar.run_dir, "a")
    until(lambda: first.attached, "the mover did not attach")
    with pytest.raises(GeometryError):
        Mover(shapes.joined(row_bytes=4096), sidecar.run_dir, "b")
    assert first.close()
