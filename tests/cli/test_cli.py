"""The `kvtier` command: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvtier import __version__
from tests.server.sidecar import Pair, Sidecar


def kvtier(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "COLUMNS": "200", **environment},
    )


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    with Sidecar(tmp_path_factory.mktemp("s") / "run") as running:
        yield running


def test_version():
    shown = kvtier("--version")
    assert (shown.returncode, shown.stdout) == (0, f"kvtier {__version__}\n")


def test_help_names_the_commands():
    shown = kvtier("--help")
    assert shown.returncode == 0
    for command in ("serve", "stats", "sessions", "flush", "drain", "doctor"):
        assert command in shown.stdout


def test_stats_show_a_table_and_json_and_attach_nothing(sidecar):
    with Pair(sidecar):
        table = kvtier("stats", "--run-dir", sidecar.run_dir)
        assert table.returncode == 0
        assert "frames_free" in table.stdout
        assert "16 MiB" in table.stdout
        asked = kvtier("stats", "--json", "--run-dir", sidecar.run_dir)
        values = json.loads(asked.stdout)
        assert (values["sessions_attached"], values["frames"], values["version"]) == (2, 256, __version__)


def test_the_run_directory_comes_from_the_environment(sidecar):
    asked = kvtier("stats", "--json", KVTIER_RUN_DIR=str(sidecar.run_dir))
    assert asked.returncode == 0
    assert json.loads(asked.stdout)["version"] == __version__


def test_stats_without_a_sidecar_say_so(tmp_path):
    asked = kvtier("stats", "--run-dir", tmp_path / "none")
    assert asked.returncode == 3
    assert str(tmp_path / "none") in asked.stderr
    assert "Traceback" not in asked.stderr
    assert not (tmp_path / "none").exists()


def test_doctor_checks_this_host(sidecar):
    checked = kvtier("doctor", "--run-dir", sidecar.run_dir)
    assert checked.returncode == 0, checked.stdout
    for name in ("memory", "pidfd", "run directory"):
        assert name in checked.stdout
    assert "answers" in checked.stdout


def test_doctor_fails_when_a_pool_does_not_fit(tmp_path):
    checked = kvtier("doctor", "--size", "900TiB", "--run-dir", tmp_path / "none")
    assert checked.returncode == 1
    assert "FAILED" in checked.stdout


@pytest.mark.parametrize("size", ["lots", "-1GiB", "0"])
def test_a_wrong_size_is_one_line_and_status_2(tmp_path, size):
    asked = kvtier("serve", f"--size={size}", "--run-dir", tmp_path / "run")
    assert asked.returncode == 2
    assert asked.stderr.startswith("kvtier: size")
    assert "Traceback" not in asked.stderr


def test_an_unsafe_run_directory_is_refused_with_a_remedy(tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    asked = kvtier("serve", "--size", "16MiB", "--run-dir", tmp_path / "open")
    assert asked.returncode == 2
    assert "chmod 700" in asked.stderr
    assert list((tmp_path / "open").iterdir()) == []


def test_stats_into_a_closed_pipe_end_quietly(sidecar):
    reader, writer = os.pipe()
    os.close(reader)
    asked = subprocess.run(
        [sys.executable, "-m", "kvtier.cli.main", "stats", "--json", "--run-dir", str(sidecar.run_dir)],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert asked.returncode == 1
    assert asked.stderr == ""
