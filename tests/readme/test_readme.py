"""What the README shows works: its example runs against a real sidecar, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_runs_twice_against_one_sidecar(tmp_path) -> None:
    pytest.importorskip("torch", reason="the example embeds kvtier in a torch engine")
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    run_dir = tmp_path / "run"
    environment = {**os.environ, "KVTIER_RUN_DIR": str(run_dir)}
    command = [sys.executable, "-m", "kvtier.cli.main", "serve", "--size", "64MiB"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as sidecar:
        try:
            assert "64 MiB" in sidecar.stdout.readline(), "it says that it serves"
            for stored in ("done 15 pages stored", "done 0 pages stored stored"):  # and again: all is there
                done = subprocess.run(
                    [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
                )
                assert done.returncode == 0, done.stderr
                assert stored in done.stdout
                assert "960 tokens came back; 40 are left" in done.stdout
        finally:
            sidecar.terminate()
            assert sidecar.wait(timeout=20) == 0
    assert not run_dir.exists()


def test_links_and_targets_exist() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`?\bmake ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_every_dependency_is_named_with_its_reason() -> None:
    text = (ROOT / "setup.cfg").read_text()
    options = text[text.index("install_requires") : text.index("[options.entry_points]")]
    names = re.findall(r"^    ([a-z-]+)[>=<]", options, re.MULTILINE)
    assert len(names) > 10
    table = README[README.index("## Dependencies") : README.index("## Platforms")]
    for name in names:
        assert re.search(rf"\b{name}\b", table), name


def test_every_option_and_reason_is_explained() -> None:
    from kvtier.config import Options
    from kvtier.planner.counters import MISSES, SKIPS

    start = README.index("### What decides whether there are hits")
    section = README[start : README.index("## Run a sidecar")]
    shown = set(re.findall(r"`([a-z_]+)`", section))
    assert set(MISSES) | set(SKIPS) <= shown
    cuda_only = {"pin_at_start", "staging_bytes"}
    assert set(Options.__dataclass_fields__) - cuda_only <= shown
