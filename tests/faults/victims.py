"""Workers that go as far as one named step and stand there, to be killed.

A victim writes OUT/reached.PID when it is there; one that goes on after a stop writes OUT/right.PID. `BASE`
is a document that somebody has stored before, `OWN` the one that the victim stores.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier import KVBuffers, Options, PageChain, Worker
from kvtier.client import CacheClient
from kvtier.device.testing import HeldCopier
from kvtier.shm.attach import Attachment, AttachRequest, connect
from kvtier.shm.rundir import boot_id
from kvtier.tasks import Task, TaskState
from tests.faults.content import LAYOUT, PAGE_TOKENS, POISON, ROW, chain_of, pages_of

PAGES = 8
TOKENS = PAGES * PAGE_TOKENS
BASE = np.arange(TOKENS + 1)
OWN = np.arange(TOKENS + 1) + 50_000
PATIENT_S = 30.0


class Small:
    """A worker whose copies can be held, with right bytes for one document from unit 0 on."""

    def __init__(self, run_dir: str | Path, tokens: Any = OWN) -> None:
        self.chain = chain_of(tokens)
        planes = tuple(torch.full((1024, ROW), POISON, dtype=torch.uint8) for _ in range(2))
        self.planes = [plane.numpy() for plane in planes]
        buffers = KVBuffers(LAYOUT, planes)
        self.copier = HeldCopier(buffers, hold=False)
        options = Options(min_load_tokens=PAGE_TOKENS, write="all", lookup_ms=PATIENT_S * 1000)
        self.worker = Worker(buffers, run_dir=run_dir, options=options, copier=self.copier)
        assert self.worker.wait_attached(PATIENT_S)
        self.asked = 0

    def offload(self, chain: PageChain | None = None) -> Task:
        """Right bytes of a document in units 0 to TOKENS - 1, and the order to store them."""
        chain = self.chain if chain is None else chain
        for plane, right in zip(self.planes, pages_of(chain), strict=True):
            plane[: len(right)] = right
        self.asked += 1
        return self.worker.offload(f"store {self.asked}", chain, np.arange(chain.pages * PAGE_TOKENS))

    def hit(self, chain: PageChain) -> Any:
        self.asked += 1
        name = f"load {self.asked}"
        while (hit := self.worker.lookup(name, chain, 0)) is None:
            self.worker.step()
        return hit

    def load(self, hit: Any) -> Task:
        """Into units 512 and up."""
        for plane in self.planes:
            plane[512:] = POISON
        return self.worker.load(hit, np.arange(512, 512 + hit.tokens))

    def final(self, *tasks: Task) -> None:
        deadline = time.monotonic() + PATIENT_S
        while not all(task.final for task in tasks):
            assert time.monotonic() < deadline, tasks
            self.worker.step()
            self.worker.wait(0.01)

    def right(self, chain: PageChain, tokens: int) -> bool:
        """Whether a load has brought the first `tokens` of `chain`."""
        return all(
            np.array_equal(plane[512 : 512 + tokens], right[:tokens])
            for plane, right in zip(self.planes, pages_of(chain), strict=True)
        )

    def stored(self, chain: PageChain) -> int:
        """Tokens of it that the sidecar has; they are loaded and compared."""
        hit = self.hit(chain)
        if hit.tokens:
            task = self.load(hit)
            self.final(task)
            assert task.state is TaskState.DONE, task
            assert self.right(chain, hit.tokens), "wrong bytes"
        return int(hit.tokens)


def attach_without_hello(run_dir: str) -> Attachment:
    request = AttachRequest(
        "half", "planner", 0, 1, LAYOUT.geometry, LAYOUT.fingerprint, LAYOUT.format, boot_id()
    )
    found = connect(run_dir, request, timeout_s=PATIENT_S)
    assert isinstance(found, Attachment)
    return found


def planner_alone(run_dir: str) -> CacheClient:
    return CacheClient(run_dir, layout=LAYOUT, group="alone", attach_timeout_s=PATIENT_S)


def begun_store(run_dir: str) -> Small:
    small = Small(run_dir)
    while small.worker.lookup("store 1", small.chain, 0) is None:  # tells it the epoch
        small.worker.step()
    small.offload()
    small.worker.step()  # asked; what is granted is never looked at
    return small


def copying_out(run_dir: str) -> Small:
    """Three of its pages are in their frames, the others are not."""
    small = Small(run_dir)
    small.copier.hold()
    small.offload()
    while not small.copier.held:
        small.worker.step()
        small.worker.wait(0.01)
    small.copier.wait_held(PAGES, PATIENT_S)
    small.copier.finish(3)
    return small


def finish(run_dir: str) -> None:
    """Dies while the finish is on its way."""
    small = Small(run_dir)
    task = small.offload()
    while not task.final:
        small.worker.step()
    os.kill(os.getpid(), signal.SIGKILL)


def stored(run_dir: str) -> Small:
    small = Small(run_dir)
    small.final(small.offload())
    assert small.stored(small.chain) == TOKENS
    return small


def begun_load(run_dir: str) -> Small:
    small = Small(run_dir)
    assert small.hit(chain_of(BASE)).tokens == TOKENS
    return small


def copying_in(run_dir: str) -> tuple[Small, Task]:
    """Three of its pages have come, the others are still to be read."""
    small = Small(run_dir)
    hit = small.hit(chain_of(BASE))
    small.copier.hold()
    task = small.load(hit)
    while len(small.copier.held) < PAGES:
        small.worker.step()
        small.worker.wait(0.01)
    small.copier.finish(3)
    return small, task


def flush(run_dir: str) -> None:
    small = Small(run_dir)
    small.worker.flush(small.chain.namespace, timeout_s=0.0)
    os.kill(os.getpid(), signal.SIGKILL)


STEPS: dict[str, Callable[[str], Any]] = {
    "attach": attach_without_hello,
    "half attached": planner_alone,
    "attached": Small,
    "begin_store": begun_store,
    "copying out": copying_out,
    "finish": finish,
    "stored": stored,
    "begin_load": begun_load,
    "copying in": copying_in,
    "flush": flush,
    "forked": copying_out,
    "closes everything": copying_out,
    "stopped": copying_in,
}


def reach(run_dir: str, out: Path, step: str) -> None:
    """Go there, say so, and stand; or do what the step's name says."""
    there = STEPS[step](run_dir)
    pid = os.getpid()
    if step == "forked" and not os.fork():
        while not (out / f"child may end.{pid}").exists():
            time.sleep(0.01)
        os._exit(0)
    (out / f"reached.{pid}").touch()
    if step == "closes everything":
        os.closerange(3, 4096)
    if step == "stopped":
        small, task = there
        while not (out / f"go on.{pid}").exists():
            time.sleep(0.01)
        small.copier.let_go()
        small.final(task)
        if task.state is TaskState.DONE and small.right(chain_of(BASE), TOKENS):
            small.worker.close()
            (out / f"right.{pid}").touch()
        return
    while True:
        signal.pause()
