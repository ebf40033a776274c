"""A real engine serves random requests while its sidecar is killed, stopped and restarted at random steps.

Its tokens are always those of an engine without kvtier; no call raises, no step hangs. `KVTIER_ENGINE_S` says
for how many seconds (default 3).
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtier.config import Options
from mini_engine.engine import Engine, Phase, Request
from tests.engine import tiny
from tests.server.sidecar import Sidecar

ENGINE_S = float(os.environ.get("KVTIER_ENGINE_S", "3"))
SEED = int(os.environ.get("KVTIER_ENGINE_SEED", "1"))
HANGS_S = 3.0
PAGE = 16


def engine_at(run_dir: Path, **more: Any) -> Engine:
    return Engine(
        tiny.model(),
        run_dir=run_dir,
        options=Options(min_load_tokens=PAGE, write="all", lookup_ms=20.0),
        page_tokens=PAGE,
        device_page=4,
        chunk=32,
        **{"slots": 512, **more},
    )


class Tortured:
    """A sidecar that may be away; `torture` does one thing to it, or to the engine's requests."""

    def __init__(self, sidecar: Sidecar, seed: int) -> None:
        self.sidecar = sidecar
        self.random = random.Random(seed)
        self.counts = dict.fromkeys(("killed", "stopped", "started", "cancelled"), 0)
        self.stopped = False
        self.cancelled: set[Request] = set()

    def torture(self, engine: Engine, running: list[Request]) -> None:
        dead = self.sidecar.process.poll() is not None
        dice = self.random.random()
        if dead:
            if dice < 0.03:
                self.sidecar.again()
                self.counts["started"] += 1
        elif self.stopped:
            if dice < 0.05:
                self.sidecar.send(signal.SIGCONT)
                self.stopped = False
            elif dice < 0.06:
                self.die()
        elif dice < 0.006:
            self.die()
        elif dice < 0.012:
            self.sidecar.send(signal.SIGSTOP)
            self.stopped = True
            self.counts["stopped"] += 1
        elif dice < 0.02 and running:
            request = self.random.choice(running)
            engine.cancel(request)
            self.cancelled.add(request)
            self.counts["cancelled"] += 1

    def die(self) -> None:
        self.sidecar.kill()
        self.stopped = False
        self.counts["killed"] += 1


@pytest.mark.parametrize(
    "memory", [{"slots": 400}, {"slots": 400, "max_tokens": 200}], ids=["pages", "ranges"]
)
def test_tokens_are_those_of_an_engine_alone_whatever_its_sidecar_does(tmp_path, memory):
    alone = engine_at(tmp_path / "nobody")
    right: dict[tuple[int, int], list[int]] = {}

    def expected(length: int, seed: int) -> list[int]:
        if (length, seed) not in right:
            request = alone.add(f"{length} {seed}", tiny.prompt(length, seed), 16, ignore_eos=True)
            alone.run()
            alone.flush_device()
            right[length, seed] = request.generated
        return right[length, seed]

    with Sidecar(tmp_path / "run", "2MiB") as sidecar:
        tortured = Tortured(sidecar, SEED)
        engine = engine_at(sidecar.run_dir, **memory)
        asked: list[tuple[Request, int, int]] = []
        begun, from_host = time.monotonic(), 0
        while time.monotonic() - begun < ENGINE_S or engine.busy:
            open_ = [one for one, _, _ in asked if one.phase is not Phase.DONE]
            if len(open_) < 4 and time.monotonic() - begun < ENGINE_S:
                length, seed = tortured.random.choice((40, 90, 150, 151, 180)), tortured.random.randint(1, 6)
                request = engine.add(f"r{len(asked)}", tiny.prompt(length, seed), 16, ignore_eos=True)
                asked.append((request, length, seed))
                if tortured.random.random() < 0.3:
                    engine.flush_device()
            tortured.torture(engine, open_)
            now = time.monotonic()
            if not engine.step():
                engine.worker.wait(0.01)
            assert time.monotonic() - now < HANGS_S, "a step hangs"
            assert now - begun < ENGINE_S + 30, "requests do not end"
        engine.tasks.check()
        engine.close()
        for request, length, seed in asked:
            assert request.phase is Phase.DONE
            if request not in tortured.cancelled:
                assert request.generated == expected(length, seed), (request.from_host, request.from_device)
                from_host += request.from_host
        print(len(asked), "requests,", from_host, "tokens from the host,", tortured.counts)
        assert tortured.counts["killed"] > 0
        assert from_host > 0
    alone.close()
