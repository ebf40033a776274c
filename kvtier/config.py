"""Settings: what an engine may choose (`Options`), sizes as people write them, and the run directory."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

WRITE_POLICIES = ("prompt", "all", "off")

_UNITS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Options:
    """What an engine may choose; every default works.

    `min_load_tokens`: a host hit that brings fewer tokens than this beyond the device's own is not
    loaded. `write`: which pages are offloaded (`prompt`, `all`, `off`). `max_inflight_bytes`: bytes of
    copies under way above which an offload is skipped. `pin_at_start`: bytes pinned synchronously when
    a CUDA worker starts. `staging_bytes`: device memory for staged copies. `lookup_ms`: how long a
    look-up may stay unanswered before it counts as a miss.
    """

    min_load_tokens: int = 256
    write: str = "prompt"
    max_inflight_bytes: int = 256 * MIB
    pin_at_start: int = 8 * GIB
    staging_bytes: int = 128 * MIB
    lookup_ms: float = 20.0

    def __post_init__(self) -> None:
        if self.write not in WRITE_POLICIES:
            raise ConfigError(f"write={self.write!r}: expected one of {', '.join(WRITE_POLICIES)}")
        for name in ("min_load_tokens", "max_inflight_bytes", "pin_at_start", "staging_bytes", "lookup_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}: expected zero or more")


def parse_size(text: str | int) -> int:
    """Bytes of a size such as `1GiB`, `512 MiB`, `1.5gb` or `4096`; ConfigError for anything else."""
    if isinstance(text, int):
        size = text
    else:
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(f"size {text!r}: expected a number and a unit, such as 512MiB, 1GiB or 20GB")
        size = round(float(match[1]) * _UNITS[match[2].lower()])
    if size <= 0:
        raise ConfigError(f"size {text!r}: expected more than zero bytes")
    return size


def format_size(size: int) -> str:
    """`size` bytes for people, in binary units: 1536 -> '1.5 KiB'."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value == int(value) else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def default_run_dir() -> Path:
    """Where a sidecar and its clients meet: $KVTIER_RUN_DIR, else a folder of this user's.

    Unix socket paths are limited to 107 bytes, so the fallback is short.
    """
    chosen = os.environ.get("KVTIER_RUN_DIR")
    if chosen:
        return Path(chosen)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "kvtier" if runtime else Path(f"/tmp/kvtier-{os.getuid()}")
