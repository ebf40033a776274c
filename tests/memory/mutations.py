"""Takes the protections of `memory/` out, one after the other, and shows that the test of that fault fails.

    python tests/memory/mutations.py [TEXT ...]        only those whose name has one of the texts

The list is in `mutations.txt`. Each runs in a private copy of the tree. The exit status is non-zero when a
protection was missed by no test. `test_mutations.py` keeps the list true to the code; running it all takes
some minutes, so that is by hand.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".txt")


class Mutation(NamedTuple):
    """`old` stands once in `file`; with `new` in its place `test` (a pytest -k expression) must fail."""

    name: str
    test: str
    file: str
    old: str
    new: str


def read() -> list[Mutation]:
    """The list that stands beside this file."""
    found = []
    for block in LIST.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            name, test, file = lines[0].split(" | ")
            old, new = ("\n".join(line[2:] for line in lines[1:] if line[0] == sign) for sign in "-+")
            found.append(Mutation(name, test, file, old, new))
    return found


def run(copy: Path, mutation: Mutation) -> str:
    """What pytest printed with the protection out; '' when the test failed, as it should."""
    path = copy / mutation.file
    text = path.read_text()
    path.write_text(text.replace(mutation.old, mutation.new))
    options = ["-q", "-x", "-p", "no:cacheprovider", "-k", mutation.test]
    command = [sys.executable, "-m", "pytest", *options, "tests/memory"]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    path.write_text(text)
    failed = result.returncode == 1 and " failed" in result.stdout.splitlines()[-1]
    return "" if failed else result.stdout + result.stderr


def main() -> int:
    texts = sys.argv[1:] or [""]
    wanted = [item for item in read() if any(text in item.name for text in texts)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("kvtier", "tests", "examples", "docs"):
            shutil.copytree(REPO / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("setup.cfg", "pyproject.toml"):
            shutil.copy(REPO / name, copy / name)
        for item in wanted:
            printed = run(copy, item)
            print(
                f"{'MISSED' if printed else 'fails, as it should':<22}{item.name} ({item.test})", flush=True
            )
            if printed:
                missed += 1
                print(printed[-2000:])
    print(f"{len(wanted)} protections taken out, {missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
