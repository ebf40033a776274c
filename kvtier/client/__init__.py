"""The messages of one session with the sidecar: `CacheClient`."""

from kvtier.client.client import DEFAULT_TIMEOUT_S, CacheClient

__all__ = ["DEFAULT_TIMEOUT_S", "CacheClient"]
