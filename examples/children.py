"""Child processes that never outlive their parent, and interrupts that never lose one.

`start` runs a program through `python children.py PARENT_PID SIGNAL program ...`, which asks the kernel to
send SIGNAL when the parent dies and then becomes the program: so a parent that is killed, by whatever, leaves
nobody behind. `Interrupts` turns Ctrl-C into KeyboardInterrupt, but not while a child is started or ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

PR_SET_PDEATHSIG = 1


def start(
    command: Sequence[str],
    death_signal: signal.Signals,
    *,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    env: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command`; it gets `death_signal` when this process dies. Call from the main thread.

    The child is in a process group of its own: Ctrl-C in the terminal is the parent's to handle.
    """
    launcher = [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(int(death_signal))]
    return subprocess.Popen(
        [*launcher, *command], stdin=stdin, stdout=stdout, stderr=stderr, env=env, start_new_session=True
    )


def stop(child: subprocess.Popen[bytes], *, term_s: float, kill_s: float = 5.0) -> int:
    """End `child` and wait for it: SIGTERM, after `term_s` seconds SIGKILL. Its exit status."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(term_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(kill_s)
    return child.returncode


class Interrupts:
    """SIGINT and SIGTERM raise KeyboardInterrupt in the main thread, once; not under `held()`, but at its
    end.

    Later ones, and those after `mute()`, do nothing: the way out is bounded by itself.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._muted = False
        self._waiting = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def mute(self) -> None:
        """Let nothing be interrupted from now on."""
        self._muted = True

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let nothing come between what is done in here."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._waiting and not self._depth:
                self._interrupt()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._depth:
            self._waiting = True
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        if not self._muted:
            self._muted = True
            raise KeyboardInterrupt


def _launch(parent: int, number: int, command: list[str]) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel could know
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    _launch(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
