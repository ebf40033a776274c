"""The formatted pool: its memory, its tables, and the core that decides about both.

Made at the first attach, which brings the geometry (R30). Imports `core` and `shm`. Always true: what the
core wants written is in the tables before the answer that it belongs to goes out (R15, R16).
"""

from __future__ import annotations

from kvtier.core.host_cache import HostCache
from kvtier.shm import preflight
from kvtier.shm.region import Pool
from kvtier.shm.shape import PoolShape
from kvtier.shm.tables import Tables


class HostPool:
    """One formatting of the pool. ConfigError when `pool_bytes` holds no page, PreflightError when the
    tables find no memory. The pages are reserved step by step by a child process: call `step` when
    `memory` is readable."""

    def __init__(
        self,
        geometry: tuple[int, ...],
        pool_bytes: int,
        *,
        fingerprint: bytes,
        server_gen: int,
        patience_s: float,
    ) -> None:
        self.cleaning = False
        self.shape = PoolShape.of(geometry, pool_bytes)
        self.cache = HostCache(self.shape.frames, patience_s=patience_s)
        self.tables = Tables(self.shape, fingerprint=fingerprint, server_gen=server_gen)
        try:
            self.memory = Pool(self.shape, headroom=preflight.headroom)
        except BaseException:
            self.tables.close()
            raise

    @property
    def pool_id(self) -> bytes:
        return self.tables.pool_id

    def write(self) -> None:
        """Bring the tables up to what the core has decided. Before each answer."""
        writes = self.cache.take_writes()
        if writes:
            self.tables.apply(writes)

    def clean(self, pages: int) -> bool:
        """Free about `pages` of the pages that a flush has left behind; True while there are more (R18)."""
        self.cleaning = self.cache.sweep(pages) > 0
        self.write()
        return self.cleaning

    def step(self) -> bool:
        """Take up what the reserving child has done; True when there are new frames, or it is finished."""
        if not self.memory.step():
            return False
        self.cache.grow(self.memory.frames)
        self.write()
        return True

    def close(self) -> None:
        """Ends the reserving child and lets go of the memory; clients keep what they have mapped."""
        self.memory.close()
        self.tables.close()
