"""The messages of one session with the sidecar: `CacheClient`; its numbers without one: `read_stats`."""

from kvtier.client.client import DEFAULT_TIMEOUT_S, CacheClient
from kvtier.client.stats import read_stats

__all__ = ["DEFAULT_TIMEOUT_S", "CacheClient", "read_stats"]
