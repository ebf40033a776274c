"""The child that reserves the pool's memory: run as a program of its own, standard library only (R29).

`region.Pool` starts it with a socket as descriptor 3 and its own process id as argument. An order is `<QQ`
(offset, length), with a descriptor when it is about another chunk than before; the report is `<Qi` (length,
errno). For each order it takes the memory (`fallocate`, so that nobody meets SIGBUS) and touches it, which is
the slow part.

The kernel kills where a memory limit is reached, it does not say ENOSPC: so this process asks to be the
victim. It ends when the socket or its parent does.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import struct
import sys

ORDER = struct.Struct("<QQ")
REPORT = struct.Struct("<Qi")

_PR_SET_PDEATHSIG = 1
_MADV_POPULATE_WRITE = 23


def main(parent: int) -> None:
    # Ctrl-C goes to the whole group: the parent decides when this ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        return  # it died before the line above
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        pass  # where /proc is not writable the kernel chooses by size, as it would for the server
    os.nice(10)
    orders = socket.socket(fileno=3)
    chunk = -1
    try:
        while True:
            data, fds, _, _ = socket.recv_fds(orders, ORDER.size, 1)
            if len(data) != ORDER.size:
                return
            if fds:
                if chunk >= 0:
                    os.close(chunk)
                chunk = fds[0]
            offset, length = ORDER.unpack(data)
            try:
                reserve(chunk, offset, length)
                number = 0
            except OSError as error:
                number = error.errno or errno.EIO
            orders.send(REPORT.pack(length, number))
    except ConnectionError:
        return  # the parent wants no more


def reserve(fd: int, offset: int, length: int) -> None:
    """Allocate and touch bytes of a memfd; `offset` is a multiple of the allocation granularity."""
    os.posix_fallocate(fd, offset, length)
    with mmap.mmap(fd, length, offset=offset) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE, 0, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14: a store to each page. The memory is new, so it holds zeros.
            memory[0 : length : mmap.PAGESIZE] = bytes(-(-length // mmap.PAGESIZE))


if __name__ == "__main__":
    main(int(sys.argv[1]))
