"""Settings of the whole suite: hypothesis profiles and one intra-op thread for torch."""

from __future__ import annotations

import os

# Before torch or numpy start their pools: torch copies in threads want one intra-op thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, suppress_health_check=_QUIET)
settings.register_profile(
    "nightly", deadline=None, max_examples=2000, stateful_step_count=200, suppress_health_check=_QUIET
)
settings.load_profile(os.environ.get("KVTIER_HYPOTHESIS", "default"))
