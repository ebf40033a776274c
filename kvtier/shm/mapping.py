"""Shared mappings as numpy arrays, through libc: what Python's `mmap` cannot do.

`mmap.mmap` keeps a duplicate of the descriptor for as long as it lives (R28 wants them closed) and unmaps
under arrays that point into it. Here the array owns the mapping: it goes when the last view of it does.
Imports numpy and the standard library.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

Bytes = npt.NDArray[np.uint8]

_MFD_NOEXEC_SEAL = 0x0008
SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The size of a chunk or table never changes, so a mapping of it never ends in SIGBUS."""

_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def sealed_memfd(name: str, size: int) -> int:
    """A new memfd of `size` zero bytes whose size is sealed; nothing of it is reserved yet. OSError."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        fd = os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create(name, flags)  # kernels before 6.3
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_shared(fd: int, size: int, *, writable: bool) -> Bytes:
    """uint8[size] over `fd`, shared, not inherited by a fork and not part of a core dump (R21).

    `fd` may be closed afterwards. The array (and each view of it) keeps the mapping. OSError when the kernel
    refuses.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _libc.mmap(None, size, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == _MAP_FAILED:
        raise _os_error(f"mmap of {size} bytes")
    try:
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_DONTDUMP):
            if _libc.madvise(address, size, advice):
                raise _os_error("madvise")
    except OSError:
        _libc.munmap(address, size)
        raise
    owner: Any = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(owner, _unmap, os.getpid(), address, size).atexit = False
    array = np.frombuffer(owner, dtype=np.uint8)
    array.flags.writeable = writable
    return array


def populate(array: Bytes, *, write: bool) -> bool:
    """Fault a contiguous, page-aligned array in; the GIL is free meanwhile. False where the kernel cannot
    (before 5.14).
    """
    advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
    return bool(_libc.madvise(array.ctypes.data, array.nbytes, advice) == 0)


def _unmap(pid: int, address: int, size: int) -> None:
    # In a forked child the range was never inherited, and may be in use for something else by now.
    if os.getpid() == pid:
        _libc.munmap(address, size)


def _os_error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")
