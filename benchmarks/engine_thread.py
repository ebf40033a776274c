"""What the calls of a Worker cost on the engine's thread: `ask`, `lookup`, `load`, `offload`, `step`.

    python benchmarks/engine_thread.py

A real sidecar, a Worker on the CPU device whose copy thread runs beside, and an engine that computes nothing
(it sleeps 2 ms a step, so that other threads run). Each round is a request that misses and is offloaded in
chunks of prefill, then one that hits all of it and is loaded. Goals: 100 us at the median and 500 us at p99
for lookup, load, offload and step. Printed, not asserted; a shared machine shows in p99 first, so beside the
clock on the wall stands the CPU time of the thread. A `lookup` without an earlier `ask` waits for a round
trip. A round in which the sidecar answered too late for a hit is counted as spoilt.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from goals import goal
from sidecars import serving

from kvtier import KVBuffers, KVLayout, Options, PageChain, Plane, Worker
from kvtier.tasks import Task, TaskState

PAGE_TOKENS = 64
ROW_BYTES = 64
SHAPES = ((8_192, 2_048, 60), (131_072, 16_384, 12))
"""Tokens of a prompt, tokens of one chunk of prefill, rounds."""
STEP_S = 0.002
POOL = "512MiB"
P50_US, P99_US = 100, 500
GOAL = {"lookup", "lookup, asked for", "load", "offload", "step"}

Result = TypeVar("Result")


class Clock:
    """Times calls by name: seconds on the wall, and of this thread's CPU time."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def __call__(self, name: str, call: Callable[[], Result]) -> Result:
        wall, cpu = time.perf_counter(), time.thread_time()
        result = call()
        self.times[name].append((time.perf_counter() - wall, time.thread_time() - cpu))
        return result

    def show(self, title: str) -> None:
        print(
            f"\n{title}\n{'':22}{'calls':>7}{'p50 us':>9}{'p99 us':>9}{'max us':>9}"
            f"{'CPU p50':>9}{'CPU p99':>9}"
        )
        for name, times in self.times.items():
            walls, cpus = (np.array(column) * 1e6 for column in zip(*times, strict=True))
            cells = (
                np.median(walls),
                np.percentile(walls, 99),
                walls.max(),
                np.median(cpus),
                np.percentile(cpus, 99),
            )
            met = bool(cells[0] <= P50_US and cells[1] <= P99_US)
            mark = f"  {goal(f'{P50_US} / {P99_US} or less', met)}" if name in GOAL else ""
            print(f"{name:22}{len(times):7}" + "".join(f"{cell:9.0f}" for cell in cells) + mark)


def steps_until(worker: Worker, clock: Clock, task: Task) -> None:
    deadline = time.monotonic() + 20
    while task not in clock("step", worker.step):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{task} did not end")
        time.sleep(STEP_S)


def looked_up(worker: Worker, clock: Clock, name: str, label: str, chain: PageChain) -> int:
    """Tokens of the hit, loaded."""
    deadline = time.monotonic() + 5
    while (hit := clock(label, lambda: worker.lookup(name, chain, 0))) is None:
        if time.monotonic() > deadline:
            raise TimeoutError("a look-up gave None for 5 s")
        clock("step", worker.step)
        time.sleep(STEP_S)
    if not hit.tokens:
        return 0
    units = np.arange(hit.tokens, dtype=np.int32)
    task = clock("load", lambda: worker.load(hit, units))
    steps_until(worker, clock, task)
    return hit.tokens if task.state is TaskState.DONE else -1


def one_round(worker: Worker, clock: Clock, number: int, tokens: int, chunk: int) -> bool:
    """Whether all of it came back."""
    namespace = LAYOUT.namespace("benchmark")
    prompt = np.random.default_rng(number * 1_000_003 + tokens).integers(0, 50_000, tokens, dtype=np.int32)
    chain = PageChain(namespace, PAGE_TOKENS)
    chain.extend(prompt)
    name, again = f"{tokens}-{number}", f"{tokens}-{number} again"
    clock("ask", lambda: worker.ask(name, chain))
    clock("step", worker.step)
    time.sleep(STEP_S)
    if looked_up(worker, clock, name, "lookup, asked for", chain):
        raise RuntimeError("a prompt that nobody has computed was found")
    slots = np.arange(tokens, dtype=np.int32)
    tasks = []
    for end in range(chunk, tokens + 1, chunk):
        time.sleep(STEP_S)  # the forward pass of this chunk
        tasks.append(clock("offload", partial(worker.offload, name, chain, slots[:end])))
        clock("step", worker.step)
    steps_until(worker, clock, tasks[-1])
    clock("offload, nothing new", lambda: worker.offload(name, chain, slots))
    worker.forget(name)
    if number % 2:
        clock("ask", lambda: worker.ask(again, chain))
        clock("step", worker.step)
        time.sleep(STEP_S)
    found = looked_up(worker, clock, again, "lookup, asked for" if number % 2 else "lookup", chain)
    worker.forget(again)
    clock("step, idle", worker.step)
    return found == tokens - 1


def spoilt(count: int) -> str:
    return f"\n{count} of them spoilt: the sidecar answered too late for a hit" if count else ""


LAYOUT = KVLayout(PAGE_TOKENS, ((Plane("kv", ROW_BYTES),),), "benchmark of the engine's thread")


def main() -> int:
    with serving(POOL) as run_dir:
        plane = torch.zeros((max(tokens for tokens, _, _ in SHAPES), ROW_BYTES), dtype=torch.uint8)
        options = Options(max_inflight_bytes=1 << 30)
        with Worker(KVBuffers(LAYOUT, (plane,)), run_dir=run_dir, options=options) as worker:
            if not worker.wait_attached(20):
                raise RuntimeError("the worker did not attach")
            for tokens, chunk, rounds in SHAPES:
                clock, whole = Clock(), 0
                for number in range(rounds + 2):
                    whole += one_round(worker, Clock() if number < 2 else clock, number, tokens, chunk)
                clock.show(
                    f"prompts of {tokens} tokens ({tokens // PAGE_TOKENS} pages), chunks of {chunk}, "
                    f"{rounds} rounds" + spoilt(rounds + 2 - whole)
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
