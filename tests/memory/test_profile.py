"""How large the KV buffers may be: free memory, a fraction of it, and the same number on every rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import kvtier
from kvtier.errors import UsageError
from kvtier.memory import MemoryManager, PagedStrategy
from kvtier.memory import memory_manager as module
from kvtier.memory.profile import ProfileError, agree_min, free_bytes

CPU = torch.device("cpu")
CELL = 2 * 2 * 8 * 4 * 3
GIB = 1 << 30


def make(size: int | None, **options: Any) -> MemoryManager:
    return MemoryManager(size, torch.float32, 2, 8, 3, **options)


def host(root: Path, files: dict[str, str], available_kib: int = 8 << 20) -> Path:
    meminfo = f"MemTotal: 999 kB\nMemAvailable: {available_kib} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_tokens_and_the_hold_slot_fit_the_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda device: 1000 * CELL + 5)
    manager = make(None, mem_fraction=0.5)
    assert manager.size == 499
    assert manager.kv_buffer.nbytes == 500 * CELL


def test_what_the_buffers_take_now_is_free_for_the_next_size(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = make(99)
    monkeypatch.setattr(module, "free_bytes", lambda device: 100 * CELL)
    assert manager.profile_size(1.0) == 199
    manager.resize_mem(199)
    monkeypatch.setattr(module, "free_bytes", lambda device: 0)
    assert manager.profile_size(1.0) == 199
    PagedStrategy(manager.allocator, 4)
    assert manager.profile_size(0.5, available_bytes=0) == 99


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01])
def test_a_fraction_is_more_than_none_and_at_most_all(fraction: float) -> None:
    with pytest.raises(UsageError, match="mem_fraction"):
        make(4).profile_size(fraction, available_bytes=1 << 20)


def test_no_room_for_a_token_is_an_error_that_says_what_one_takes() -> None:
    with pytest.raises(UsageError, match=rf"one takes {CELL} bytes .* and 300 bytes of cpu are free"):
        make(1).profile_size(0.5, available_bytes=300)


def test_the_cpus_memory_is_what_is_available_here() -> None:
    assert 1 << 20 < free_bytes(CPU) < 1 << 50


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": "1\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            {  # a container's own view: the path names a place outside
                "proc/self/cgroup": "0::/outside\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": "0\n",
            },
            GIB,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu:/x\n4:memory:/c\n",
                "sys/fs/cgroup/memory/c/memory.limit_in_bytes": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory/c/memory.usage_in_bytes": f"{3 * GIB}\n",
            },
            0,
        ),
    ],
    ids=["no limit", "v2, a parent's", "v2, container", "v1, over it"],
)
def test_a_containers_limit_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_bytes(CPU, host(tmp_path, files)) == expected


def test_what_cannot_be_measured_is_an_error_that_says_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="give available_bytes"):
        free_bytes(CPU, tmp_path)
    with pytest.raises(ProfileError, match="only cpu and cuda"):
        free_bytes(torch.device("meta"))


def test_alone_a_rank_agrees_with_itself() -> None:
    assert agree_min(7, "x") == 7


RANK = """
import json, sys, torch, torch.distributed as dist
from datetime import timedelta
from kvtier.memory import MemoryManager
from kvtier.memory import memory_manager as module
from kvtier.memory.profile import ProfileError, agree_min

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
manager = MemoryManager(1, torch.float32, 2, 8, 3)
manager._buffer_bytes = 0
cell = manager.get_cell_size()
out = {"agreed": manager.profile_size(1.0, available_bytes=(100 + 50 * rank) * cell)}
left = (300 - 100 * rank) * cell
out["own group"] = manager.profile_size(0.5, available_bytes=left, group=dist.group.WORLD)

def broken(device):
    raise RuntimeError("no such driver")

if rank == 1:
    module.free_bytes = broken
for what in ("one rank fails", "no room on one rank"):
    try:
        manager.profile_size(0.9, available_bytes=(1 - rank) * 900 if "room" in what else None)
    except (ProfileError, RuntimeError, ValueError) as error:
        out[what] = f"{type(error).__name__}: {error}"
out["after"] = agree_min(10 + rank, "something")
if rank == 0:  # the other rank does not come
    try:
        agree_min(1, "the number", timeout_s=1.0)
    except ProfileError as error:
        out["absent"] = str(error)
print(json.dumps(out), flush=True)
if rank == 1:
    sys.stdin.read()  # until the test has heard from both
"""


def test_ranks_agree_on_the_smallest_also_when_one_fails(tmp_path: Path) -> None:
    script, store = tmp_path / "rank.py", tmp_path / "store"
    script.write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": str(Path(kvtier.__file__).resolve().parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, trouble = processes[0].communicate(timeout=90)
        second, other_trouble = processes[1].communicate(timeout=90)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert first, trouble
    assert second, other_trouble
    zero, one = json.loads(first.splitlines()[-1]), json.loads(second.splitlines()[-1])
    assert zero["agreed"] == one["agreed"] == 99
    assert zero["own group"] == one["own group"] == 99
    assert (
        zero["one rank fails"]
        == "ProfileError: another rank than 0 has no size of the KV buffers: its own error says why"
    )
    assert one["one rank fails"] == "RuntimeError: no such driver"
    assert all("room for no token" in rank["no room on one rank"] for rank in (zero, one))
    assert zero["after"] == one["after"] == 10
    assert "rank 0 of 2 waited for the others to agree on the number, 1 s at most" in zero["absent"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_free_memory_holds_what_was_profiled() -> None:
    manager = make(None, device="cuda", mem_fraction=0.2)
    assert manager.kv_buffer.is_cuda
    free = torch.cuda.mem_get_info()[0]
    assert manager.profile_size(1.0) * CELL >= free
