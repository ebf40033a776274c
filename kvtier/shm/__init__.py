"""Shared memory that outlives a process: chunks, tables, descriptor hand-over, liveness, preflight."""
