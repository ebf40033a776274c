"""The sidecar's numbers without a session: attaches nothing, formats nothing, maps nothing."""

from __future__ import annotations

import time
from pathlib import Path

import zmq

from kvtier.errors import ProtocolError, Status
from kvtier.shm.rundir import DATA_SOCKET, check_run_dir
from kvtier.wire.codec import decode_reply, encode_request
from kvtier.wire.messages import Reply, Request, Stats
from kvtier.wire.packing import MAX_MESSAGE_BYTES


def read_stats(run_dir: str | Path, timeout_s: float = 1.0) -> Reply:
    """One `stats` request and its reply; status AWAY when nobody answers in time, with a text.

    ConfigError when the run directory is unsafe.
    """
    try:
        path = check_run_dir(run_dir) / DATA_SOCKET
    except FileNotFoundError:
        return Reply(0, 0, Status.AWAY, f"there is no run directory {run_dir}")
    if not path.exists():
        return Reply(0, 0, Status.AWAY, f"no sidecar runs at {run_dir}")
    deadline = time.monotonic() + timeout_s
    with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        socket.connect(f"ipc://{path}")
        try:
            socket.send(encode_request(Request(1, 0, 0, Stats())))
            socket.setsockopt(zmq.RCVTIMEO, max(1, int((deadline - time.monotonic()) * 1000)))
            return decode_reply(socket.recv())
        except zmq.Again:
            return Reply(0, 0, Status.AWAY, f"the sidecar at {run_dir} does not answer")
        except ProtocolError as error:
            return Reply(0, 0, Status.AWAY, f"what listens at {path} is no sidecar: {error}")
