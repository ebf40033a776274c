"""What is known to break out of rpyc, or to wear it down, tried on the admin socket of a real sidecar.

After each test the operator's methods and an engine are served as before.
"""

from __future__ import annotations

import contextlib
import re
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpyc.core import brine, consts

from kvtier.errors import Status
from kvtier.server.admin import METHODS
from kvtier.server.door import MAX_OPERATORS, MAX_REQUEST_BYTES
from tests.server.operators import Raw, operator, value
from tests.server.sidecar import Pair, Sidecar, until

OFFERED = {
    consts.HANDLE_PING,
    consts.HANDLE_CLOSE,
    consts.HANDLE_GETROOT,
    consts.HANDLE_INSPECT,
    consts.HANDLE_GETATTR,
    consts.HANDLE_CALL,
    consts.HANDLE_CALLATTR,
    consts.HANDLE_DEL,
}
HANDLERS = {name: number for name, number in vars(consts).items() if name.startswith("HANDLE_")}
NAMES = [
    "__class__",
    "__dict__",
    "__init__",
    "__doc__",
    "__getattribute__",
    "__reduce_ex__",
    "__subclasshook__",
    "_control",
    "_inbox",
    "_ask",
    "_connect",
    "_rpyc_getattr",
    "on_connect",
    "on_disconnect",
    "get_service_name",
    "exposed_get_service_name",
    "exposed_exposed_stats",
    "exposed_",
    "getmodule",
    "modules",
    "builtins",
    "eval",
    "execute",
    "namespace",
]
OF_METHODS = ["__self__", "__func__", "__globals__", "__code__", "__call__", "__class__", "__closure__"]


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    with Sidecar(tmp_path_factory.mktemp("a") / "run") as running:
        yield running


@pytest.fixture
def run_dir(sidecar):
    yield sidecar.run_dir
    conn = operator(sidecar.run_dir)
    stats = dict(conn.root.stats())
    conn.close()
    assert stats["internal_errors"] == 0
    with Pair(sidecar) as pair:
        assert pair.planner.lookup(b"n" * 16, b"").status == Status.OK


@pytest.mark.parametrize("name", NAMES)
def test_the_root_has_no_attribute_but_its_methods(run_dir, name):
    with Raw(run_dir) as raw:
        root = raw.root()
        assert raw.ask(consts.HANDLE_GETATTR, root, value(name))[0] == consts.MSG_EXCEPTION
        assert raw.ask(consts.HANDLE_GETATTR, root, value(name.encode()))[0] == consts.MSG_EXCEPTION
        called = raw.ask(consts.HANDLE_CALLATTR, root, value(name), value(()), value(()))
        assert called[0] == consts.MSG_EXCEPTION


@pytest.mark.parametrize("name", OF_METHODS)
def test_a_method_has_no_attribute_at_all(run_dir, name):
    with Raw(run_dir) as raw:
        kind, (_, id_pack) = raw.ask(consts.HANDLE_GETATTR, raw.root(), value("stats"))
        assert kind == consts.MSG_REPLY
        method = (consts.LABEL_LOCAL_REF, id_pack)
        assert raw.ask(consts.HANDLE_GETATTR, method, value(name))[0] == consts.MSG_EXCEPTION
        assert raw.ask(consts.HANDLE_CALL, method, value(()), value(()))[0] == consts.MSG_REPLY


def test_only_methods_are_told_of(run_dir):
    with Raw(run_dir) as raw:
        root = raw.root()
        _, (_, told) = raw.ask(consts.HANDLE_INSPECT, value(root[1]))
        assert [name for name, _ in told] == list(METHODS)


@pytest.mark.parametrize("name", sorted(set(HANDLERS) - {n for n, h in HANDLERS.items() if h in OFFERED}))
def test_what_else_rpyc_can_do_is_not_offered(run_dir, name):
    """Pickling, setting, deleting, comparing, iterating, listing, slicing, leaving a context."""
    with Raw(run_dir) as raw:
        root = raw.root()
        for arguments in ((root,), (root, value("_control")), (root, value("_control"), value("x"))):
            assert raw.ask(HANDLERS[name], *arguments)[0] == consts.MSG_EXCEPTION
        assert raw.ask(HANDLERS[name], root, root, value("__getattribute__"))[0] == consts.MSG_EXCEPTION
        assert raw.ask(99, root)[0] == consts.MSG_EXCEPTION


def test_comparing_does_not_read_attributes(run_dir):
    """CVE-2019-16328: the operator of a comparison named `__getattribute__`."""
    with Raw(run_dir) as raw:
        answer = raw.ask(consts.HANDLE_CMP, raw.root(), value("__class__"), value("__getattribute__"))
        assert answer[0] == consts.MSG_EXCEPTION


@pytest.mark.parametrize("method", METHODS)
def test_an_object_of_the_peers_is_neither_taken_nor_looked_at(run_dir, method):
    """CVE-2024-27758, and all that calls back: the sidecar never asks its peer anything."""
    with Raw(run_dir) as raw:
        root = raw.root()
        theirs = (consts.LABEL_REMOTE_REF, ("numpy.ndarray", 1, 2))
        kind, (_, texts, _, _) = raw.ask(
            consts.HANDLE_CALLATTR, root, value(method), (consts.LABEL_TUPLE, (theirs,)), value(())
        )
        # The very next message is the refusal, not a question about the object.
        assert kind == consts.MSG_EXCEPTION
        assert "plain values" in texts[0]


def test_only_exact_plain_types_are_taken(run_dir):
    conn = operator(run_dir)
    for wrong in ([], {}, object(), 7, None, b"all", ("all",), True, 1.5, slice(1)):
        with pytest.raises(Exception, match=r"expected str|plain values"):
            conn.root.flush(wrong)
    for wrong in (True, "5", None, [5]):
        with pytest.raises(Exception, match=r"expected float|plain values"):
            conn.root.drain(wrong)
    with pytest.raises(TypeError):
        conn.root.flush("all", surprise=1)
    with pytest.raises(TypeError):
        conn.root.stats(1)
    for timeout_s in (float("nan"), float("inf"), -1, 10**9):
        answer = dict(conn.root.drain(timeout_s))
        assert answer["ok"] == 0, answer
    assert dict(conn.root.stats())["draining"] == 0
    conn.close()


def test_objects_that_were_not_given_cannot_be_named(run_dir):
    with Raw(run_dir) as raw:
        name, _, _ = raw.root()[1]
        for id_pack in (("builtins.type", id(type), 0), (name, 0, 0), ("os", 1, 1), "root", 0, None):
            forged = (consts.LABEL_LOCAL_REF, id_pack)
            assert raw.ask(consts.HANDLE_GETATTR, forged, value("stats"))[0] == consts.MSG_EXCEPTION
            assert raw.ask(consts.HANDLE_CALL, forged, value(()), value(()))[0] == consts.MSG_EXCEPTION
            assert raw.ask(consts.HANDLE_INSPECT, value(id_pack))[0] == consts.MSG_EXCEPTION
        assert raw.ask(consts.HANDLE_CALL, value("exit"), value(()), value(()))[0] == consts.MSG_EXCEPTION


def test_forgetting_more_than_there_is_takes_nothing_away(run_dir):
    with Raw(run_dir) as raw:
        root = raw.root()
        for count in (1, 1000, -1000, 0):
            assert raw.ask(consts.HANDLE_DEL, root, value(count))[0] == consts.MSG_REPLY
        assert raw.ask(consts.HANDLE_CALLATTR, root, value("stats"), value(()), value(()))[0] == 2


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (consts.MSG_REPLY, (1, (consts.LABEL_REMOTE_REF, ("os.system", 1, 2)))),
        (consts.MSG_REPLY, (1, (consts.LABEL_VALUE, 1))),
        (consts.MSG_EXCEPTION, (1, (("builtins", "SystemExit"), (1,), (), ""))),
        (consts.MSG_EXCEPTION, (1, (("antigravity", "X"), (), (), ""))),
        (9, (1, 2)),
    ],
)
def test_a_reply_to_nothing_ends_the_connection(run_dir, kind, what):
    with Raw(run_dir) as raw:
        raw.message(kind, *what)
        assert raw.hung_up()


def test_errors_tell_no_traceback(run_dir):
    with Raw(run_dir) as raw:
        _, (_, _, attributes, traceback) = raw.ask(consts.HANDLE_GETATTR, raw.root(), value("x"))
        assert "File" not in traceback
        assert dict(attributes)["_remote_version"] == "<version denied>"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff\x00",  # 4 GiB
        b"\x00\x00\x20\x00\x00" + b"x" * 100,  # one byte too many would be bad, 8 KiB is
        b"\x00\x00\x00\x10\x01" + b"x" * 20,  # compressed: a bomb in any size
        b"\x00\x00\x00\x05\x00\x01\x14\xff\xff\xff\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_too_large_or_no_message_ends_the_connection(run_dir, data):
    with Raw(run_dir) as raw:
        raw.send(data)
        assert raw.hung_up()


def test_the_largest_message_is_taken_and_one_byte_more_is_not(run_dir):
    with Raw(run_dir) as raw:
        spare = MAX_REQUEST_BYTES - len(brine.I1.pack(1) + brine.dump((1, (1, (2, ((1, b"x" * 300),))))))
        echoed = raw.ask(consts.HANDLE_PING, value(b"x" * (300 + spare)))
        assert echoed[0] == consts.MSG_REPLY
        raw.message(consts.MSG_REQUEST, 1, (1, (2, ((1, b"x" * (301 + spare)),))))
        assert raw.hung_up()


def test_nesting_does_not_exhaust_the_stack(run_dir):
    with Raw(run_dir) as raw:
        raw.frame(brine.I1.pack(consts.MSG_REQUEST) + brine.TAG_TUP1 * (MAX_REQUEST_BYTES - 2) + b"\x50")
        assert raw.hung_up()


@settings(max_examples=60)
@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_disturb_the_others(sidecar, data, framed):
    with Raw(sidecar.run_dir) as raw, contextlib.suppress(ConnectionError):
        raw.frame(brine.I1.pack(consts.MSG_REQUEST) + data) if framed else raw.send(data)
    conn = operator(sidecar.run_dir)
    assert dict(conn.root.stats())["internal_errors"] == 0
    conn.close()


def test_half_messages_and_many_idle_connections_keep_nobody_out(run_dir):
    """The one that has been silent for longest makes room; nobody waits for another's other half."""
    idle = [Raw(run_dir) for _ in range(3 * MAX_OPERATORS)]
    try:
        for raw in idle[-MAX_OPERATORS:]:
            raw.send(b"\x00\x00")
        conn = operator(run_dir)
        assert dict(conn.root.stats())["internal_errors"] == 0
        conn.close()
        assert idle[0].hung_up()
    finally:
        for raw in idle:
            raw.close()


def test_a_peer_that_does_not_read_is_hung_up_and_others_are_served(run_dir):
    with Raw(run_dir) as raw:
        root = raw.root()
        request = brine.I1.pack(consts.MSG_REQUEST) + brine.dump(
            (1, (consts.HANDLE_CALLATTR, (consts.LABEL_TUPLE, (root, value("stats"), value(()), value(())))))
        )
        with pytest.raises(ConnectionError):
            for _ in range(1_000_000):
                raw.frame(request)
        conn = operator(run_dir)
        assert dict(conn.root.stats())["internal_errors"] == 0
        conn.close()


def test_an_engine_is_served_while_operators_flood(sidecar, run_dir):
    over = threading.Event()

    def flood() -> None:
        with Raw(run_dir) as raw, contextlib.suppress(OSError):
            root = raw.root()
            while not over.is_set():
                raw.ask(consts.HANDLE_CALLATTR, root, value("sessions"), value(()), value(()))

    def noise() -> None:
        while not over.is_set():
            with Raw(run_dir) as raw, contextlib.suppress(OSError):
                raw.send(b"\x00\x00\x00\x40\x00" + b"\x13" * 65)
                raw.hung_up()

    threads = [threading.Thread(target=target) for target in (flood, flood, noise)]
    with Pair(sidecar) as pair:
        for thread in threads:
            thread.start()
        try:
            for _ in range(300):
                assert pair.planner.lookup(b"n" * 16, bytes(32 * 64)).status == Status.OK
        finally:
            over.set()
            for thread in threads:
                thread.join(30)


def private_bytes(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * sum(int(kib) for kib in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE))


def test_operators_that_come_and_go_leave_nothing(sidecar, run_dir):
    """No growth, no descriptor; the exceptions' names, which rpyc would keep for ever, too."""

    def come_and_go(times: int) -> None:
        for at in range(times):
            with Raw(run_dir) as raw:
                raw.ask(consts.HANDLE_GETATTR, raw.root(), value(f"x{at}"))
            with Raw(run_dir) as raw:
                raw.message(consts.MSG_EXCEPTION, 1, (("m", f"E{at}"), (), (), ""))
                assert raw.hung_up()

    come_and_go(50)
    before, descriptors = private_bytes(sidecar.process.pid), count_fds(sidecar.process.pid)
    come_and_go(200)
    until(lambda: count_fds(sidecar.process.pid) <= descriptors, "descriptors were left behind")
    assert private_bytes(sidecar.process.pid) < before + (1 << 20)


def count_fds(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def test_the_socket_is_closed_to_others(run_dir):
    assert (run_dir / "admin.sock").stat().st_mode & 0o777 == 0o600
    assert (run_dir / "admin.sock").is_socket()
