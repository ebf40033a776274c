"""How many bytes a device has left for KV, and one number that all ranks agree on.

May import torch and the ground floor. Always true: every rank takes part in the one collective, also a rank
that could not measure, so that none waits for it in vain.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvtier.errors import KVTierError, UsageError

AGREE_TIMEOUT_S = 120.0
_NO_LIMIT = 1 << 62


class ProfileError(KVTierError, RuntimeError):
    """A device's free memory could not be measured, or the ranks could not agree on a number."""


def free_bytes(device: torch.device, root: Path = Path("/")) -> int:
    """Bytes that can still be taken on `device`; of the CPU: in this process's cgroup, and on the host.

    What torch's caching allocator holds unused on a CUDA device is given back first. `root` is for tests.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        raise ProfileError(
            f"free memory of {device}: only cpu and cuda can be measured; give available_bytes"
        )
    lines = _read(root / "proc/meminfo").splitlines()
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not available:
        raise ProfileError(f"{root / 'proc/meminfo'} has no MemAvailable: give available_bytes")
    return max(0, min(available[0], _cgroup_bytes(root)))


def agree_min(value: int, what: str, group: Any = None, timeout_s: float = AGREE_TIMEOUT_S) -> int:
    """The smallest `value` of all ranks, on every rank: one all-reduce over gloo. Alone: `value`.

    Where torch.distributed is not initialised, this rank is alone. `group`: a process group with gloo; None:
    one of its own over all ranks, for this call. A negative value says that this rank has none: then
    ProfileError on every rank. ProfileError also when not all ranks came within `timeout_s`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return value
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if group is not None and "gloo" not in str(dist.get_backend(group)):
        raise UsageError(f"group: expected one with the gloo backend, got {dist.get_backend(group)}")
    own = None
    try:
        if group is None:
            group = own = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        smallest = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN, group=group)
    except RuntimeError as error:
        raise ProfileError(
            f"rank {rank} of {ranks} waited for the others to agree on {what}, {timeout_s:.0f} s at most; "
            f"every rank must make this call: {error}"
        ) from error
    finally:
        if own is not None:
            dist.destroy_process_group(own)
    agreed = int(smallest[0])
    if agreed < 0 <= value:
        raise ProfileError(f"another rank than {rank} has no {what}: its own error says why")
    return agreed


def _cgroup_bytes(root: Path) -> int:
    """What the memory limits of this process's cgroup and of those above it leave (v2 and v1).

    Inactive file pages count as free: the kernel drops them before it refuses.
    """
    left = _NO_LIMIT
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "":
            top, limit_name, used_name = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        inside = top / name.lstrip("/")
        # Inside a container the path may name a place outside: then the mount itself is the container's.
        for folder in (inside, *inside.parents):
            limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
            if limit.isdigit() and used.isdigit():
                left = min(left, int(limit) - int(used) + _inactive_file(folder))
            if folder == top:
                break
    return left


def _inactive_file(folder: Path) -> int:
    stat = dict(line.split(" ", 1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
    return int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))


def _read(path: Path) -> str:
    """The file's text; '' where it cannot be read: it then sets no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""
