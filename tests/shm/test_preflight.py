"""What a host has, on laid-out hosts: cgroup v1, v2, both, containers; missing primitives (R27)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtier.config import GIB, MIB
from kvtier.errors import PreflightError
from kvtier.shm import preflight
from kvtier.shm.preflight import Check, check_memory, check_primitives, headroom, memory, require, run
from tests.shm.harness import open_fds

V1_UNLIMITED = "9223372036854771712"


class Host:
    """Fake /proc and /sys below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def mount(self, lines: str) -> None:
        self.write("proc/self/mountinfo", lines)

    def v2(
        self, folder: str, limit: int | str, used: int, inactive: int = 0, high: int | str = "max"
    ) -> None:
        self.write(f"sys/fs/cgroup/{folder}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{folder}/memory.high", high)
        self.write(f"sys/fs/cgroup/{folder}/memory.current", used)
        self.write(f"sys/fs/cgroup/{folder}/memory.stat", f"anon 5\ninactive_file {inactive}\nnonsense\n")

    def v1(self, folder: str, limit: int | str, used: int, inactive: int = 0) -> None:
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", limit)
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", used)
        stat = f"inactive_file 1\ntotal_inactive_file {inactive}\n"
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.stat", stat)


V2_MOUNT = "25 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_without_limits_it_is_what_the_host_has_available(host: Host) -> None:
    found = memory(host.root)
    assert (found.available, found.total) == (32 * GIB, 64 * GIB)
    assert "MemAvailable" in found.source


def test_cgroup_v2_the_tightest_of_all_levels_counts(host: Host) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/kubepods/pod7/main")
    host.v2("kubepods/pod7/main", "max", 3 * GIB)
    host.v2("kubepods/pod7", 10 * GIB, 4 * GIB, inactive=1 * GIB)
    host.v2("kubepods", 40 * GIB, 4 * GIB)
    found = memory(host.root)
    assert (found.available, found.total) == (7 * GIB, 10 * GIB)
    assert found.source == "cgroup v2 memory.max of /kubepods/pod7"


def test_cgroup_v2_memory_high_is_a_limit_too(host: Host) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/a")
    host.v2("a", 10 * GIB, 1 * GIB, high=5 * GIB)
    found = memory(host.root)
    assert (found.available, found.total) == (4 * GIB, 5 * GIB)
    assert "memory.high" in found.source


def test_cgroup_v1_counts_and_its_unlimited_is_none(host: Host) -> None:
    host.mount(V1_MOUNT)
    host.write("proc/self/cgroup", "5:cpu,cpuacct:/other\n4:memory:/docker/abc\n0::/elsewhere")
    host.v1("", V1_UNLIMITED, 9 * GIB)
    host.v1("docker", V1_UNLIMITED, 9 * GIB)
    host.v1("docker/abc", 8 * GIB, 3 * GIB, inactive=1 * GIB)
    found = memory(host.root)
    assert (found.available, found.total) == (6 * GIB, 8 * GIB)
    assert found.source == "cgroup v1 memory.limit_in_bytes of /docker/abc"
    host.v1("docker/abc", V1_UNLIMITED, 3 * GIB)
    assert memory(host.root).available == 32 * GIB


def test_hybrid_both_hierarchies_are_read(host: Host) -> None:
    host.mount(f"{V1_MOUNT}\n41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
    host.write("proc/self/cgroup", "4:memory:/job\n0::/job")
    host.v1("job", 8 * GIB, 1 * GIB)
    assert memory(host.root).available == 7 * GIB
    host.v2("unified/job", 6 * GIB, 1 * GIB)
    assert memory(host.root).available == 5 * GIB


@pytest.mark.parametrize(
    "cgroup", ["0::/", "0::/kubepods/pod7/main", "0::/../pod8/main", "0::/not/shown/here"]
)
def test_in_a_container_the_mount_itself_is_the_cgroup(host: Host, cgroup: str) -> None:
    """The path in /proc/self/cgroup may be seen from outside, the mount shows the container's part."""
    host.write("proc/self/cgroup", cgroup)
    host.mount("25 20 0:26 /kubepods/pod7/main /sys/fs/cgroup ro - cgroup2 cgroup rw")
    host.v2("", 2 * GIB, 1 * GIB)
    found = memory(host.root)
    assert (found.available, found.total) == (1 * GIB, 2 * GIB)


def test_used_above_the_limit_leaves_nothing(host: Host) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/a")
    host.v2("a", 1 * GIB, 2 * GIB)
    assert headroom(host.root) == 0


def test_no_more_can_be_reclaimed_than_is_used(host: Host) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/a")
    host.v2("a", 4 * GIB, 1 * GIB, inactive=9 * GIB)
    assert headroom(host.root) == 4 * GIB


def test_files_that_cannot_be_understood_set_no_limit(host: Host) -> None:
    host.mount("garbage\n1 2 3 - cgroup2\n" + V2_MOUNT)
    host.write("proc/self/cgroup", "garbage\n::::\n0::/a\n")
    host.v2("a", "many", 1 * GIB)
    (host.root / "sys/fs/cgroup/a/memory.current").write_bytes(b"\xff\xfe")
    assert memory(host.root).available == 32 * GIB


def test_without_proc_memory_is_an_error_and_headroom_sets_no_limit(tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="mount /proc"):
        memory(tmp_path)
    assert headroom(tmp_path) > 1 << 50
    assert not check_memory(MIB, tmp_path).ok
    assert not run(None, tmp_path)[0].ok


def test_this_host_can_be_read() -> None:
    found = memory()
    assert 0 < found.available <= found.total
    assert found.source


# --- what people are told ---------------------------------------------------------------------------


def test_a_pool_that_fits_is_ok(host: Host) -> None:
    check = check_memory(31 * GIB, host.root)
    assert check.ok
    assert check.remedy == ""
    assert "available 32 GiB of 64 GiB" in check.text


def test_a_pool_too_large_for_the_host_says_needed_available_and_remedy(host: Host) -> None:
    check = check_memory(32 * GIB, host.root)  # the sidecar itself needs some
    assert not check.ok
    for part in ("needed 32.1 GiB", "pool 32 GiB", "available 32 GiB"):
        assert part in check.text
    assert f"--size {32 * 1024 - 64}MiB or less" in check.remedy
    assert check_memory((32 * 1024 - 64) * MIB, host.root).ok  # the remedy works


def test_a_pool_too_large_for_the_container_names_the_limit_to_raise(host: Host) -> None:
    host.mount(V2_MOUNT)
    host.write("proc/self/cgroup", "0::/pod")
    host.v2("pod", 2 * GIB, 1 * GIB)
    check = check_memory(4 * GIB, host.root)
    assert not check.ok
    assert "available 1 GiB of 2 GiB (cgroup v2 memory.max of /pod)" in check.text
    for part in ("960MiB or less", "docker run --memory", "resources.limits.memory", "5184MiB"):
        assert part in check.remedy
    host.v2("pod", 5 * GIB + 64 * MIB, 1 * GIB)
    assert check_memory(4 * GIB, host.root).ok  # so does this remedy


def test_a_full_host_says_that_no_pool_fits(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 1000000 kB\nMemAvailable: 100 kB")
    assert "no pool fits" in check_memory(MIB, host.root).remedy


def test_require_names_each_failure_with_its_remedy() -> None:
    require([Check("a", True, "fine")])
    with pytest.raises(PreflightError) as error:
        require([Check("a", True, "fine"), Check("b", False, "lacks x", "do y"), Check("c", False, "z", "q")])
    assert str(error.value) == "b: lacks x. Remedy: do y\nc: z. Remedy: q"


# --- primitives (R27) -------------------------------------------------------------------------------


def test_all_primitives_work_here_and_leave_nothing_open() -> None:
    before = open_fds()
    checks = run(MIB)
    assert [check.name for check in checks if not check.ok] == []
    assert len(checks) == 7
    assert open_fds() == before


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("os.memfd_create", "memfd and seals"),
        ("os.pidfd_open", "pidfd"),
        ("socket.send_fds", "descriptor passing"),
        ("kvtier.shm.preflight.map_shared", "shared mappings"),
        ("kvtier.shm.preflight.try_lock", "locks of descriptions"),
    ],
)
def test_a_primitive_that_fails_is_named_with_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, target: str, name: str
) -> None:
    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    before = open_fds()
    monkeypatch.setattr(target, refused)
    failed = {check.name: check for check in check_primitives() if not check.ok}
    assert name in failed
    assert "Operation not permitted" in failed[name].text
    assert "needed" in failed[name].text
    assert failed[name].remedy
    assert open_fds() == before


@pytest.mark.parametrize(
    ("target", "lie", "name"),
    [
        ("lock_is_free", lambda fd, byte: True, "locks of descriptions"),
        ("has_ended", lambda pidfd: True, "pidfd"),
        ("sealed_memfd", lambda name, size: _unsealed(size), "memfd and seals"),
    ],
)
def test_a_primitive_that_lies_is_found_out(
    monkeypatch: pytest.MonkeyPatch, target: str, lie: object, name: str
) -> None:
    monkeypatch.setattr(preflight, target, lie)
    assert name in [check.name for check in check_primitives() if not check.ok]


def _unsealed(size: int) -> int:
    fd = os.memfd_create("unsealed")
    os.ftruncate(fd, size)
    return fd
