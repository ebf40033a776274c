"""The loop from inside: errors that nobody foresaw, nonsense as answers, geometry, growth of the pool."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.client import CacheClient, read_stats
from kvtier.core.checks import BrokenInvariantError
from kvtier.errors import PreflightError, Status
from kvtier.layout import KVLayout, Plane
from kvtier.server import admission
from kvtier.server.server import Server
from kvtier.shm.attach import AttachRequest, Refusal, connect
from kvtier.wire.messages import Lookup, StoreChain
from tests.client.test_client import ALL, chain, epoch_of, load, store
from tests.server.sidecar import Pair, layout, until

SEQPACKET = (socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextmanager
def served(run_dir: Path, pool_bytes: int = 16 << 20, **options) -> Iterator[SimpleNamespace]:
    """A server in a thread of this process, so that a test can reach into it; looks like a Sidecar."""
    server = Server(run_dir, pool_bytes, **options)
    raised: list[Exception] = []

    def run() -> None:
        try:
            server.run()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def client(**settings) -> CacheClient:
        made = CacheClient(run_dir, **{"layout": layout(), "group": "g", "timeout_s": 10.0, **settings})
        made.raise_if_refused()
        assert made.attached
        return made

    try:
        yield SimpleNamespace(server=server, client=client, run_dir=run_dir, raised=raised, thread=thread)
    finally:
        server.stop()
        thread.join(30)
        server.close()


def test_an_error_that_nobody_foresaw_is_answered_and_the_loop_lives(tmp_path, monkeypatch, caplog):
    """P3: a handler's exception gets its reply."""
    with served(tmp_path / "run") as here, Pair(here) as pair:
        cache = here.server._state.pool.cache
        monkeypatch.setattr(cache, "lookup", lambda ns, keys: 1 / 0)
        reply = pair.planner.lookup(b"n" * 16, b"")
        assert reply.status == Status.BAD
        assert "internal error" in reply.text
        monkeypatch.undo()
        assert pair.planner.lookup(b"n" * 16, b"").status == Status.OK
        assert read_stats(here.run_dir, 10).body.values["internal_errors"] == 1
        assert "ZeroDivisionError" in caplog.text
        assert not here.raised


def test_a_broken_core_stops_the_server_loudly(tmp_path, monkeypatch):
    """Serving on could hand out another prompt's KV."""
    with served(tmp_path / "run") as here, Pair(here, timeout_s=0.2) as pair:
        cache = here.server._state.pool.cache

        def broken(*_: object) -> None:
            raise BrokenInvariantError("a frame is in two places")

        monkeypatch.setattr(cache, "check", broken)
        monkeypatch.setattr(cache, "lookup", lambda ns, keys: 1 / 0)
        assert pair.planner.lookup(b"n" * 16, b"").status == Status.AWAY
        here.thread.join(30)
        assert [type(error) for error in here.raised] == [BrokenInvariantError]


def test_a_server_that_answers_nonsense_is_let_go_without_an_exception(tmp_path, monkeypatch):
    with served(tmp_path / "run") as here, Pair(here, timeout_s=1.0) as pair:
        planner, number = pair.planner, pair.planner.attachment_no

        def nonsense(routing: bytes, data: memoryview, parts: int) -> None:
            here.server._router.send_multipart((routing, b"\xc1nonsense"))

        monkeypatch.setattr(here.server, "_answer", nonsense)
        rid = planner.post(Lookup(b"n" * 16, b""), 10.0)
        started = time.monotonic()
        assert planner.lookup(b"n" * 16, b"").status == Status.AWAY
        assert time.monotonic() - started < 5
        assert [(reply.rid, reply.status) for reply in planner.poll()] == [(rid, Status.AWAY)]
        assert planner.attachment_no == number
        monkeypatch.undo()


def test_another_geometry_formats_the_pool_again_when_nobody_is_attached(tmp_path):
    """R30, counted; the new pool has another id, and nothing of the old one."""
    with served(tmp_path / "run") as here:
        keys = chain(2)
        with Pair(here) as pair:
            store(pair.planner, keys, epoch_of(pair.planner, keys))
            old = pair.planner.pool_id
        with Pair(here) as pair:
            assert load(pair.planner, keys).status == Status.OK  # the pool outlives an engine
            assert pair.planner.pool_id == old
        with Pair(here, layout=layout(page_tokens=32)) as pair:
            assert pair.planner.pool_id != old
            assert load(pair.planner, keys).status == Status.MISS
        assert read_stats(here.run_dir, 10).body.values["formats"] == 2


def test_a_pool_that_is_emptied_for_another_layout_is_a_warning(tmp_path, caplog):
    with served(tmp_path / "run") as here:
        keys = chain(3)
        with Pair(here) as pair:
            store(pair.planner, keys, epoch_of(pair.planner, keys))
        assert "emptied" not in caplog.text
        with Pair(here, group="other", layout=layout(page_tokens=32)):
            (said,) = [one for one in caplog.records if "emptied" in one.message]
        assert said.levelno == logging.WARNING
        assert "group other" in said.message
        assert "3 cached pages are lost" in said.message


def test_a_refusal_is_a_warning_once_for_each_group_and_reason_but_always_counted(
    tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(admission, "KNOWN_REFUSALS", 2)
    caplog.set_level(logging.DEBUG)
    with served(tmp_path / "run") as here, Pair(here):
        huge = layout(page_tokens=32).geometry
        for group in ("a", "a", "b", "a", "b", "c", "a", "b"):  # with "c" there is one too many to remember
            request = AttachRequest(group, "planner", 0, 1, huge, bytes(32))
            assert isinstance(connect(here.run_dir, request, timeout_s=10), Refusal)
        said = [one for one in caplog.records if one.message.startswith("refused")]
        warned = [one.message.split(":")[0] for one in said if one.levelno == logging.WARNING]
        assert [text[-1] for text in warned] == ["a", "b", "c", "a", "b"]
        assert {one.levelno for one in said} == {logging.WARNING, logging.DEBUG}
        assert read_stats(here.run_dir, 10).body.values["refused_attaches"] == len(said) == 8


def test_a_geometry_that_does_not_fit_leaves_the_old_pool_as_it_is(tmp_path):
    with served(tmp_path / "run") as here:
        keys = chain(2)
        with Pair(here) as pair:
            store(pair.planner, keys, epoch_of(pair.planner, keys))
        huge = KVLayout(64, ((Plane("kv", 1 << 20),),), "huge")
        with CacheClient(here.run_dir, layout=huge, group="huge") as client:
            assert "holds no page" in str(client.refused)
        odd = [(), (64,), (0, 4096), (64, 0), (64, 4095), (1 << 32, 4096), (1 << 62, 4096), (64, 1 << 62)]
        for geometry in odd:
            request = AttachRequest("odd", "planner", 0, 1, geometry, bytes(32))
            refused = connect(here.run_dir, request, timeout_s=10)
            assert isinstance(refused, Refusal)
            assert "cannot make a pool" in refused.text
        assert read_stats(here.run_dir, 10).body.values["internal_errors"] == 0
        with Pair(here) as pair:
            assert load(pair.planner, keys).status == Status.OK


def test_frames_are_given_only_as_far_as_they_are_mapped(tmp_path):
    """R28: a mover that has mapped nothing yet gets its group no frame."""
    with served(tmp_path / "run", 64 << 20) as here:
        mover = here.client(role="mover")
        planner = here.client()
        try:
            cache = here.server._state.pool.cache
            until(lambda: planner.poll() == [] and planner.complete, "the group is not whole")
            until(lambda: cache.limit == 1024, "the pool was not reserved")
            # The mover does not poll, so it maps no more chunks than its attach has brought.
            mark = mover.pool.frames
            assert mark < 1024
            keys = chain(1024)
            (grant,) = planner.begin_store(
                [StoreChain(planner.next_number(), keys.namespace, keys.keys, epoch_of(planner, keys))]
            )
            assert all(frame < max(mark, 1) for frame in grant.frames)
            until(lambda: mover.poll() == [] and mover.pool.frames == 1024, "the mover never mapped the rest")
            until(lambda: planner.poll() == [] and planner.pool.frames == 1024, "the planner never mapped it")
            more = chain(256, seed=1)
            (grant,) = planner.begin_store(
                [StoreChain(planner.next_number(), more.namespace, more.keys, epoch_of(planner, more))]
            )
            assert grant.taken == 256
        finally:
            planner.close()
            mover.close()


def test_patience_is_the_servers_setting(tmp_path):
    """R8: a store takes over what another has held WRITING for too long, and the old lease hears of it."""
    with (
        served(tmp_path / "run", patience_s=0.0) as here,
        Pair(here, group="a") as slow,
        Pair(here, group="b") as fast,
    ):
        keys = chain(2)
        epoch = epoch_of(slow.planner, keys)
        number = slow.planner.next_number()
        slow.planner.begin_store([StoreChain(number, keys.namespace, keys.keys, epoch)])
        store(fast.planner, keys, epoch)
        from kvtier.wire.messages import End

        (ended,) = slow.planner.finish([End(number, ALL)])
        assert (ended.visible, ended.superseded) == (0, 2)


def test_the_heartbeat_is_written(tmp_path):
    with served(tmp_path / "run") as here, Pair(here) as pair:
        tables = pair.planner._attachment().tables
        before = tables.heartbeat_ns
        until(lambda: tables.heartbeat_ns > before, "the heart stands still")


def test_a_flush_of_many_pages_is_freed_in_slices(tmp_path):
    """R18; the frames come back all the same."""
    with served(tmp_path / "run", 64 << 20) as here, Pair(here) as pair:
        for seed in range(8):
            keys = chain(100, seed=seed)
            store(pair.planner, keys, epoch_of(pair.planner, keys))
        assert pair.planner.flush().body.freed == 800
        until(
            lambda: read_stats(here.run_dir, 10).body.values["frames_free"] == 1024,
            "the frames did not come back",
        )


def test_a_connection_without_a_session_is_closed_after_a_while(tmp_path, monkeypatch):
    """Nobody keeps a place on the attach socket by saying nothing; a session's connection stays."""
    monkeypatch.setattr("kvtier.server.server.STRANGER_S", 0.0)
    with served(tmp_path / "run") as here, Pair(here) as pair, socket.socket(*SEQPACKET) as silent:
        silent.settimeout(20)
        silent.connect(str(tmp_path / "run" / "attach.sock"))
        assert silent.recv(1024)  # the greeting
        assert silent.recv(1024) == b""
        assert pair.planner.poll() == []
        assert pair.planner.attached


def test_stats_are_plain_numbers_and_texts(tmp_path):
    with served(tmp_path / "run") as here, Pair(here) as pair:
        values = pair.planner.stats().body.values
        assert values["frames"] == values["frames_free"] == 256
        assert values["frames_usable"] == 256
        assert all(isinstance(value, (int, str)) for value in values.values())
        assert bytes.fromhex(values["pool_id"]) == pair.planner.pool_id
        assert not any(isinstance(value, np.generic) for value in values.values())


def test_a_server_that_could_not_start_leaves_nothing(tmp_path, monkeypatch):
    def fail(self: Server, context: object) -> None:
        raise OSError("no socket today")

    monkeypatch.setattr(Server, "_bind", fail)
    with pytest.raises(PreflightError, match=r"cannot start in .*: no socket today; .*--run-dir"):
        Server(tmp_path / "run", 16 << 20)
    assert not (tmp_path / "run").exists()
