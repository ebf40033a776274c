"""The engine's planner: what to load, where to store. Without torch; `Planner` is its only face.

`records` what is known of each request; `lookups` answers and the leases that hits hold; `stores` asking for
frames; `copies` what the movers have and how far they are; `counters` the numbers; `planner` ties them
together.
"""

from __future__ import annotations

from kvtier.planner.planner import Planner

__all__ = ["Planner"]
