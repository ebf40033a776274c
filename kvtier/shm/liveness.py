"""Who lives: a lock per session and a pidfd prove a client's death (R19, R20); one lock names the owner
(R25).

Imports the standard library, `shm.rundir` and the ground floor. Always true: only a free lock *and* a
readable pidfd are DEAD; whatever cannot be told is SUSPECT. Locks are open-file-description locks: they
belong to the description, so they go when its last descriptor in any process does, and can be handed over.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import select
import struct
from pathlib import Path

from kvtier.errors import OwnedError, UsageError
from kvtier.shm import rundir

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid: struct flock of 64-bit Linux


class Liveness(enum.Enum):
    """What a probe tells of a session's process."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """The lock is free but the process has not ended, or the probe failed: no new leases, nothing freed."""
    DEAD = "dead"
    """Lock free and pidfd readable: no file of the process is left that could still touch the pool."""


class SessionLocks:
    """The server's lock file: one byte for each session, locked on the description that the client gets.

    The byte is chosen by the session's id (never given again), so a slot can be used again while a forked
    child of its former session still holds the old lock.
    """

    def __init__(self, run_dir: Path | str) -> None:
        """Makes (or opens) the lock file of a run directory that the caller owns."""
        path = Path(run_dir) / rundir.LOCKS
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def grant(self, sid: int) -> int:
        """A new descriptor, on a description of its own that holds the session's lock. Send it, then close it
        (R19).

        UsageError when that session's lock is held already; OSError when the file cannot be opened anew.
        """
        # By its descriptor, not its name: a cleaner of old files may have removed that.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if not try_lock(fd, _byte(sid)):
                raise UsageError(f"session {sid:#x}: its lock is held already")
        except BaseException:
            os.close(fd)
            raise
        return fd

    def is_free(self, sid: int) -> bool:
        """Is the session's lock held by nobody? OSError when it cannot be told."""
        if self._fd < 0:
            raise OSError(errno.EBADF, "the lock file is closed")
        return lock_is_free(self._fd, _byte(sid))

    def probe(self, sid: int, pidfd: int) -> Liveness:
        """R20. `pidfd`: the client's. Never raises for a bad descriptor and never blocks."""
        try:
            if not self.is_free(sid):
                return Liveness.ALIVE  # or a forked child has it (R21): the safe direction
            return Liveness.DEAD if has_ended(pidfd) else Liveness.SUSPECT
        except OSError:
            return Liveness.SUSPECT

    def close(self) -> None:
        """Idempotent. The locks stay with the sessions."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class OwnerLock:
    """One server per run directory (R25). Take it before any bind; keep it for as long as the server lives.

        owner = OwnerLock(run_dir)      # makes run_dir (0700) if need be; OwnedError names the other server
        ...
        owner.release()                 # removes sockets, lock files, and the directory if a server made it

    `fd` holds the lock; who starts the server in another process hands it on.
    """

    def __init__(self, path: Path | str) -> None:
        """OwnedError when another server has it, ConfigError when the directory is unsafe."""
        while True:
            found = os.path.lexists(path)
            self.run_dir = rundir.make_run_dir(path)
            name = self.run_dir / rundir.OWNER
            try:
                fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except FileNotFoundError:
                continue  # a former owner has just removed its directory
            except OSError:  # no room for it
                if not found:
                    with contextlib.suppress(OSError):
                        os.rmdir(self.run_dir)
                raise
            try:
                if not try_lock(fd, 0):
                    pid = os.pread(fd, 64, 0).decode(errors="replace").split("\n")[0]
                    raise OwnedError(
                        f"run directory {self.run_dir} belongs to the running sidecar of process "
                        f"{pid or 'unknown'}: use that one, stop it, or give this one another --run-dir"
                    )
                # The former owner may have removed the file between the open and the lock: then it is
                # the lock of nothing.
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(fd), os.stat(name, follow_symlinks=False)):
                        break
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        self.fd = fd
        # A directory that a server made is a server's to remove, also after one that was killed.
        self._made = not found or b"made" in os.pread(fd, 64, 0)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n{'made' if self._made else 'found'}\n".encode(), 0)
        except OSError:  # no room for it
            self.release()
            raise

    def release(self) -> None:
        """Removes what the server has made in the run directory, then lets go of it. Idempotent."""
        if self.fd < 0:
            return
        for name in (
            rundir.ATTACH_SOCKET,
            rundir.DATA_SOCKET,
            rundir.ADMIN_SOCKET,
            rundir.LOCKS,
            rundir.OWNER,
        ):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.run_dir / name)
        if self._made:
            with contextlib.suppress(OSError):  # something else lies in it: then it stays
                os.rmdir(self.run_dir)
        os.close(self.fd)
        self.fd = -1


def has_ended(pidfd: int) -> bool:
    """Has the process of this pidfd ended (also as a zombie)? OSError when it cannot be told."""
    if pidfd < 0:
        raise OSError(errno.EBADF, "no pidfd")
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    events = poller.poll(0)
    if events and events[0][1] & ~(select.POLLIN | select.POLLHUP):
        raise OSError(errno.EBADF, "not a pidfd that can be polled")
    return bool(events)


def is_pidfd(fd: int) -> bool:
    """Is this a pidfd? Anything else that is readable would look like a proof of death."""
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            return any(line.startswith("Pid:") for line in file)
    except OSError:
        return False


def try_lock(fd: int, byte: int) -> bool:
    """Lock one byte on this description; False when another description has it. OSError otherwise."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_is_free(fd: int, byte: int) -> bool:
    """Does no *other* description have this byte locked? OSError when it cannot be told."""
    found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(found)[0] == fcntl.F_UNLCK)


def _byte(sid: int) -> int:
    """The session's byte: offsets have 63 bits, ids 64 random ones."""
    return sid >> 1
