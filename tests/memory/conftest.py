"""Every test that asks for `make` runs on each allocation strategy."""

from __future__ import annotations

from typing import Any

import pytest

NAMES = ("pages of 1", "pages of 4", "pages of 7", "ranges")


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("torch")
    from tests.memory.strategies import STRATEGIES, maker

    assert tuple(STRATEGIES) == NAMES
    return maker(request.param)
