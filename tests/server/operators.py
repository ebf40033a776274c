"""Operators for tests: one that behaves (rpyc's own client), and one that sends what it likes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from rpyc.core import brine, consts
from rpyc.core.protocol import Connection
from rpyc.utils.factory import unix_connect

from kvtier.server.framing import _HEADER


def operator(run_dir: Path) -> Connection:
    """As any rpyc program connects."""
    return unix_connect(str(run_dir / "admin.sock"), config={"sync_request_timeout": 20})


class Raw:
    """Speaks rpyc's bytes without rpyc's manners."""

    def __init__(self, run_dir: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(run_dir / "admin.sock"))
        self.socket.settimeout(20)
        self.file = self.socket.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def frame(self, data: bytes, compressed: int = 0) -> None:
        self.send(_HEADER.pack(len(data), compressed) + data + b"\n")

    def message(self, kind: int, *what: Any) -> None:
        self.frame(brine.I1.pack(kind) + brine.dump(what))

    def receive(self) -> tuple[int, Any]:
        """Kind and payload of the next answer."""
        length, compressed = _HEADER.unpack(self.file.read(_HEADER.size))
        assert not compressed
        data = self.file.read(length + 1)[:-1]
        return data[0], brine.load(data[1:])[1]

    def ask(self, handler: int, *boxed: Any) -> tuple[int, Any]:
        """Arguments are boxed by the caller."""
        self.message(consts.MSG_REQUEST, 1, (handler, (consts.LABEL_TUPLE, boxed)))
        return self.receive()

    def root(self) -> tuple[int, Any]:
        """The root, boxed as an argument."""
        kind, (label, id_pack) = self.ask(consts.HANDLE_GETROOT)
        assert (kind, label) == (consts.MSG_REPLY, consts.LABEL_REMOTE_REF)
        return consts.LABEL_LOCAL_REF, id_pack

    def hung_up(self) -> bool:
        """Has the sidecar closed the connection? Waits for it."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.file.close()
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def value(plain: Any) -> tuple[int, Any]:
    """A plain value, boxed."""
    return consts.LABEL_VALUE, plain
