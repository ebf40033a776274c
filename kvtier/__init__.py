"""kvtier: a multi-level KV cache offload service for LLM inference.

The names that engines use are handed on lazily: importing kvtier imports neither torch nor zmq.
"""

from __future__ import annotations

import importlib
from typing import Any

from kvtier._version import __version__

_HOMES = {
    "CacheClient": "kvtier.client",
    "GeometryError": "kvtier.errors",
    "Hit": "kvtier.tasks",
    "KVBuffers": "kvtier.device.base",
    "KVLayout": "kvtier.layout",
    "KVTierError": "kvtier.errors",
    "LoadTask": "kvtier.tasks",
    "MemoryManager": "kvtier.memory.memory_manager",
    "Mover": "kvtier.mover",
    "Namespace": "kvtier.keys",
    "OffloadTask": "kvtier.tasks",
    "Options": "kvtier.config",
    "PageChain": "kvtier.keys",
    "Plane": "kvtier.layout",
    "Planner": "kvtier.planner",
    "Status": "kvtier.errors",
    "TaskState": "kvtier.tasks",
    "UsageError": "kvtier.errors",
    "Worker": "kvtier.worker",
    "WrongThreadError": "kvtier.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
