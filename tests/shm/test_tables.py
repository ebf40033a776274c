"""The tables against a naive model, the order of their steps (R15), and what a client refuses to map."""

from __future__ import annotations

import os
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.core import writes as w
from kvtier.errors import ConfigError, ProtocolError
from kvtier.shm.mapping import sealed_memfd
from kvtier.shm.shape import PoolShape
from kvtier.shm.table_format import FRAME, HEADER_BYTES, MAX_SHARDS
from kvtier.shm.tables import Tables, TableView
from tests.shm.harness import open_fds

FRAMES, LEASES, SESSIONS, NAMESPACES = 12, 3, 2, 3
SHAPE = PoolShape((64, 4096, 8192), FRAMES, 5)
STATE_OF = {w.Free: w.FREE, w.Ready: w.READY, w.Doom: w.DOOMED, w.Quarantine: w.QUARANTINED}


def make(shape: PoolShape = SHAPE) -> Tables:
    return Tables(shape, sessions=SESSIONS, leases=LEASES, namespaces=NAMESPACES)


def key(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


class Naive:
    """The tables as dictionaries, one page at a time."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = [
            {"key": bytes(32), "tag": bytes(8), "lease": 0, "stamp": 0, "parent": 0, "gen": 0, "state": 0}
            for _ in range(FRAMES)
        ]
        self.leases: dict[int, tuple[int, ...]] = {}
        self.sessions: dict[int, tuple[Any, ...]] = {}
        self.namespaces: dict[int, tuple[bytes, int]] = {}
        self.epochs = (0, 0)

    def apply(self, write: Any) -> None:
        if type(write) in STATE_OF:
            for frame in write.frames:
                self.frames[frame]["state"] = STATE_OF[type(write)]
        elif isinstance(write, w.Claim):
            parent, tag = write.parent_frame, write.parent_tag
            for at, frame in enumerate(write.frames):
                line = self.frames[frame]
                line["key"] = write.keys[32 * at : 32 * at + 32]
                line.update(tag=tag, parent=parent, lease=write.lease, stamp=write.stamp, state=w.WRITING)
                line["gen"] = (line["gen"] + 1) % 2**24
                parent, tag = frame, line["key"][:8]
        elif isinstance(write, w.Reparent):
            self.frames[write.frame]["parent"] = write.parent_frame
        elif isinstance(write, w.LeaseRecord):
            deepest = write.deepest_frame
            gen = self.frames[deepest]["gen"] if deepest >= 0 else 0
            self.leases[write.lease] = (
                write.sid,
                write.number,
                deepest,
                gen,
                write.epoch,
                write.quiet_mask,
                write.pages,
                write.kind,
            )
        elif isinstance(write, w.LeaseEnd):
            self.leases.pop(write.lease, None)
        elif isinstance(write, w.SessionRecord):
            self.sessions[write.slot] = (
                write.sid,
                write.group_hash,
                write.last_number,
                write.rank,
                write.ranks,
                write.role,
            )
        elif isinstance(write, w.SessionNumber):
            if write.slot in self.sessions:
                old = self.sessions[write.slot]
                self.sessions[write.slot] = (*old[:2], write.last_number, *old[3:])
        elif isinstance(write, w.SessionEnd):
            self.sessions.pop(write.slot, None)
        elif isinstance(write, w.EpochRecord):
            self.namespaces[write.ns_index] = (write.ns, write.epoch)
        elif isinstance(write, w.NamespaceEnd):
            self.namespaces.pop(write.ns_index, None)
        else:
            self.epochs = (write.counter, write.absent)


def contents(tables: Tables | TableView) -> tuple[Any, ...]:
    """What the tables say, in the shape of `Naive`: only what counts by its mark."""
    frames = [
        {
            **{name: line[name].tobytes() for name in ("key", "tag")},
            **{name: int(line[name]) for name in ("lease", "stamp", "parent", "state")},
            "gen": int(line["word"]) >> 8,
        }
        for line in tables.frames
    ]
    leases = {at: tuple(int(x) for x in line) for at, line in enumerate(tables.leases.tolist()) if line[-1]}
    sessions = {at: line for at, line in enumerate(tables.sessions.tolist()) if line[-1]}
    namespaces = {at: line[:2] for at, line in enumerate(tables.namespaces.tolist()) if line[-1]}
    return frames, leases, sessions, namespaces, tables.epochs


frames_of = st.lists(st.integers(0, FRAMES - 1), min_size=1, max_size=FRAMES, unique=True).map(
    lambda numbers: array("i", numbers)
)
u63 = st.integers(0, 2**63 - 1)
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)
small = st.integers(0, 2)  # so that records are met again


@st.composite
def claims(draw: st.DrawFn) -> w.Claim:
    frames = draw(frames_of)
    keys = b"".join(key(draw(u32)) for _ in frames)
    parent = draw(st.integers(-1 - NAMESPACES, FRAMES - 1))
    return w.Claim(frames, keys, parent, draw(st.binary(min_size=8, max_size=8)), draw(small), draw(u32))


writes: st.SearchStrategy[Any] = st.one_of(
    frames_of.map(w.Free),
    frames_of.map(w.Ready),
    frames_of.map(w.Doom),
    frames_of.map(w.Quarantine),
    claims(),
    st.builds(w.Reparent, st.integers(0, FRAMES - 1), st.integers(-1 - NAMESPACES, FRAMES - 1)),
    st.builds(
        w.LeaseRecord,
        st.integers(0, LEASES - 1),
        small,
        small,
        st.sampled_from([w.LOAD, w.STORE]),
        st.integers(-1, FRAMES - 1),
        u32,
        u63,
        u64,
    ),
    st.builds(w.LeaseEnd, st.integers(0, LEASES - 1)),
    st.builds(
        w.SessionRecord,
        st.integers(0, SESSIONS - 1),
        u64,
        st.sampled_from([w.PLANNER, w.MOVER]),
        st.integers(0, 63),
        st.integers(1, 64),
        st.binary(min_size=8, max_size=8),
        u63,
    ),
    st.builds(w.SessionEnd, st.integers(0, SESSIONS - 1)),
    st.builds(w.SessionNumber, st.integers(0, SESSIONS - 1), u63),
    st.builds(w.EpochRecord, st.integers(0, NAMESPACES - 1), small.map(lambda n: bytes([n]) * 16), u63),
    st.builds(w.NamespaceEnd, st.integers(0, NAMESPACES - 1)),
    st.builds(w.PoolEpoch, u63, u63),
)


@given(st.lists(writes, max_size=30))
def test_the_tables_say_what_a_naive_table_says(sequence: list[Any]) -> None:
    tables, naive = make(), Naive()
    view = TableView(os.dup(tables.read_fd))
    for write in sequence:
        tables.apply([write])
        naive.apply(write)
        expected = (naive.frames, naive.leases, naive.sessions, naive.namespaces, naive.epochs)
        assert contents(tables) == expected
        assert contents(view) == expected
        for side in (tables, view):
            assert side.gens(range(FRAMES)).tolist() == [line["gen"] for line in naive.frames]
    tables.close()


@given(st.lists(writes, max_size=12))
@settings(max_examples=50)
def test_after_each_step_lines_are_old_or_new_and_records_whole_or_absent(sequence: list[Any]) -> None:
    """R15: stop anywhere. A frame that is not FREE, and a record whose mark is set, says what it said before
    the write or what it says after it. (A record that goes on changes word by word.)"""
    tables, naive, before = make(), Naive(), Naive()
    for write in sequence:
        naive.apply(write)
        for _ in tables.steps([write]):
            frames, leases, sessions, namespaces, epochs = contents(tables)
            for at, line in enumerate(frames):
                old, new = before.frames[at], naive.frames[at]
                if line["state"] != w.FREE:
                    assert line in (old, new)
                assert (line["gen"], line["state"]) in {
                    (old["gen"], old["state"]),
                    (new["gen"], new["state"]),
                    (new["gen"], w.FREE),
                }
            for at, record in leases.items():
                choices = [said[at] for said in (before.leases, naive.leases) if at in said]
                assert all(value in {choice[word] for choice in choices} for word, value in enumerate(record))
                assert record[:2] in {choice[:2] for choice in choices}
                assert record[2:4] in {choice[2:4] for choice in choices}  # frame and generation, together
            for at, record in sessions.items():
                assert record in [said[at] for said in (before.sessions, naive.sessions) if at in said]
            for at, record in namespaces.items():
                assert record in [said[at] for said in (before.namespaces, naive.namespaces) if at in said]
            for value, *pair in zip(epochs, before.epochs, naive.epochs, strict=True):
                assert value in pair
        before.apply(write)
    tables.close()


def test_a_claim_is_free_with_the_next_generation_then_whole_then_writing() -> None:
    """R15, begin: each step seen."""
    tables = make()
    tables.apply([w.Claim(array("i", [7, 3]), key(1) + key(2), -1, b"oldtag..", 1, 5)])
    tables.apply([w.Ready(array("i", [7, 3])), w.Free(array("i", [3, 7]))])
    claim = w.Claim(array("i", [7, 3]), key(8) + key(9), -2, b"newtag..", 2, 6)
    seen = []
    for _ in tables.steps([claim, w.LeaseRecord(0, 9, 1, w.STORE, 3, 2, 1, 0)]):
        line, record = tables.frames[3], tables.leases[0]
        seen.append((int(line["word"]) >> 8, int(line["state"]), line["key"].tobytes(), int(record["kind"])))
    assert seen == [
        (2, w.FREE, key(2), 0),  # the next generation first, while all else is the old page's
        (2, w.FREE, key(9), 0),  # then the fields
        (2, w.WRITING, key(9), 0),  # then it counts
        (2, w.WRITING, key(9), 0),  # and only then the lease's record, its mark last
        (2, w.WRITING, key(9), 0),
        (2, w.WRITING, key(9), w.STORE),
    ]
    line = tables.frames[3]
    assert (int(line["parent"]), line["tag"].tobytes()) == (7, key(8)[:8])
    line = tables.frames[7]
    assert (int(line["parent"]), line["tag"].tobytes()) == (-2, b"newtag..")


def test_a_record_that_goes_on_never_stops_counting() -> None:
    """R16: the quiet movers of a lease change while its record counts."""
    tables = make()
    tables.apply([w.LeaseRecord(1, 5, 7, w.STORE, 2, 4, 1, 0)])
    kinds = []
    for _ in tables.steps([w.LeaseRecord(1, 5, 7, w.STORE, -1, 0, 1, 0b101)]):
        kinds.append(int(tables.leases[1]["kind"]))
    assert kinds == [w.STORE] * 3  # deepest, quiet, pages: one store each
    assert tables.leases[1].tolist() == (5, 7, -1, 0, 1, 0b101, 0, w.STORE)


def test_a_record_used_again_is_absent_in_between() -> None:
    tables = make()
    slot = [w.SessionRecord(1, sid, w.MOVER, 0, 1, bytes(8), 0) for sid in (5, 6)]
    namespace = [w.EpochRecord(2, bytes([number]) * 16, 4) for number in (1, 2)]
    tables.apply([slot[0], namespace[0]])
    roles = [
        (line["sid"], line["role"]) for _ in tables.steps(slot[1:]) for line in [tables.sessions[1].copy()]
    ]
    assert roles == [(5, 0), (6, 0), (6, w.MOVER)]
    used = [
        (line["ns"].tobytes()[:1], line["used"])
        for _ in tables.steps(namespace[1:])
        for line in [tables.namespaces[2].copy()]
    ]
    assert used == [(b"\1", 0), (b"\2", 0), (b"\2", 1)]
    tables.apply([w.LeaseRecord(1, 5, 7, w.STORE, 2, 4, 1, 0)])
    again = [w.LeaseRecord(1, 5, 8, w.LOAD, 2, 4, 1, 0)]
    assert [int(tables.leases[1]["kind"]) for _ in tables.steps(again)] == [0, 0, w.LOAD]


def test_generations_wrap_in_24_bits_and_leave_the_state_alone() -> None:
    tables = make()
    tables.frames["word"][4] = (2**24 - 1) << 8
    tables.apply([w.Claim(array("i", [4]), key(1), -1, bytes(8), 0, 0)])
    assert int(tables.frames["word"][4]) == w.WRITING
    assert tables.gens([4]).tolist() == [0]


def test_a_claim_longer_than_the_staging_is_laid_out_in_slabs() -> None:
    count = 10_000
    tables = make(PoolShape((64, 4096), count, count))
    order = np.random.default_rng(3).permutation(count).astype(np.int32)
    keys = b"".join(key(number) for number in range(count))
    tables.apply([w.Claim(array("i", order.tobytes()), keys, -1, b"root....", 3, 4)])
    lines = tables.frames[order]
    assert lines["key"].tobytes() == keys
    assert lines["parent"].tolist() == [-1, *order[:-1].tolist()]
    assert lines["tag"].tobytes() == b"root...." + b"".join(key(number)[:8] for number in range(count - 1))
    assert (lines["word"] == 256 + w.WRITING).all()
    assert (lines["lease"] == 3).all()
    assert (lines["stamp"] == 4).all()


def test_a_frames_line_is_64_bytes_with_an_aligned_word() -> None:
    assert FRAME.itemsize == 64
    tables = make()
    assert tables.frames.ctypes.data % 64 == 0
    offsets = {name: FRAME.fields[name][1] for name in FRAME.names or ()} if FRAME.fields else {}
    assert offsets["word"] == offsets["state"] == 60
    assert sum(FRAME[name].itemsize for name in offsets if name != "state") == 64


def test_a_million_frames_take_64_bytes_each() -> None:
    tables = Tables(PoolShape((64, 4096), 1_000_000, 1_000_000))
    size = os.fstat(tables.fd).st_size
    assert 64_000_000 <= size <= 64_000_000 + 5 * 2**20
    assert os.fstat(tables.fd).st_blocks * 512 >= size  # reserved: no write can end in SIGBUS
    tables.close()


# --- the client's side ------------------------------------------------------------------------------


def test_a_client_sees_header_and_heartbeat() -> None:
    before = open_fds()
    tables = Tables(SHAPE, fingerprint=b"f" * 32, server_gen=9)
    view = TableView(os.dup(tables.read_fd))
    assert (view.shape, view.pool_id, view.fingerprint) == (SHAPE, tables.pool_id, b"f" * 32)
    assert (view.server_gen, view.heartbeat_ns) == (9, 0)
    tables.beat(123)
    assert view.heartbeat_ns == 123
    tables.close()
    tables.close()
    assert open_fds() == before
    assert view.gens(array("i", [1, 2])).tolist() == [0, 0]  # the mapping stays


def test_pool_ids_are_random() -> None:
    assert make().pool_id != make().pool_id


def test_what_clients_get_cannot_be_written() -> None:
    tables = make()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(tables.read_fd, b"x", 0)
    view = TableView(os.dup(tables.read_fd))
    with pytest.raises(ValueError, match="read-only"):
        view.frames["word"][0] = 1


def broken(tables: Tables, at: int, data: bytes) -> int:
    """A copy of the tables with other bytes in it."""
    size = os.fstat(tables.fd).st_size
    fd = sealed_memfd("broken", size)
    os.pwrite(fd, os.pread(tables.fd, size, 0), 0)
    os.pwrite(fd, data, at)
    return fd


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (0, bytes(8)),  # not yet made
        (0, b"elsewise"),
        (80, b"\x63"),  # format
        (84, bytes(4)),  # page tokens
        (88, b"\xff\xff\xff\x7f"),  # frames
        (92, b"\xff\xff\xff\x7f"),  # frames of a chunk
        (96, bytes(4)),  # shards
        (96, b"\xff\xff\xff\xff"),
        (104, b"\xff\xff\xff\xff"),  # leases
        (128, b"\x01"),  # bytes of a shard
    ],
)
def test_tables_that_contradict_themselves_are_refused(at: int, data: bytes) -> None:
    before = open_fds()
    tables = make()
    with pytest.raises(ProtocolError, match="tables"):
        TableView(broken(tables, at, data))
    tables.close()
    assert open_fds() == before


def test_tables_too_short_to_be_some_are_refused() -> None:
    before = open_fds()
    for size in (0, 100, HEADER_BYTES - 1):
        with pytest.raises(ProtocolError, match="expected at least"):
            TableView(sealed_memfd("short", size))
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ProtocolError):
        TableView(read)
    assert open_fds() == before


def test_more_shards_than_the_header_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="shards"):
        make(PoolShape((64, *[4096] * (MAX_SHARDS + 1)), 1, 1))
    assert len(make(PoolShape((64, *[4096] * MAX_SHARDS), 1, 1)).shape.shard_bytes) == MAX_SHARDS
