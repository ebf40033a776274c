"""The smallest engine that a Worker test needs: buffers with known bytes, chains, and steps."""

from __future__ import annotations

import time

import numpy as np
import torch

from kvtier import KVBuffers, KVLayout, Options, PageChain, Plane, Worker

LAYOUT = KVLayout(16, ((Plane("0.kv", 1024), Plane("1.kv", 1024)),), "worker test")
SLOTS = 2048
OPTIONS = Options(min_load_tokens=16, write="all")


def buffers(layout=LAYOUT, seed=1) -> KVBuffers:
    generator = torch.Generator().manual_seed(seed)
    planes = tuple(
        torch.randint(0, 256, (SLOTS, plane.row_bytes), dtype=torch.uint8, generator=generator)
        for plane in layout.shards[0]
    )
    return KVBuffers(layout, planes)


def chain_of(tokens, layout=LAYOUT) -> PageChain:
    chain = PageChain(layout.namespace("m"), layout.page_tokens)
    chain.extend(np.asarray(tokens, np.int32))
    return chain


def found(worker, name, chain, computed=0):
    """The hit of a look-up that is asked again each step, as engines do."""
    deadline = time.monotonic() + 10
    while (hit := worker.lookup(name, chain, computed)) is None:
        assert time.monotonic() < deadline, "None for longer than lookup_ms"
        worker.step()
    return hit


def finals(worker, *tasks):
    """Steps until `tasks` have come back; each exactly once."""
    back = []
    deadline = time.monotonic() + 20
    while not all(task in back for task in tasks):
        assert time.monotonic() < deadline, f"not final: {[task for task in tasks if task not in back]}"
        back += worker.step()
        worker.wait(0.01)
    assert len(set(back)) == len(back)
    return back


def attached(run_dir, **options) -> Worker:
    settings = {"options": OPTIONS, **options}
    worker = Worker(settings.pop("buffers", None) or buffers(), run_dir=run_dir, **settings)
    assert worker.wait_attached(20)
    return worker
