"""How benchmarks print what is wanted: `(goal: 0.90 or more, met)`, and `missed` where it was not reached.

`run.py` counts these marks in what the programs print. Nothing is asserted: machines are shared and noisy.
"""

from __future__ import annotations

import re

MARK = re.compile(r"\(goal: [^()]*, (met|missed)\)")


def goal(wanted: str, met: bool) -> str:
    """The mark to print after a figure; `wanted` is in the figure's unit and says "or more" or "or less"."""
    return f"(goal: {wanted}, {'met' if met else 'missed'})"


def at_least(value: float, least: float, digits: int = 2) -> str:
    """The mark of a figure that should be `least` or more."""
    return goal(f"{least:.{digits}f} or more", value >= least)


def at_most(value: float, most: float, digits: int = 0) -> str:
    """The mark of a figure that should be `most` or less."""
    return goal(f"{most:.{digits}f} or less", value <= most)
