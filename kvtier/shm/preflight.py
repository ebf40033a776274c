"""What this host has: memory under cgroup v1 and v2, and the kernel primitives that the sidecar needs (R27).

Memory is read below a root directory (default `/`), so that tests can lay out other hosts; primitives are
tried. Imports the standard library, `shm` and the ground floor. Always true: a file that cannot be read sets
no limit, and a failed check says needed, available and the remedy.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvtier.config import MIB, format_size
from kvtier.errors import PreflightError
from kvtier.shm.liveness import has_ended, lock_is_free, try_lock
from kvtier.shm.mapping import map_shared, sealed_memfd

MARGIN_BYTES = 64 * MIB
"""What is left to the sidecar itself, beside the pool."""

_UNLIMITED = 1 << 60  # cgroup v1 says 2^63 less a page


@dataclass(frozen=True)
class Memory:
    """How many bytes can still be taken, the most that could be, and what sets each.

    `available`: the least that any limit leaves, never negative; `source` names that limit. `total`: the
    lowest limit itself, or MemTotal.
    """

    available: int
    total: int
    source: str


@dataclass(frozen=True)
class Check:
    """One line of `kvtier doctor`: `text` is what was found, with needed and available for a failure;
    `remedy` is what to do about it, "" when ok."""

    name: str
    ok: bool
    text: str
    remedy: str = ""


def memory(root: Path | str = "/") -> Memory:
    """From the limits of this process's cgroup and all above it (v1, v2, hybrid), and from /proc/meminfo.

    What the kernel would drop before refusing (inactive file pages) counts as available.
    """
    base = Path(root)
    found = _meminfo(base)
    found += [entry for limits in (_cgroup2, _cgroup1) for entry in limits(base)]
    if not found:
        raise PreflightError(f"neither {base / 'proc/meminfo'} nor a memory cgroup can be read: mount /proc")
    available, _, source = min(found)
    return Memory(max(0, available), min(total for _, total, _ in found), source)


def headroom(root: Path | str = "/") -> int:
    """`memory(root).available`, asked before each step of reserving (R29); about 1 ms. Nothing readable, no
    limit.
    """
    try:
        return memory(root).available
    except PreflightError:
        return _UNLIMITED


def check_memory(pool_bytes: int, root: Path | str = "/") -> Check:
    """Is there room for a pool of this size beside what is there already?"""
    try:
        found = memory(root)
    except PreflightError as error:
        return Check("memory", False, str(error), "run where /proc is mounted")
    needed = pool_bytes + MARGIN_BYTES
    text = (
        f"needed {format_size(needed)} (pool {format_size(pool_bytes)}), available "
        f"{format_size(found.available)} of {format_size(found.total)} ({found.source})"
    )
    if needed <= found.available:
        return Check("memory", True, text)
    fitting = (found.available - MARGIN_BYTES) // MIB
    smaller = f"give --size {fitting}MiB or less" if fitting > 0 else "no pool fits: free memory first"
    if found.source.startswith("MemAvailable"):
        return Check("memory", False, text, f"{smaller}, or run on a host with more free memory")
    raised = f"{-(-(needed + found.total - found.available) // MIB)}MiB"
    return Check(
        "memory",
        False,
        text,
        f"{smaller}, or raise the limit to {raised} or more (docker run --memory; in Kubernetes "
        "resources.limits.memory; systemd MemoryMax=)",
    )


def check_primitives() -> list[Check]:
    """Tries each kernel primitive that the sidecar stands on, one check for each (R27)."""
    tries: list[tuple[str, Callable[[], None], str]] = [
        ("memfd and seals", _try_memfd, "Linux 3.17 or later, and no seccomp profile against memfd_create"),
        (
            "shared mappings",
            _try_mapping,
            "a kernel with MADV_DONTFORK and MADV_DONTDUMP (Linux 3.4 or later)",
        ),
        ("locks of descriptions", _try_locks, "Linux 3.15 or later (F_OFD_SETLK)"),
        ("pidfd", _try_pidfd, "Linux 5.3 or later, and no seccomp profile against pidfd_open"),
        ("descriptor passing", _try_passing, "no seccomp profile or security module against SCM_RIGHTS"),
        ("/proc", _try_proc, "mount /proc in this container"),
    ]
    return [_tried(*entry) for entry in tries]


def run(pool_bytes: int | None = None, root: Path | str = "/") -> list[Check]:
    """All checks, failures among them, for `kvtier doctor`; without a size, memory is only shown."""
    return [check_memory(pool_bytes or 0, root) if pool_bytes else _show_memory(root), *check_primitives()]


def require(checks: list[Check]) -> None:
    """PreflightError that names each failed check with its remedy; nothing when all are ok."""
    failed = [f"{check.name}: {check.text}. Remedy: {check.remedy}" for check in checks if not check.ok]
    if failed:
        raise PreflightError("\n".join(failed))


# --- memory -----------------------------------------------------------------------------------------

_Limit = tuple[int, int, str]  # available, total, source


def _show_memory(root: Path | str) -> Check:
    try:
        found = memory(root)
    except PreflightError as error:
        return Check("memory", False, str(error), "run where /proc is mounted")
    return Check(
        "memory",
        True,
        f"available {format_size(found.available)} of {format_size(found.total)} ({found.source})",
    )


def _meminfo(base: Path) -> list[_Limit]:
    values = {}
    for line in _read(base / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            values[name] = int(number[0]) * 1024
    if "MemAvailable" not in values:
        return []
    return [
        (
            values["MemAvailable"],
            values.get("MemTotal", values["MemAvailable"]),
            "MemAvailable of /proc/meminfo",
        )
    ]


def _cgroup2(base: Path) -> Iterator[_Limit]:
    """Limits of the unified hierarchy. `memory.high` counts too: above it the kernel slows to a halt."""
    for folder, name in _folders(base, "cgroup2", lambda controllers: controllers == ""):
        used, stat = _number(folder / "memory.current"), _stat(folder)
        for limit_name in ("memory.max", "memory.high"):
            limit = _number(folder / limit_name)
            if limit is not None and used is not None:
                reclaimable = min(used, stat.get("inactive_file", 0))
                yield limit - used + reclaimable, limit, f"cgroup v2 {limit_name} of {name}"


def _cgroup1(base: Path) -> Iterator[_Limit]:
    """Limits of the memory controller's own hierarchy."""
    for folder, name in _folders(base, "cgroup", lambda controllers: "memory" in controllers.split(",")):
        limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            stat = _stat(folder)
            reclaimable = min(used, stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            yield limit - used + reclaimable, limit, f"cgroup v1 memory.limit_in_bytes of {name}"


def _folders(base: Path, kind: str, is_memory: Callable[[str], bool]) -> Iterator[tuple[Path, str]]:
    """This process's cgroup and all above it, as folders and by name.

    In a container the mount may show only a part of the hierarchy (its root is in mountinfo), or
    /proc/self/cgroup may name a path from outside: then the mount itself is the container's cgroup.
    """
    paths: list[PurePosixPath] = []
    for line in _read(base / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if is_memory(controllers) and (kind != "cgroup2" or number == "0"):
            paths.append(PurePosixPath(name))
    for line in _read(base / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, filesystem = left.split(), right.split()
        if len(fields) < 5 or len(filesystem) < 3 or filesystem[0] != kind:
            continue
        if kind == "cgroup" and not is_memory(filesystem[2]):
            continue
        mount_root, mount = PurePosixPath(fields[3]), PurePosixPath(fields[4])
        top = base / str(mount).lstrip("/")
        for path in paths:
            inside = _below(path, mount_root, top)
            for part in (inside, *inside.parents):
                yield top / part, str(mount_root / part)


def _below(path: PurePosixPath, mount_root: PurePosixPath, top: Path) -> PurePosixPath:
    """`path` relative to what the mount shows; "." where it is not in there."""
    if ".." in path.parts:
        return PurePosixPath()
    if path.is_relative_to(mount_root):
        inside = path.relative_to(mount_root)
        if (top / inside).is_dir():
            return inside
    return PurePosixPath()


def _stat(folder: Path) -> dict[str, int]:
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None for "max", for what means no limit, and where there is no file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < _UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# --- primitives -------------------------------------------------------------------------------------


def _tried(name: str, attempt: Callable[[], None], needed: str) -> Check:
    try:
        attempt()
    except (OSError, AttributeError, PreflightError) as error:
        return Check(name, False, f"does not work here: {error}; needed {needed}", f"provide {needed}")
    return Check(name, True, "works")


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise PreflightError(what)


def _try_memfd() -> None:
    fd = sealed_memfd("kvtier-preflight", 8192)
    try:
        for size in (4096, 12288):
            try:
                os.ftruncate(fd, size)
            except PermissionError:
                continue
            raise PreflightError("a sealed memfd changed its size")
        os.posix_fallocate(fd, 0, 8192)
    finally:
        os.close(fd)


def _try_mapping() -> None:
    fd = sealed_memfd("kvtier-preflight", mmap.PAGESIZE)
    try:
        one, other = (map_shared(fd, mmap.PAGESIZE, writable=writable) for writable in (True, False))
    finally:
        os.close(fd)
    one[0] = 77
    _expect(other[0] == 77, "two mappings of one memfd differ")


def _try_locks() -> None:
    """A lock is seen from a second description of the file, passes with the first, and goes when it is
    closed.
    """
    fd = sealed_memfd("kvtier-preflight", 0)
    second = -1
    try:
        second = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        _expect(try_lock(fd, 7), "a free byte could not be locked")
        _expect(not lock_is_free(second, 7), "a lock is not seen from a second description")
        copy = os.dup(fd)
        os.close(fd)
        fd = copy
        _expect(not lock_is_free(second, 7), "a lock went with the first of two descriptors")
        os.close(fd)
        fd = -1
        _expect(lock_is_free(second, 7), "a lock stayed when its description was closed")
    finally:
        for open_fd in (fd, second):
            if open_fd >= 0:
                os.close(open_fd)


def _try_pidfd() -> None:
    """A pidfd is quiet while its process lives and readable when it has ended."""
    own = os.pidfd_open(os.getpid())
    try:
        _expect(not has_ended(own), "the pidfd of a living process is readable")
    finally:
        os.close(own)
    with warnings.catch_warnings():
        # numpy's threads make Python warn; the child calls nothing but _exit.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd = -1
    try:
        pidfd = os.pidfd_open(child)
        _expect(bool(select.select([pidfd], [], [], 5.0)[0]), "the pidfd of an ended process is not readable")
    finally:
        os.waitpid(child, 0)
        if pidfd >= 0:
            os.close(pidfd)


def _try_passing() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = sealed_memfd("kvtier-preflight", 4096)
    received: list[int] = []
    try:
        theirs.settimeout(5.0)
        socket.send_fds(ours, [b"x"], [fd])
        received = socket.recv_fds(theirs, 1, 1)[1]
        same = len(received) == 1 and os.path.samestat(os.fstat(received[0]), os.fstat(fd))
        _expect(same, "a descriptor that was sent did not arrive")
    finally:
        for open_fd in (fd, *received):
            with contextlib.suppress(OSError):
                os.close(open_fd)
        ours.close()
        theirs.close()


def _try_proc() -> None:
    fd = sealed_memfd("kvtier-preflight", 0)
    try:
        read_only = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            mode = fcntl.fcntl(read_only, fcntl.F_GETFL) & os.O_ACCMODE
            _expect(mode == os.O_RDONLY, "a memfd could not be opened again for reading only")
        finally:
            os.close(read_only)
    finally:
        os.close(fd)
