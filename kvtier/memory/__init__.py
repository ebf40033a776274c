"""The device side of an engine's process: slots, pages, prefix index, tasks. Needs torch.

A library of its own: nothing here needs a sidecar. `docs/memory.md` shows how the parts go together.
"""

from kvtier.memory.allocator import KvCacheAllocator
from kvtier.memory.buffers import MLAMemoryManager, QuantizedKV, QuantizedMemoryManager
from kvtier.memory.contiguous_strategy import ContiguousStrategy
from kvtier.memory.memory_manager import MemoryManager
from kvtier.memory.owner import ThreadOwner
from kvtier.memory.page_allocator import PageAllocator
from kvtier.memory.paged_strategy import PagedStrategy
from kvtier.memory.radix_cache import Lookup, Prefix, RadixCache
from kvtier.memory.request_pool import ReqToTokenPool
from kvtier.memory.strategy import AllocationStrategy, TaskCacheState
from kvtier.memory.task_cache import CopyHold, TaskCacheManager

__all__ = [
    "AllocationStrategy",
    "ContiguousStrategy",
    "CopyHold",
    "KvCacheAllocator",
    "Lookup",
    "MLAMemoryManager",
    "MemoryManager",
    "PageAllocator",
    "PagedStrategy",
    "Prefix",
    "QuantizedKV",
    "QuantizedMemoryManager",
    "RadixCache",
    "ReqToTokenPool",
    "TaskCacheManager",
    "TaskCacheState",
    "ThreadOwner",
]
