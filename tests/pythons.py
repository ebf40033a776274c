"""Runs the tests that need no torch on each Python 3.10 to 3.13 that this machine has.

    python tests/pythons.py

Each gets a virtual environment of its own (`.venv-3.10` and so on) without torch. Prints which
Pythons were found; exits non-zero when any fails. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
FOLDERS = ("ground", "core", "shm", "wire", "server", "client", "cli")


def found(version: str) -> str | None:
    """A Python of this version that really starts: from PATH, or from a pyenv."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(str(path) for path in pyenv.glob(f"versions/{version}.*/bin/python"))
    for candidate in candidates:
        if candidate is None:
            continue
        asked = subprocess.run(
            [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"],
            capture_output=True,
            text=True,
        )
        if asked.returncode == 0 and asked.stdout.strip() == version:
            return candidate
    return None


def run(python: str, version: str) -> bool:
    venv = ROOT / f".venv-{version}"
    if not (venv / ".made").exists():
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "-e", ".", "pytest", "pytest-timeout", "hypothesis"], check=True, cwd=ROOT)
        (venv / ".made").touch()
    folders = [f"tests/{folder}" for folder in FOLDERS]
    command = [str(venv / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def main() -> int:
    failed, ran = [], []
    for version in VERSIONS:
        python = found(version)
        if python is None:
            print(f"Python {version}: not on this machine", flush=True)
            continue
        print(f"Python {version}: {python}", flush=True)
        ran.append(version)
        if not run(python, version):
            failed.append(version)
    print(f"ran on {', '.join(ran) or 'none'}; failed on {', '.join(failed) or 'none'}")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
