"""The sidecar: one loop that owns the host cache. Never imports torch."""
