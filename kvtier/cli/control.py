"""The way from a command to the sidecar's control: one connection over rpyc, and what can go wrong with it.

Beside `kvtier.server.admin` the only place that imports rpyc. Exit statuses of the commands that use it: 0
done, 1 refused or failed, 2 wrong usage, 3 no sidecar.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rpyc.core.async_ import AsyncResultTimeout
from rpyc.core.protocol import Connection
from rpyc.core.service import VoidService

from kvtier.cli.absent import nobody_at
from kvtier.errors import ProtocolError
from kvtier.server.framing import Framed
from kvtier.shm.rundir import ADMIN_SOCKET, check_run_dir

REFUSED, NO_SIDECAR = 1, 3
TIMEOUT_S = 7.0
"""How long the sidecar may take to answer: longer than its own bound, so that it can say what is wrong."""
MAX_ANSWER_BYTES = 4 << 20

Values = dict[str, Any]


class NoSidecarError(Exception):
    """No sidecar listens there, or it went away."""


class _Connection(Connection):  # type: ignore[misc]  # rpyc has no types
    def close(self) -> None:
        """Hang up. rpyc's own would ask the sidecar first, and wait."""
        if not self.closed:
            self._cleanup()


class Control:
    """A sidecar's control; `call` its methods (`kvtier.server.admin`). Ends with the block."""

    def __init__(self, run_dir: Path) -> None:
        """NoSidecarError when none is there; ConfigError when the run directory is unsafe."""
        self._run_dir = run_dir
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The kernel's own timeout: Python's would not wait at all where many others are waiting.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TIMEOUT_S), 0))
            sock.connect(str(check_run_dir(run_dir) / ADMIN_SOCKET))
        except (FileNotFoundError, ConnectionError):
            sock.close()
            raise NoSidecarError(nobody_at(run_dir)) from None
        except OSError as error:
            sock.close()
            fail(f"cannot reach the sidecar at {run_dir}: {error}")
        except BaseException:
            sock.close()
            raise
        # It trusts the sidecar no further than it has to: rpyc's doors are shut on this side too.
        settings = {
            "allow_getattr": False,
            "allow_safe_attrs": False,
            "allow_exposed_attrs": False,
            "sync_request_timeout": TIMEOUT_S,
            "bind_threads": False,
        }
        self._connection = _Connection(
            VoidService(), Framed(sock, MAX_ANSWER_BYTES, MAX_ANSWER_BYTES), settings
        )

    def one(self, method: str, *arguments: object) -> Values:
        """The answer of a method that gives one: by name."""
        return dict(self._call(method, *arguments))

    def many(self, method: str) -> list[Values]:
        """The answers of a method that gives many."""
        return [dict(pairs) for pairs in self._call(method)]

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._connection.root, method)(*arguments)
        except (EOFError, ConnectionError):
            raise NoSidecarError(f"the sidecar at {self._run_dir} has ended") from None
        except AsyncResultTimeout:
            fail(f"the sidecar at {self._run_dir} did not answer within {TIMEOUT_S:g} s")
        except ProtocolError as error:
            fail(f"what listens at {self._run_dir} is no sidecar: {error}")
        except Exception as error:  # noqa: BLE001  # the sidecar's own, of a type that rpyc makes up
            fail(f"the sidecar at {self._run_dir} refused: {error.args[0] if error.args else error!r}")

    def wait(self, timeout_s: float) -> None:
        """Let that much time pass, or less when the sidecar ends."""
        if not self._connection.closed:
            poller = select.poll()
            poller.register(self._connection.fileno(), select.POLLIN)
            poller.poll(timeout_s * 1000)

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


@contextmanager
def connect(run_dir: Path) -> Iterator[Control]:
    """A `Control`; the command ends when no sidecar is there, or it goes away."""
    try:
        with Control(run_dir) as control:
            yield control
    except NoSidecarError as error:
        fail(str(error), NO_SIDECAR)


def checked(answer: Values) -> Values:
    """The answer without its `ok` and `text`; ends the command when it is a refusal."""
    text = str(answer.pop("text"))
    if not answer.pop("ok"):
        fail(text)
    if text:
        print(f"kvtier: {text}", file=sys.stderr)
    return answer


def show_json(values: object) -> None:
    """For programs: one JSON value on stdout."""
    print(json.dumps(values, indent=2))


def fail(text: str, code: int = REFUSED) -> NoReturn:
    """One line on stderr, and the end."""
    print(f"kvtier: {text}", file=sys.stderr)
    sys.exit(code)
