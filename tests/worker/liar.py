"""A sidecar that lies: `python liar.py RUN_DIR MODE`. It attaches clients honestly, then answers garbage.

Modes: `noise` random bytes, `short` one byte, `silent` answers that nobody waits for, `kind` the answer to
another question, `empty` lists without entries, `frames` grants of frames that do not exist, `numbers`
grants of other leases, `status` everything is BAD. With `attach` nobody gets that far: random bytes come
from the attach socket.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import replace

import numpy as np

from kvtier.config import MIB
from kvtier.errors import Status
from kvtier.server import server as module
from kvtier.wire.codec import encode_reply
from kvtier.wire.messages import EndReply, HelloReply, LoadReply, LookupReply, Reply, StoreReply


def lie(mode: str, reply: Reply) -> bytes:
    body = reply.body
    if isinstance(body, HelloReply):
        return encode_reply(reply)
    if mode == "noise":
        return os.urandom(64)
    if mode == "silent":
        return encode_reply(replace(reply, rid=reply.rid + 1_000_000))
    if mode == "short":
        return b"\x93"
    if mode == "status":
        return encode_reply(replace(reply, status=Status.BAD, text="nonsense", body=None))
    if mode == "kind":
        other = EndReply(body.op, ()) if isinstance(body, LookupReply) else LookupReply(3, 0, 1)
        return encode_reply(replace(reply, status=Status.OK, body=other))
    if mode == "empty" and isinstance(body, LoadReply | StoreReply):
        return encode_reply(replace(reply, body=type(body)(())))
    if isinstance(body, LookupReply):
        return encode_reply(replace(reply, body=LookupReply(2**31, 5, 1)))
    if mode == "frames" and isinstance(body, LoadReply | StoreReply):
        return encode_reply(replace(reply, body=type(body)(tuple(map(unreal, body.grants)))))
    if mode == "numbers" and isinstance(body, LoadReply | StoreReply):
        grants = tuple(replace(unreal(grant), number=grant.number + 7) for grant in body.grants)
        return encode_reply(replace(reply, body=type(body)(grants)))
    return encode_reply(reply)


def unreal(grant):
    """A grant of 5 frames far outside of the pool."""
    frames = np.full(5, 2**31 - 1, np.int32)
    if hasattr(grant, "gens"):
        return replace(grant, status=Status.OK, frames=frames, gens=np.ones(5, np.uint32), ready=5)
    return replace(grant, status=Status.OK, start=0, taken=5, frames=frames)


def noise_on_attach(run_dir: str) -> None:
    os.makedirs(run_dir, mode=0o700, exist_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.path.join(run_dir, "attach.sock"))
    listener.listen()
    print("kvtier liar", flush=True)
    while True:
        connection, _ = listener.accept()
        connection.send(os.urandom(200))
        connection.close()


def main(run_dir: str, mode: str) -> None:
    if mode == "attach":
        noise_on_attach(run_dir)
    module.encode_reply = lambda reply: lie(mode, reply)
    with module.Server(run_dir, 16 * MIB) as server:
        signal.signal(signal.SIGTERM, lambda *_: server.stop())
        server.run(lambda: print("kvtier liar", flush=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
