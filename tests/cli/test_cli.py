"""The `kvtier` command: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest

from kvtier import __version__
from kvtier.cli import doctor
from kvtier.cli.labels import FILL, GROUPS, HIT_RATE, Line
from kvtier.cli.stats import _shown
from kvtier.core.results import Reason
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


# --- mistakes of an operator's: one line, its remedy, status 2 ----------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--size", "16MiB"],
        ["stats"],
        ["sessions"],
        ["flush", "--all"],
        ["drain", "--no-wait"],
        ["doctor"],
    ],
)
@pytest.mark.parametrize("kind", ["through a file", "empty"])
def test_an_impossible_run_directory_is_one_line_and_status_2(tmp_path, arguments, kind):
    (tmp_path / "file").touch()
    run_dir = "" if kind == "empty" else tmp_path / "file" / "run"
    asked = kvtier(*arguments, "--run-dir", run_dir)
    assert asked.returncode == 2
    assert re.fullmatch(rf"kvtier: run directory '?{run_dir}'?: .+; .*--run-dir.*\n", asked.stderr)


def test_a_run_directory_that_cannot_be_made_is_one_line_and_status_2():
    asked = kvtier("serve", "--size", "16MiB", "--run-dir", "/proc/x")
    assert asked.returncode == 2
    assert re.fullmatch(r"kvtier: run directory /proc/x: .+; choose another --run-dir.*\n", asked.stderr)


@pytest.mark.parametrize("size", ["12", "1023KiB"])
def test_a_size_that_lacks_its_unit_is_refused(tmp_path, size):
    asked = kvtier("serve", "--size", size, "--run-dir", tmp_path / "run")
    assert asked.returncode == 2
    assert re.fullmatch(rf"kvtier: size '{size}': .* needed 1 MiB or more; give a unit.*\n", asked.stderr)
    assert not (tmp_path / "run").exists()


def test_without_a_sidecar_the_command_that_starts_one_is_shown(tmp_path):
    run_dir = tmp_path / "with space"
    command = f"kvtier serve --size SIZE --run-dir '{run_dir}'"
    asked = kvtier("stats", "--run-dir", run_dir)
    assert (asked.returncode, asked.stderr.strip().endswith(f"start one: {command}")) == (3, True)
    by_default = kvtier("stats", KVTIER_RUN_DIR=str(run_dir))
    assert by_default.stderr.endswith("start one: kvtier serve --size SIZE\n")


def test_a_killed_sidecar_is_told_from_a_hanging_one(tmp_path):
    """R25: the owner lock goes with its process."""
    with Sidecar(tmp_path / "run") as sidecar:
        for socket in ("admin.sock", "data.sock"):
            (sidecar.run_dir / socket).unlink()  # nobody can ask it any more, but it lives
        asked, checked = (kvtier(command, "--run-dir", sidecar.run_dir) for command in ("stats", "doctor"))
        assert (asked.returncode, checked.returncode) == (1, 1)
        assert "its process lives" in asked.stderr
        assert "FAILED" in checked.stdout
        sidecar.kill()
        asked, checked = (
            kvtier(command, "--run-dir", sidecar.run_dir, COLUMNS="400") for command in ("stats", "doctor")
        )
        assert (asked.returncode, checked.returncode) == (3, 0)
        for said in (asked.stderr, checked.stdout):
            assert "nobody owns" in said
            assert f"started there again: kvtier serve --size SIZE --run-dir {sidecar.run_dir}" in said


# --- what is shown -------------------------------------------------------------------------------------


def test_every_number_has_its_place_and_its_words_in_the_table(tmp_path):
    """Before any engine came, and after."""
    with Sidecar(tmp_path / "run") as fresh:
        for engine in (nullcontext(), Pair(fresh)):
            with engine:
                values = json.loads(kvtier("stats", "--json", "--run-dir", fresh.run_dir).stdout)
                table = kvtier("stats", "--run-dir", fresh.run_dir).stdout
            assert [name for name in values if f" {name} " not in table] == []
            titles = re.findall(r"^│ (\w[^│]*?) +│ +│ +│$", table, re.MULTILINE)
            assert titles == list(GROUPS)
            assert {name for name in values if name.startswith("missed_")} >= {
                f"missed_{why}" for name, why in vars(Reason).items() if name.isupper()
            }
    names = [line.name for lines in GROUPS.values() for line in lines]
    assert len(names) == len(set(names))
    assert set(names) - {HIT_RATE, FILL} == set(values)


def test_the_hit_rate_and_the_fill_level_are_worked_out():
    values = {"asked": 8, "hits": 5, "frames_usable": 200, "frames_free": 150}
    assert _shown(Line(HIT_RATE, ""), values) == "62.5 %"
    assert _shown(Line(FILL, ""), values) == "25.0 %"
    nothing = dict.fromkeys(values, 0)
    assert _shown(Line(HIT_RATE, ""), nothing) == _shown(Line(FILL, ""), nothing) == "-"


def test_doctor_has_remedies_only_where_something_failed(tmp_path):
    fine = kvtier("doctor", "--run-dir", tmp_path / "none")
    assert (fine.returncode, "remedy" in fine.stdout) == (0, False)
    assert "MADV_POPULATE_WRITE" in fine.stdout
    failed = kvtier("doctor", "--size", "900TiB", "--run-dir", tmp_path / "none")
    assert (failed.returncode, "remedy" in failed.stdout) == (1, True)


def test_a_kernel_that_cannot_populate_is_no_failure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "populate", lambda array, write: False)
    monkeypatch.setenv("COLUMNS", "200")
    doctor.doctor(None, tmp_path / "none")
    assert "pages are faulted in as they are used" in capsys.readouterr().out
