"""The run directory, where a sidecar and its clients meet: private to one user, or refused.

Imports the standard library and the ground floor. Always true of a directory that was accepted: it is no
symbolic link, belongs to this user, and is closed to all others, so that only this user can have made what
lies in it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from kvtier.errors import ConfigError

ATTACH_SOCKET, DATA_SOCKET, ADMIN_SOCKET, LOCKS, OWNER = (
    "attach.sock",
    "data.sock",
    "admin.sock",
    "locks",
    "owner",
)

MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (sun_path is 108 with its end mark)."""


EMPTY = "run directory '': the path is empty; give a directory, or leave --run-dir out for the default"


def check_run_dir(path: Path | str) -> Path:
    """The absolute path of an existing run directory that is safe to use.

    FileNotFoundError when there is none. ConfigError, with the remedy, for a symbolic link, another owner,
    permissions for others, a path through a file or one that cannot be looked at, or one too long for a
    socket.
    """
    run_dir = _absolute(path)
    longest = os.fsencode(run_dir / ATTACH_SOCKET)
    if len(longest) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"run directory {run_dir}: {len(longest)} bytes for the socket's path, available "
            f"{MAX_SOCKET_PATH}; choose a shorter --run-dir (or KVTIER_RUN_DIR)"
        )
    try:
        found = os.lstat(run_dir)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unusable(run_dir, error) from error
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(
            f"run directory {run_dir} is a symbolic link to {os.readlink(run_dir)}: give the directory itself"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(
            f"run directory {run_dir} is not a directory: remove it or choose another --run-dir"
        )
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"run directory {run_dir} belongs to uid {found.st_uid}, this process runs as {os.geteuid()}: "
            "sidecar and engines must run as one user; choose another --run-dir"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"run directory {run_dir} has mode {stat.S_IMODE(found.st_mode):04o}, needed 0700: "
            f"chmod 700 {run_dir}"
        )
    return run_dir


def make_run_dir(path: Path | str) -> Path:
    """As `check_run_dir`, but makes the directory (0700, with its parents) where there is none.

    ConfigError also when it cannot be made there.
    """
    run_dir = _absolute(path)
    if len(os.fsencode(run_dir / ATTACH_SOCKET)) <= MAX_SOCKET_PATH:
        try:
            run_dir.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                run_dir.mkdir(mode=0o700)
        except OSError as error:
            raise _unusable(run_dir, error) from error
    return check_run_dir(run_dir)


def _absolute(path: Path | str) -> Path:
    if not os.fspath(path):  # else it would mean the current directory
        raise ConfigError(EMPTY)
    return Path(os.path.abspath(path))


def _unusable(run_dir: Path, error: OSError) -> ConfigError:
    """In an operator's words: what is in the way."""
    reason = error.strerror or str(error)
    for part in reversed(run_dir.parents):
        if not os.path.isdir(part):
            if os.path.lexists(part):
                reason = f"{part} is not a directory"
            break
    else:
        if isinstance(error, FileNotFoundError):
            reason = f"no directory can be made in {run_dir.parent}"
    return ConfigError(
        f"run directory {run_dir}: {reason}; choose another --run-dir (or KVTIER_RUN_DIR), where this user "
        "may make a directory"
    )


def boot_id() -> str:
    """Names this start of this machine; "" when it cannot be read. Two hosts never share a pool."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
