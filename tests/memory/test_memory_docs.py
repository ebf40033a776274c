"""docs/memory.md: its example runs, its links lead somewhere, and every name on it is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import kvtier
import kvtier.memory

ROOT = Path(kvtier.__file__).resolve().parents[1]
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text()


def test_the_examples_run_one_after_the_other() -> None:
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "96 of 102 tokens are there already" in done.stdout
    assert "'tokens_hit': 96" in done.stdout


def test_paths_and_names_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    for path in re.findall(r"`((?:examples|tests)/[\w/.]+)`", PAGE):
        assert (root / path).exists(), path
    table = PAGE[PAGE.index("| part |") : PAGE.index("Three words")]
    for name in re.findall(r"`([A-Z]\w+)`", table):
        assert hasattr(kvtier.memory, name), name
    for hook in re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE):
        assert hasattr(kvtier.memory.MemoryManager, hook), hook
