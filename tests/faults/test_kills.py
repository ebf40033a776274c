"""Workers and sidecars killed at each step: nothing is lost, nothing is wrong, the others go on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from kvtier.tasks import TaskState
from tests.faults.content import chain_of
from tests.faults.nursery import Nursery
from tests.faults.victims import BASE, OWN, PAGES, STEPS, TOKENS, Small
from tests.server.sidecar import Sidecar, until

FRAMES = 256


class Scene:
    """A sidecar, a nursery of victims, and a survivor that has stored `BASE`."""

    def __init__(self, folder: Path, sidecar: Sidecar, nursery: Nursery) -> None:
        self.folder, self.sidecar, self.nursery = folder, sidecar, nursery
        self.survivor = Small(sidecar.run_dir, BASE)
        self.stores = 0

    def begin(self) -> None:
        """As at the start: `BASE` is stored, and nothing else."""
        self.survivor.worker.flush(timeout_s=10.0)
        until(lambda: self.sidecar.stats()["frames_free"] == FRAMES, "a flush left something")
        task = self.survivor.offload()
        self.survivor.final(task)
        assert task.pages == PAGES

    def victim(self, step: str) -> int:
        """One that stands at `step`, or has died there by itself."""
        pid = self.nursery.born(step)
        reached = self.folder / f"reached.{pid}"
        until(lambda: reached.exists() or self.nursery.ended(pid), f"{step} is not reached")
        return pid

    def others_go_on(self, pages: int) -> None:
        """The survivor stores more than the pool holds; each is found again, and right."""
        for _ in range(pages // PAGES):
            self.stores += 1
            chain = chain_of(np.arange(TOKENS + 1) + 1_000_000 + self.stores * 1000)
            self.survivor.final(self.survivor.offload(chain))
            assert self.survivor.stored(chain) == TOKENS

    def only_the_survivor_is_left(self) -> None:
        def clean() -> bool:
            self.survivor.worker.step()
            now = self.sidecar.stats()
            held = ("leases", "frames_held", "frames_writing", "frames_doomed", "frames_quarantined")
            return now["sessions"] == 2 and not any(now[name] for name in held)

        until(clean, f"something is left: {self.sidecar.stats()}")
        now = self.sidecar.stats()
        assert (
            now["frames_free"] + now["frames_ready"] + now["frames_clearing"] == now["frames_total"] == FRAMES
        )
        assert now["internal_errors"] == now["bad_requests"] == 0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("kills")
    with Sidecar(folder / "run", f"{FRAMES * 4}KiB") as sidecar, Nursery(sidecar.run_dir, folder) as nursery:
        made = Scene(folder, sidecar, nursery)
        yield made
        made.survivor.worker.close()


@pytest.mark.parametrize("step", [step for step in STEPS if step not in ("forked", "stopped")])
def test_a_worker_killed_at_each_step_leaves_nothing_and_no_half_page(scene, step):
    """P4, R9, R11, R20: what it was storing is there whole, or not at all."""
    scene.begin()
    pid = scene.victim(step)
    if step == "begin_store":
        until(lambda: scene.sidecar.stats()["frames_writing"] == PAGES, "nothing was granted")
    if not scene.nursery.ended(pid):
        scene.nursery.send(pid, signal.SIGKILL)
    scene.only_the_survivor_is_left()
    own = scene.survivor.stored(chain_of(OWN))
    assert own in {"finish": (0, TOKENS), "stored": (TOKENS,)}.get(step, (0,))
    assert scene.survivor.stored(chain_of(BASE)) in ((0, TOKENS) if step == "flush" else (TOKENS,))
    scene.others_go_on(2 * PAGES)


def test_a_forked_child_keeps_what_its_killed_parent_was_writing(scene):
    """R21: until it has ended too; others store and evict meanwhile."""
    scene.begin()
    pid = scene.victim("forked")
    scene.nursery.send(pid, signal.SIGKILL)
    until(lambda: scene.sidecar.stats()["sessions_doubted"] == 2, "its end was not noticed")
    scene.others_go_on(2 * FRAMES)
    assert scene.sidecar.stats()["frames_writing"] == PAGES
    (scene.folder / f"child may end.{pid}").touch()
    scene.only_the_survivor_is_left()


@pytest.mark.parametrize("also", ["nothing", "a flush"])
def test_a_stopped_workers_pins_are_not_taken_away_while_others_evict(scene, also):
    """P10, R13: it goes on, and what it loads is right, also when it was flushed meanwhile."""
    scene.begin()
    pid = scene.victim("stopped")
    scene.nursery.send(pid, signal.SIGSTOP)
    if also == "a flush":
        assert scene.survivor.worker.flush(timeout_s=10.0) == (0, PAGES)
    evicted = scene.sidecar.stats()["evicted"]
    scene.others_go_on(3 * FRAMES)
    assert scene.sidecar.stats()["evicted"] > evicted + FRAMES
    (scene.folder / f"go on.{pid}").touch()
    scene.nursery.send(pid, signal.SIGCONT)
    assert scene.nursery.ended(pid, 20)
    assert (scene.folder / f"right.{pid}").exists(), scene.nursery.wrong()
    scene.only_the_survivor_is_left()


def test_one_of_two_engines_dies_while_both_load_and_store(scene):
    scene.begin()
    loads, stores = scene.victim("copying in"), scene.victim("copying out")
    scene.nursery.send(loads, signal.SIGKILL)
    until(lambda: scene.sidecar.stats()["sessions"] == 4, "the death was not noticed")
    assert scene.sidecar.stats()["frames_writing"] == PAGES
    assert scene.survivor.stored(chain_of(OWN)) == 0
    scene.nursery.send(stores, signal.SIGKILL)
    scene.only_the_survivor_is_left()


def test_a_sidecar_killed_in_a_load_and_a_store_and_one_that_comes_after(tmp_path):
    """R24, P13: the load that has begun is right or failed, the store failed; later all is as ever."""
    with Sidecar(tmp_path / "run", f"{FRAMES * 4}KiB") as sidecar:
        small = Small(sidecar.run_dir, BASE)
        base, own = chain_of(BASE), chain_of(OWN)
        small.final(small.offload())
        hit = small.hit(base)
        small.copier.hold()
        load = small.load(hit)
        store = small.offload(own)
        while len(small.copier.held) < PAGES + 1:
            small.worker.step()
            small.worker.wait(0.01)
        small.copier.finish(3)
        sidecar.kill()
        until(lambda: (small.worker.step(), small.worker.attached)[1] is False, "its end was not noticed")
        sidecar.again()
        small.copier.let_go()
        small.final(load, store)
        assert store.state is TaskState.FAILED
        assert load.state is TaskState.FAILED or small.right(base, TOKENS)
        assert small.worker.wait_attached(20)
        assert small.stored(base) == 0
        for chain in (base, own):
            task = small.offload(chain)
            small.final(task)
            assert (task.state, task.pages) == (TaskState.DONE, PAGES)
            assert small.stored(chain) == TOKENS
        small.worker.close()
        stats = sidecar.stats()
        assert stats["sessions"] == stats["leases"] == stats["frames_held"] == 0
