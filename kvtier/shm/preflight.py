"""What this host has: memory under cgroup v1 and v2, and the kernel primitives that the sidecar needs (R27).

Each primitive is *tried*. Reads from a root directory (default `/`), so that tests can lay out other hosts.
Imports the standard library and the ground floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """How many bytes can still be taken, and what sets the limit."""

    available: int
    """The least of all limits' rest and MemAvailable, never negative."""
    total: int
    """The most that a pool could ever have here: the lowest limit, or MemTotal."""
    source: str
    """What is the tightest: "MemAvailable of /proc/meminfo", "cgroup v2 memory.max of /kubepods/..." """


@dataclass(frozen=True)
class Check:
    """One line of `kvtier doctor`."""

    name: str
    ok: bool
    text: str
    """What was found; for a failure what is needed and what is available."""
    remedy: str = ""
    """What to do; empty when ok."""


def memory(root: Path | str = "/") -> Memory:
    """Reads limits of the process's cgroups up to the root of their hierarchy (v1, v2, hybrid) and meminfo."""
    raise NotImplementedError


def headroom(root: Path | str = "/") -> int:
    """`memory(root).available`: asked before each step of reserving (R29). About 0.2 ms."""
    raise NotImplementedError


def check_memory(pool_bytes: int, root: Path | str = "/") -> Check:
    """Is there room for a pool of this size beside what runs already?"""
    raise NotImplementedError


def check_primitives() -> list[Check]:
    """Tries memfd, seals, a lock seen from a second description, pidfd poll, SCM_RIGHTS, MADV_DONTFORK (R27)."""
    raise NotImplementedError


def run(pool_bytes: int | None = None, root: Path | str = "/") -> list[Check]:
    """All checks, failures included; raises nothing. For `kvtier doctor`."""
    raise NotImplementedError


def require(checks: list[Check]) -> None:
    """PreflightError that names each failed check with its remedy; nothing when all are ok."""
    raise NotImplementedError
