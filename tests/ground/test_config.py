"""Settings: sizes as people write them, options with bounds, a run directory that can be found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config import Options, default_run_dir, format_size, parse_size
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 1 << 30),
        ("512 MiB", 512 << 20),
        ("1.5gib", 3 << 29),
        ("20GB", 20 * 10**9),
        ("4096", 4096),
        (" 2 kib ", 2048),
        ("10b", 10),
        (7, 7),
    ],
)
def test_sizes_are_exact(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1 gigabyte", "-1GiB", "0", 0, -5, "1e9", "٣GiB"])
def test_wrong_sizes_say_what_was_expected(text) -> None:
    with pytest.raises(ConfigError, match="expected"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("options", "message"),
    [({"write": "some"}, "'some'.*prompt, all, off"), ({"min_load_tokens": -1}, "min_load_tokens=-1")],
)
def test_wrong_options_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**options)


def test_run_dir_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("KVTIER_RUN_DIR", "/some/where")
    assert default_run_dir() == Path("/some/where")
    monkeypatch.delenv("KVTIER_RUN_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir() == Path("/run/user/7/kvtier")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir() == Path(f"/tmp/kvtier-{os.getuid()}")


def test_importing_kvtier_is_light_and_hands_names_on() -> None:
    code = (
        "import sys, kvtier; heavy = {'torch', 'zmq', 'numpy'} & set(sys.modules); "
        "assert not heavy, heavy; assert kvtier.PageChain.__name__ == 'PageChain'; "
        "assert 'PageChain' in dir(kvtier) and kvtier.__version__"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    import kvtier

    with pytest.raises(AttributeError, match="no attribute 'Wurker'"):
        _ = kvtier.Wurker


def test_every_public_name_is_there() -> None:
    pytest.importorskip("torch", reason="some names need it")
    import kvtier

    for name in kvtier.__all__:
        assert getattr(kvtier, name) is not None
