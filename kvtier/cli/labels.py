"""What each of a sidecar's numbers is, in a person's words: the groups of `kvtier stats`.

Always true (tests hold it): every name that a sidecar gives is here once.
"""

from __future__ import annotations

from typing import NamedTuple


class Line(NamedTuple):
    """One number: `name` is its key in the JSON; `unit` is "" where the value says it."""

    name: str
    label: str
    unit: str = ""


HIT_RATE, FILL = "hits / asked", "1 - free / usable"
"""Not sent by the sidecar: worked out from the others."""

GROUPS: dict[str, tuple[Line, ...]] = {
    "sidecar": (
        Line("version", "version"),
        Line("uptime_s", "running for", "s"),
        Line("draining", "draining, about to end", "yes/no"),
        Line("server_gen", "generation (of this start)"),
        Line("sweeps", "rounds of housekeeping", "rounds"),
    ),
    "pool": (
        Line("pool_bytes", "size that was given"),
        Line("reserved_bytes", "memory reserved so far"),
        Line("reserving", "still reserving", "yes/no"),
        Line("reserve_error", "why it stopped reserving"),
        Line("page_bytes", "size of a page"),
        Line("page_tokens", "tokens of a page", "tokens"),
        Line("frames_total", "room in the end", "pages"),
        Line("frames", "the same, of the cache", "pages"),
        Line("frames_usable", "room by now", "pages"),
        Line("frames_free", "free", "pages"),
        Line(FILL, "fill level"),
        Line("frames_ready", "cached", "pages"),
        Line("frames_writing", "being written", "pages"),
        Line("frames_held", "pinned by leases", "pages"),
        Line("frames_doomed", "flushed, still in use", "pages"),
        Line("frames_clearing", "flushed, being freed", "pages"),
        Line("frames_quarantined", "of dead engines, waiting", "pages"),
        Line("evicted", "evicted for newer ones", "pages"),
        Line("namespaces", "namespaces (models)", "namespaces"),
        Line("nodes", "nodes of the prefix tree", "nodes"),
        Line("epoch", "epoch (rises by flushes)"),
        Line("formats", "times it was laid out", "times"),
        Line("pool_id", "id of the pool"),
    ),
    "engines": (
        Line("engines", "engines", "engines"),
        Line("sessions_attached", "attached planners, movers", "sessions"),
        Line("sessions_doubted", "of these, end not proven", "sessions"),
        Line("sessions", "slots of sessions in use", "sessions"),
        Line("leases", "loads and stores under way", "leases"),
        Line("attaches", "attached since the start", "times"),
        Line("refused_attaches", "attaches refused", "times"),
        Line("deaths", "sessions that died", "sessions"),
        Line("forced_out", "forced out by the operator", "sessions"),
    ),
    "look-ups (pages)": (
        Line("asked", "wanted", "pages"),
        Line("hits", "loaded: hits", "pages"),
        Line(HIT_RATE, "hit rate"),
        Line("unused", "given back unread", "pages"),
        Line("missed_absent", "missed: not cached", "pages"),
        Line("missed_pending", "missed: being written", "pages"),
        Line("missed_unmapped", "missed: not mapped yet", "pages"),
        Line("missed_too_few", "missed: too few to load", "pages"),
        Line("missed_cap", "missed: cap on pins", "pages"),
        Line("missed_full", "missed: pool full", "pages"),
        Line("missed_flushed", "missed: flushed meanwhile", "pages"),
        Line("missed_incomplete", "missed: a mover is missing", "pages"),
        Line("missed_suspect", "missed: engine in doubt", "pages"),
        Line("missed_draining", "missed: draining", "pages"),
        Line("missed_namespaces", "missed: too many namespaces", "pages"),
        Line("missed_leases", "missed: too many leases", "pages"),
    ),
    "stores (pages)": (
        Line("store_asked", "offered", "pages"),
        Line("store_taken", "taken", "pages"),
        Line("stored", "written and cached", "pages"),
        Line("dropped", "taken, then not written", "pages"),
        Line("superseded", "another was first", "pages"),
    ),
    "messages": (
        Line("requests", "requests", "messages"),
        Line("bad_requests", "unreadable requests", "messages"),
        Line("dropped_requests", "requests dropped unread", "messages"),
        Line("dropped_replies", "replies nobody took", "messages"),
        Line("internal_errors", "internal errors (see log)", "errors"),
    ),
}
