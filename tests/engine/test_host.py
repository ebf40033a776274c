"""The engine on the real worker and a real sidecar: hits, failures, and loads held open by the device's
double."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtier.config import Options
from kvtier.device.base import KVBuffers
from kvtier.device.testing import HeldCopier
from kvtier.worker import Worker
from mini_engine.engine import Engine, Phase, Request
from tests.engine import tiny
from tests.server.sidecar import Sidecar

PAGE = 16
ON_EITHER = pytest.mark.parametrize("memory", [{}, {"max_tokens": 192}], ids=["pages", "ranges"])
PATIENT_S = 20.0
"""How long these tests wait for what must happen; a busy machine fails none."""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kve-", dir="/tmp"))
    yield folder / "run"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def sidecar(run_dir: Path) -> Iterator[Sidecar]:
    with Sidecar(run_dir) as started:
        yield started


@pytest.fixture
def engines(run_dir: Path) -> Iterator[Callable[..., Engine]]:
    """Makes engines that are closed at the end."""
    made: list[Engine] = []

    def make(copiers: list[HeldCopier] | None = None, **more: Any) -> Engine:
        def worker(buffers: KVBuffers, **kw: Any) -> Worker:
            copier = None
            if copiers is not None:
                copier = HeldCopier(buffers, hold=False)
                copiers.append(copier)
            return Worker(buffers, copier=copier, **kw)

        engine = Engine(
            tiny.model(),
            slots=more.pop("slots", 512),
            run_dir=run_dir,
            options=Options(min_load_tokens=PAGE, lookup_ms=PATIENT_S * 1000),
            page_tokens=PAGE,
            device_page=4,
            chunk=32,
            make_worker=worker,
            **more,
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def attached(engine: Engine) -> Engine:
    assert engine.worker.wait_attached(PATIENT_S)
    return engine


def until(engine: Engine, true: Callable[[], bool]) -> None:
    """Step until `true()`."""
    deadline = time.monotonic() + PATIENT_S
    while not true():
        assert time.monotonic() < deadline
        if not engine.step():
            engine.worker.wait(0.01)


def ask(engine: Engine, prompt: list[int], new: int = 12, name: str = "r") -> Request:
    request = engine.add(name, prompt, new, ignore_eos=True)
    until(engine, lambda: not engine.busy)
    engine.tasks.check()
    return request


def same(one: Request, other: Request) -> bool:
    return one.generated == other.generated and torch.equal(one.first_logits, other.first_logits)


def test_an_engine_finds_what_another_one_stored_bit_for_bit(
    sidecar: Sidecar, engines: Callable[..., Engine]
) -> None:
    prompt = tiny.prompt(150)
    first = attached(engines())
    cold = ask(first, prompt)
    assert (cold.computed, cold.from_host) == (150, 0)
    device = ask(first, prompt)
    assert sidecar.stats()["hits"] == 0
    host = ask(attached(engines()), prompt)
    assert (device.from_device, device.computed) == (144, 6)
    assert (host.from_host, host.computed) == (144, 6)
    assert sidecar.stats()["hits"] == 144 // PAGE
    assert same(cold, device)
    assert same(cold, host)


def test_a_flushed_sidecar_brings_nothing(sidecar: Sidecar, engines: Callable[..., Engine]) -> None:
    engine = attached(engines())
    cold = ask(engine, tiny.prompt(150))
    assert engine.worker.flush(timeout_s=PATIENT_S) is not None
    engine.flush_device()
    again = ask(engine, tiny.prompt(150))
    assert (again.from_device, again.from_host, again.computed) == (0, 0, 150)
    assert same(cold, again)


def test_others_decode_while_a_load_is_held_open(sidecar: Sidecar, engines: Callable[..., Engine]) -> None:
    prompt = tiny.prompt(150)
    cold = ask(attached(engines()), prompt)
    copiers: list[HeldCopier] = []
    busy = attached(engines(copiers))
    talker = busy.add("talker", tiny.prompt(20, seed=5), 60, ignore_eos=True)
    until(busy, lambda: talker.phase is Phase.DECODE and not busy.copies)
    copiers[0].hold()
    loading = busy.add("loading", prompt, 12, ignore_eos=True)
    until(busy, lambda: loading.phase is Phase.LOADING)
    copiers[0].wait_held(1, PATIENT_S)
    before = len(talker.generated)
    for _ in range(20):
        busy.step()
    assert loading.phase is Phase.LOADING
    assert len(talker.generated) == before + 20
    copiers[0].let_go()
    until(busy, lambda: not busy.busy)
    assert loading.from_host == 144
    # Its tail ran alone, so its first logits have the same bits; its later tokens were decoded in a batch.
    assert torch.equal(loading.first_logits, cold.first_logits)
    assert loading.generated == cold.generated
    assert talker.generated == ask(engines(), tiny.prompt(20, seed=5), 60).generated


def test_a_load_that_fails_is_computed(sidecar: Sidecar, engines: Callable[..., Engine]) -> None:
    prompt = tiny.prompt(150)
    cold = ask(attached(engines()), prompt)
    copiers: list[HeldCopier] = []
    broken = attached(engines(copiers))
    copiers[0].hold()
    request = broken.add("r", prompt, 12, ignore_eos=True)
    until(broken, lambda: request.phase is Phase.LOADING)
    copiers[0].wait_held(1, PATIENT_S)
    copiers[0].fail()
    copiers[0].let_go()
    until(broken, lambda: not broken.busy)
    assert (request.from_host, request.computed) == (0, 150)
    assert request.miss_reason.startswith("load failed")
    assert same(cold, request)


@ON_EITHER
def test_slots_of_a_cancelled_request_are_not_given_away_under_its_load(
    sidecar: Sidecar, engines: Callable[..., Engine], memory: dict[str, int]
) -> None:
    prompt = tiny.prompt(150)
    ask(attached(engines()), prompt)
    copiers: list[HeldCopier] = []
    small = attached(engines(copiers, slots=192, **memory))
    copiers[0].hold()
    loading = small.add("loading", prompt, 4)
    until(small, lambda: loading.phase is Phase.LOADING)
    copiers[0].wait_held(1, PATIENT_S)
    small.cancel(loading)
    other = small.add("other", tiny.prompt(100, seed=9), 4, ignore_eos=True)
    for _ in range(5):
        small.step()
    assert other.phase is Phase.WAITING
    copiers[0].let_go()
    until(small, lambda: not small.busy)
    assert other.generated == ask(engines(), tiny.prompt(100, seed=9), 4).generated
    small.tasks.check()


@ON_EITHER
def test_an_offload_reads_its_slots_before_they_are_given_to_others(
    sidecar: Sidecar, engines: Callable[..., Engine], memory: dict[str, int]
) -> None:
    """The copies of a finished request are held back; another one wants its slots; the host's KV stays
    right."""
    copiers: list[HeldCopier] = []
    small = attached(engines(copiers, slots=192, **memory))
    copiers[0].hold()
    prompt = tiny.prompt(150)
    first = small.add("first", prompt, 4, ignore_eos=True)
    until(small, lambda: first.phase is Phase.DONE and bool(copiers[0].held))
    small.flush_device()
    other = small.add("other", tiny.prompt(100, seed=9), 4, ignore_eos=True)
    for _ in range(5):
        small.step()
    assert other.phase is Phase.WAITING
    copiers[0].let_go()
    until(small, lambda: not small.busy)
    again = ask(attached(engines()), prompt, 4)
    assert again.from_host == 144
    assert same(first, again)


def test_without_a_sidecar_everything_is_computed(engines: Callable[..., Engine]) -> None:
    engine = engines()
    cold = ask(engine, tiny.prompt(150))
    engine.flush_device()
    again = ask(engine, tiny.prompt(150))
    assert (again.from_host, again.computed) == (0, 150)
    assert again.miss_reason
    assert same(cold, again)


def test_a_sidecar_that_is_killed_costs_hits_and_nothing_else(
    sidecar: Sidecar, engines: Callable[..., Engine]
) -> None:
    engine = attached(engines())
    cold = ask(engine, tiny.prompt(150))
    sidecar.kill()
    engine.flush_device()
    alone = ask(engine, tiny.prompt(150))
    assert (alone.from_host, alone.computed) == (0, 150)
    assert same(cold, alone)
    sidecar.again()
    deadline = time.monotonic() + PATIENT_S
    while not engine.worker.attached:  # by itself, while the engine steps
        assert time.monotonic() < deadline
        engine.step()
        engine.worker.wait(0.05)
    engine.flush_device()
    stored = ask(engine, tiny.prompt(150))
    engine.flush_device()
    hit = ask(engine, tiny.prompt(150))
    assert (stored.from_host, hit.from_host) == (0, 144)
    assert same(cold, hit)


def test_a_sidecar_killed_during_a_load_harms_no_answer(
    sidecar: Sidecar, engines: Callable[..., Engine]
) -> None:
    prompt = tiny.prompt(150)
    cold = ask(attached(engines()), prompt)
    copiers: list[HeldCopier] = []
    engine = attached(engines(copiers))
    copiers[0].hold()
    request = engine.add("r", prompt, 12, ignore_eos=True)
    until(engine, lambda: request.phase is Phase.LOADING)
    copiers[0].wait_held(1, PATIENT_S)
    sidecar.kill()
    copiers[0].let_go()
    until(engine, lambda: not engine.busy)
    assert request.from_host + request.computed == 150
    assert same(cold, request)
