"""The run directory is private to one user, or refused with the remedy."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.shm.rundir import ATTACH_SOCKET, boot_id, check_run_dir, make_run_dir


def test_a_new_directory_is_closed_to_others_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = make_run_dir(tmp_path / "deep" / "er" / "run")
    finally:
        os.umask(old)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert make_run_dir(made) == made


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_run_dir(tmp_path / "none")


@pytest.mark.parametrize("take", [check_run_dir, make_run_dir])
def test_a_symbolic_link_is_refused(tmp_path: Path, take: object) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="symbolic link"):
        take(tmp_path / "link")  # type: ignore[operator]
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        take(tmp_path / "dangling")  # type: ignore[operator]


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777, 0o702])
def test_permissions_for_others_are_refused_with_the_command_to_fix_them(tmp_path: Path, mode: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o}, needed 0700: chmod 700 {run_dir}"):
        make_run_dir(run_dir)
    run_dir.chmod(0o700)
    assert check_run_dir(run_dir) == run_dir


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory to another user")
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    os.chown(run_dir, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to uid 12345"):
        make_run_dir(run_dir)


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not a directory"):
        make_run_dir(tmp_path / "file")


@pytest.mark.parametrize("take", [check_run_dir, make_run_dir])
def test_a_path_through_a_file_and_an_empty_one_are_refused(tmp_path: Path, take: object) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"run directory .*: {tmp_path}/file is not a directory; choose"):
        take(tmp_path / "file" / "deep" / "run")  # type: ignore[operator]
    with pytest.raises(ConfigError, match="the path is empty"):
        take("")  # type: ignore[operator]


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(ConfigError, match="no directory can be made in /proc; choose"):
        make_run_dir("/proc/x")


def test_a_path_too_long_for_a_socket_is_refused_and_not_made(tmp_path: Path) -> None:
    longest = 107 - len(os.fsencode(str(tmp_path))) - 2 - len(ATTACH_SOCKET)
    if longest < 1:
        pytest.skip("the test's own folder has too long a path")
    assert make_run_dir(tmp_path / ("x" * longest)).is_dir()
    too_long = tmp_path / ("y" * (longest + 1))
    with pytest.raises(ConfigError, match=r"108 bytes for the socket's path, available 107.*--run-dir"):
        make_run_dir(too_long)
    assert not too_long.exists()
    # Bytes count, not characters.
    with pytest.raises(ConfigError, match="available 107"):
        make_run_dir(tmp_path / ("é" * (longest // 2 + 1)))


def test_a_relative_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_run_dir("run") == tmp_path / "run"


def test_the_boot_id_is_the_same_each_time() -> None:
    assert boot_id() == boot_id()
