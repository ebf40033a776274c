"""Exceptions for mistakes, and `Status` for ordinary outcomes.

Ordinary outcomes (a miss, a full pool, a server that is gone) are results and carry a `Status`.
Exceptions are kept for what a caller or an operator got wrong; each says what was wrong, what was
expected and what to do, and is raised before anything has changed.
"""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """The outcome of a request; the numbers are what travels on the wire."""

    OK = 0
    DONE = 1
    """An end (finish, abort, quiet) of a lease that has ended already."""
    MISS = 2
    FULL = 3
    """No frame could be had: all are pinned or being written."""
    BUSY = 4
    """Refused for now: a cap is reached, or the group is not complete yet."""
    EXPIRED = 5
    """The request reached the server after its deadline; nothing was done."""
    GONE = 6
    """Unknown session or older server generation: attach again."""
    BAD = 7
    """The request itself is wrong; the reply's text says how."""
    AWAY = 8
    """Never sent: what a client reports when no server answered in time."""


class KVTierError(Exception):
    """Base of everything that kvtier raises on purpose."""


class ConfigError(KVTierError, ValueError):
    """A setting or a size that cannot work."""


class LayoutError(KVTierError, ValueError):
    """A KV layout, or buffers, that do not fit together."""


class GeometryError(KVTierError):
    """The pool is in use with another geometry."""


class PreflightError(KVTierError):
    """This host lacks memory or a kernel primitive that the sidecar needs."""


class OwnedError(KVTierError):
    """Another server already owns the run directory."""


class UsageError(KVTierError, ValueError):
    """A caller's mistake: wrong length, unit out of range, unknown or closed thing."""


class WrongThreadError(KVTierError, RuntimeError):
    """An object that belongs to one thread was called from another."""


class ProtocolError(KVTierError):
    """Bytes that are not a message of this protocol."""
