"""Mutation testing of `kvtier/core`: which small changes to the code would no test notice?

    python tests/core/mutation.py [--jobs N] [--only MODULE[.PART]]

mutmut makes the mutants. Its own runner starts pytest anew for each of some three thousand; here pytest
collects once and each mutant is a fork of that process, which runs the core's tests until one fails. All
of it happens in a private copy of the tree. Printed are the mutants that no test killed; the run fails
when one of them is not explained in docs/mutation.md (by its line, as printed).
"""

from __future__ import annotations

import argparse
import ast
import difflib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
CORE = "kvtier/core"
PAGE = REPO / "docs" / "mutation.md"
TIMEOUT_S = 30


def make_mutants(copy: Path, only: str) -> list[str]:
    """Put the mutants of each core module that `only` may mean beside its code, in `copy`; their names."""
    from mutmut.mutation.file_mutation import mutate_file_contents

    names = []
    for path in sorted((copy / CORE).glob("*.py")):
        module = f"kvtier.core.{path.stem}"
        if only.partition(".")[0] not in module:
            continue
        mutated = mutate_file_contents(str(path), path.read_text(), None, None)
        path.with_suffix(".py").write_text(mutated.code)
        names += [f"{module}.{name}" for name in mutated.mutant_names]
    return names


def describe(copy: Path, name: str) -> str:
    """A mutant as `function: - line + line`, the same from run to run while the code is."""
    module, _, mutant = name.rpartition(".")
    path = copy / (module.replace(".", "/") + ".py")
    source = path.read_text()
    original = mutant.rpartition("_")[0] + "_orig"
    texts: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name in (mutant, original):
            text = ast.get_source_segment(source, node) or ""
            texts[node.name] = [line.strip() for line in text.splitlines()[1:]]
    changed = [
        line
        for line in difflib.unified_diff(texts.get(original, []), texts.get(mutant, []), n=0, lineterm="")
        if line[:1] in "+-" and not line.startswith(("+++", "---"))
    ]
    function = mutant.partition("__mutmut_")[0].lstrip("x").strip("_ǁ").replace("ǁ", ".")
    return f"{module.rpartition('.')[2]}.{function}: " + " ".join(f"{line[0]} {line[1:]}" for line in changed)


class Forks:
    """A pytest plugin: in place of running the tests, forks and runs them for each mutant."""

    def __init__(self, names: list[str], jobs: int) -> None:
        self.names, self.jobs = names, jobs
        self.items: list[Any] = []
        self.killers: dict[str, list[int]] = {}  # by function: tests that killed its mutants, the last first
        self.survivors: list[str] = []
        self.timeouts: list[str] = []

    def pytest_runtestloop(self, session: Any) -> bool:
        from hypothesis import Phase, settings

        # Unit tests first; the state machines find in no time what they find, and need not shrink it.
        self.items = items = sorted(session.items, key=lambda item: "machine" in item.nodeid)
        for item in items:
            if "machine" in item.nodeid:
                item.cls.settings = settings(
                    item.cls.settings,
                    max_examples=50,
                    derandomize=True,
                    database=None,
                    phases=[Phase.explicit, Phase.generate],
                )
        gc.collect()
        gc.freeze()  # a fork then copies no page for the collector's sake
        begun = time.monotonic()
        if self.wait(self.fork("")) != 0:
            raise SystemExit("the tests fail without any mutant")
        print(
            f"{len(self.names)} mutants; one run of all {len(items)} tests: {time.monotonic() - begun:.1f} s"
        )
        running: dict[int, str] = {}
        for at, name in enumerate(self.names):
            running[self.fork(name)] = name
            while len(running) >= self.jobs:
                self.reap(running)
            if at % 100 == 0:
                print(
                    f"{at:5} done, {len(self.survivors)} survived, {time.monotonic() - begun:.0f} s",
                    flush=True,
                )
        while running:
            self.reap(running)
        return True

    def fork(self, name: str) -> int:
        """A child that ends with 0 when `name` survives, else with 1 + the test that killed it."""
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        signal.alarm(TIMEOUT_S)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.environ["MUTANT_UNDER_TEST"] = name
        from _pytest.runner import runtestprotocol

        first = self.killers.get(name.partition("__mutmut_")[0], [])
        for at in [*first, *(at for at in range(len(self.items)) if at not in first)]:
            if any(report.failed for report in runtestprotocol(self.items[at], nextitem=None, log=False)):
                os._exit(min(1 + at, 255))
        os._exit(0)

    @staticmethod
    def wait(pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def reap(self, running: dict[int, str]) -> None:
        pid, status = os.waitpid(-1, 0)
        name, code = running.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0:
            self.survivors.append(name)
            print(f"      survived: {name}", flush=True)
        elif code == -signal.SIGALRM:
            self.timeouts.append(name)
        elif 0 < code < 255:
            first = self.killers.setdefault(name.partition("__mutmut_")[0], [])
            first[:] = [code - 1, *(at for at in first if at != code - 1)]


def inside(copy: Path, jobs: int, only: str) -> int:
    """The run itself, in a process that imports the copy."""
    import pytest

    names = [name for name in make_mutants(copy, only) if only.partition(".")[2] in name]
    forks = Forks(names, jobs)
    arguments = [
        "-q",
        "--tb=native",
        "--assert=plain",
        "-p",
        "no:timeout",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
    ]
    arguments.append("tests/core")
    code = pytest.main(arguments, plugins=[forks])
    if code not in (0, 5):
        return int(code)
    killed = len(names) - len(forks.survivors)
    print(f"\n{killed} of {len(names)} mutants killed, {len(forks.timeouts)} of these by the time limit")
    explained = PAGE.read_text() if PAGE.exists() else ""
    new = 0
    for name in forks.survivors:
        line = describe(copy, name)
        known = line in explained
        new += not known
        print(f"{'explained' if known else 'SURVIVED'}  {line}")
    print(f"{len(forks.survivors)} survived, {new} of them unexplained in {PAGE.relative_to(REPO)}")
    return 1 if new else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--only", default="", help="only MODULE, or MODULE.PART of a name")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return inside(Path(options.inside), options.jobs, options.only)
    with tempfile.TemporaryDirectory(prefix="kvtier-mutation-") as folder:
        copy = Path(folder)
        leave_out = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(REPO / "kvtier", copy / "kvtier", ignore=leave_out)
        shutil.copytree(REPO / "tests" / "core", copy / "tests" / "core", ignore=leave_out)
        shutil.copy(REPO / "tests" / "conftest.py", copy / "tests")
        shutil.copy(REPO / "setup.cfg", copy)
        command = [
            sys.executable,
            __file__,
            "--inside",
            folder,
            "--jobs",
            str(options.jobs),
            "--only",
            options.only,
        ]
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(command, cwd=folder, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
