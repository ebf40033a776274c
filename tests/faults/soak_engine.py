"""An engine for the soak: requests that come, load, compute, store, are preempted and cancelled, for ever.

    python -m tests.faults.soak_engine RUN_DIR OUT_DIR

is a nursery: each line `SEED` on its standard input forks one engine, whose process id it prints; each line
with a step's name a victim (`victims`). (The libraries are loaded once, so that an engine can be killed and
replaced many times in a second.) All of them end with it. An engine writes its counts to OUT_DIR/PID.json,
and OUT_DIR/wrong.PID when bytes were wrong; SIGTERM ends it in order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtier import KVBuffers, Options, PageChain, Worker
from kvtier.tasks import Task, TaskState
from tests.faults import victims
from tests.faults.content import LAYOUT, PAGE_TOKENS, POISON, ROW, Documents, pages_of

SLOTS = 4096
REQUESTS = 6
OPTIONS = Options(min_load_tokens=PAGE_TOKENS, write="all", max_inflight_bytes=1 << 18, lookup_ms=50)


@dataclass(eq=False)
class Request:
    """`valid`: leading tokens whose KV is on the device. `tasks`: under way; `load`: the one to wait for."""

    name: str
    chain: PageChain
    right: list[Any]
    slots: Any
    valid: int = 0
    known: bool = False
    load: Task | None = None
    tasks: set[Task] = field(default_factory=set)
    ended: bool = False
    chunks: int = 0


class Wrong(Exception):
    """Bytes are not what they should be."""


class Engine:
    """A worker on small buffers, and requests."""

    def __init__(self, run_dir: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        planes = tuple(torch.full((SLOTS, ROW), POISON, dtype=torch.uint8) for _ in range(2))
        self.planes = [plane.numpy() for plane in planes]
        self.worker = Worker(KVBuffers(LAYOUT, planes), run_dir=run_dir, options=OPTIONS)
        self.documents = Documents()
        self.free = self.rng.permutation(SLOTS).astype(np.int32)
        self.requests: list[Request] = []
        self.owner: dict[Task, Request] = {}
        self.serial = 0
        self.counts = dict.fromkeys(
            (
                *("steps", "requests", "lookups", "hits", "pages_compared", "pages_offloaded"),
                *("loads_failed", "cancelled", "preempted", "flushes", "closed"),
            ),
            0,
        )

    def step(self) -> None:
        """One scheduler step with something random in it."""
        self.counts["steps"] += 1
        if len(self.requests) < REQUESTS and self.rng.random() < 0.7:
            self.admit()
        for request in list(self.requests):
            self.advance(request)
        if self.rng.random() < 0.002:
            self.flush()
        for task in self.worker.step():
            self.final(task)
        if self.rng.random() < 0.3:
            self.worker.wait(0.002)

    def admit(self) -> None:
        chain = self.documents.pick(self.rng)
        if chain.tokens > len(self.free):
            return
        self.serial += 1
        slots, self.free = self.free[: chain.tokens], self.free[chain.tokens :]
        request = Request(f"{self.serial}", chain, pages_of(chain), slots)
        if self.rng.random() < 0.2:  # the device has the first part
            self.compute(request, int(self.rng.integers(request.chain.pages * PAGE_TOKENS)))
        if self.rng.random() < 0.5:
            self.worker.ask(request.name, chain)
        self.requests.append(request)
        self.counts["requests"] += 1

    def compute(self, request: Request, tokens: int) -> None:
        """The KV of the next `tokens` tokens is written, as a forward pass would."""
        end = min(request.valid + tokens, request.chain.pages * PAGE_TOKENS)
        for plane, right in zip(self.planes, request.right, strict=True):
            plane[request.slots[request.valid : end]] = right[request.valid : end]
        request.valid = end

    def advance(self, request: Request) -> None:
        if request.ended:
            return
        dice = self.rng.random()
        if dice < 0.01:
            self.worker.cancel(request.name)
            self.counts["cancelled"] += 1
            self.end(request)
        elif dice < 0.02:  # a preemption: its units go, later it begins again under the same name
            self.worker.cancel(request.name)
            self.counts["preempted"] += 1
            self.end(request)
        elif not request.known:
            hit = self.worker.lookup(request.name, request.chain, request.valid)
            if hit is None:
                return
            request.known = True
            self.counts["lookups"] += 1
            if hit.tokens:
                self.counts["hits"] += 1
                units = request.slots[hit.first : hit.first + hit.tokens]
                request.load = self.keep(request, self.worker.load(hit, units))
        elif request.load is None:
            if request.valid < request.chain.pages * PAGE_TOKENS:
                self.compute(request, int(self.rng.integers(1, 160)))
                self.offload(request)
            elif request.chunks < 3 or request.tasks:
                self.offload(request)  # what was refused is tried again
            else:
                self.worker.forget(request.name)
                self.end(request)

    def offload(self, request: Request) -> None:
        request.chunks += request.valid == request.chain.pages * PAGE_TOKENS
        self.keep(request, self.worker.offload(request.name, request.chain, request.slots[: request.valid]))

    def keep(self, request: Request, task: Task) -> Task:
        request.tasks.add(task)
        self.owner[task] = request
        return task

    def final(self, task: Task) -> None:
        request = self.owner.pop(task)
        request.tasks.discard(task)
        if task is request.load:
            request.load = None
            if task.state is TaskState.DONE and not request.ended:
                self.compare(request, task)
            else:
                self.counts["loads_failed"] += 1
        elif task.state is TaskState.DONE:
            self.counts["pages_offloaded"] += task.pages
        if request.ended:
            self.end(request)

    def compare(self, request: Request, task: Any) -> None:
        first, end = task.first, task.first + task.tokens
        for number, (plane, right) in enumerate(zip(self.planes, request.right, strict=True)):
            # Of the last, unfinished page nothing can be loaded.
            got = plane[request.slots[first:end]]
            if not np.array_equal(got, right[first:end]):
                bad = np.flatnonzero((got != right[first:end]).any(axis=1))
                raise Wrong(f"plane {number}, tokens {(bad + first).tolist()} of {task}: {got[bad[0]]}")
        request.valid = max(request.valid, end)
        self.counts["pages_compared"] += task.pages

    def end(self, request: Request) -> None:
        """Units are free, and are rewritten at once, when no task has them any more."""
        request.ended = True
        if request.tasks or request not in self.requests:
            return
        self.requests.remove(request)
        for plane in self.planes:
            plane[request.slots] = POISON
        self.free = np.concatenate([self.free, request.slots])
        self.rng.shuffle(self.free)

    def flush(self) -> None:
        some = self.documents.pick(self.rng).namespace
        self.worker.flush(some if self.rng.random() < 0.7 else b"", timeout_s=0.2)
        self.counts["flushes"] += 1


def live(run_dir: str, out: Path, seed: int) -> None:
    """One engine, until it is killed or told to end."""
    ending = False

    def end(*_: object) -> None:
        nonlocal ending
        ending = True

    signal.signal(signal.SIGTERM, end)
    engine = Engine(run_dir, seed)
    counts = os.open(out / f"{os.getpid()}.json", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while not ending:
            engine.step()
            if engine.counts["steps"] % 20 == 0:
                write(counts, engine)
        engine.worker.close(2.0)
        engine.counts["closed"] += 1
        write(counts, engine)
    except BaseException:
        (out / f"wrong.{os.getpid()}").write_text(traceback.format_exc())
        raise


def write(fd: int, engine: Engine) -> None:
    """Whole at any moment: one write of one length."""
    numbers = engine.counts | {
        "protocol_violations": engine.worker.stats()["protocol_violations"],
        "superseded": engine.worker.stats()["stores_superseded"],
        "attachments_lost": engine.worker.stats()["attachments_lost"],
    }
    os.pwrite(fd, json.dumps(numbers).encode().ljust(1024), 0)


def main(run_dir: str, out: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by the kernel
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if not pid:
            os.close(0)
            status = 1
            try:
                if line.strip().isdigit():
                    live(run_dir, Path(out), int(line))
                else:
                    victims.reach(run_dir, Path(out), line.strip())
                status = 0
            finally:
                os._exit(status)
        print(pid, flush=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
