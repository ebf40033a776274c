"""An operator's control over rpyc: which methods there are, and nothing else.

The only module of the sidecar that imports rpyc. rpyc by itself hands out references to objects and lets the
peer look at them, call back, and follow attributes; here it is cut down to calls of the methods named in
`METHODS`, with plain values in both directions. Always true: no object of the peer's comes in, none of ours
goes out but the root and its methods, the peer is never asked anything, nothing is pickled, and every
reply is made from values.

    conn = rpyc.utils.factory.unix_connect("/run/user/1000/kvtier/admin.sock")
    dict(conn.root.stats())

rpyc sends dicts and lists by reference, so answers are tuples: a dict as its pairs, a list as its items.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rpyc.core import brine, consts
from rpyc.core.protocol import Connection
from rpyc.core.service import Service

from kvtier.server.control import Answer, Control
from kvtier.server.framing import Framed
from kvtier.server.inbox import Inbox

ASK_S = 5.0
"""How long the loop may take to answer."""
METHODS = ("stats", "sessions", "namespaces", "flush", "drain", "undrain", "progress", "force_out")

CONFIG = {
    "allow_safe_attrs": False,
    "allow_exposed_attrs": False,
    "allow_public_attrs": False,
    "allow_all_attrs": False,
    "safe_attrs": set(),
    "allow_getattr": False,
    "allow_setattr": False,
    "allow_delattr": False,
    "allow_pickle": False,
    "include_local_traceback": False,
    "include_local_version": False,
    "instantiate_custom_exceptions": False,
    "import_custom_exceptions": False,
    "instantiate_oldstyle_exceptions": False,
    "bind_threads": False,
    "sync_request_timeout": 0.0,
    "logger": None,
}
"""All of rpyc's own doors are shut; the one way in is `AdminConnection._get`."""

_HOOKS = ("_request_handlers", "_dispatch", "_box", "_unbox", "_cleanup", "_handle_ping", "_handle_close")
_MISSING = [name for name in _HOOKS if not hasattr(Connection, name)]
if _MISSING:  # better no control than an open one
    raise ImportError(f"this rpyc has no {', '.join(_MISSING)}: kvtier cannot restrict it; use rpyc 6.0")

Plain = str | int | tuple["Plain", ...]

_T = TypeVar("_T")


class Admin(Service):  # type: ignore[misc]  # rpyc has no types
    """What can be called. Each is carried out by the loop, or raises and has changed nothing."""

    __slots__ = ("_control", "_inbox")

    def __init__(self, inbox: Inbox, control: Control) -> None:
        self._inbox = inbox
        self._control = control

    def exposed_stats(self) -> Plain:
        """The sidecar's numbers, as pairs."""
        return _plain(self._ask(self._control.stats))

    def exposed_sessions(self) -> Plain:
        """Who is attached, and what each holds: pairs for each session."""
        return _plain(self._ask(self._control.sessions))

    def exposed_namespaces(self) -> Plain:
        """Which namespaces there are: pairs for each."""
        return _plain(self._ask(self._control.namespaces))

    def exposed_flush(self, namespace: str) -> Plain:
        """Forget the pages of a namespace (32 hex digits), or of "all"."""
        name = _exactly(str, namespace)
        return _plain(self._ask(lambda now: self._control.flush(name, now)))

    def exposed_drain(self, timeout_s: float) -> Plain:
        """No new leases from now on; the sidecar ends when none runs, or after `timeout_s`."""
        seconds = float(timeout_s if type(timeout_s) is int else _exactly(float, timeout_s))
        return _plain(self._ask(lambda now: self._control.drain(seconds, now)))

    def exposed_undrain(self) -> Plain:
        """Take `drain` back."""
        return _plain(self._ask(self._control.undrain))

    def exposed_progress(self) -> Plain:
        """How far a drain is."""
        return _plain(self._ask(self._control.progress))

    def exposed_force_out(self, session: str, yes: bool) -> Plain:
        """End a doubted session whose death cannot be proven. Without `yes`: what that would mean."""
        sid, sure = _exactly(str, session), _exactly(bool, yes)
        return _plain(self._ask(lambda now: self._control.force_out(sid, sure, now)))

    def _ask(self, action: Callable[[float], _T]) -> _T:
        return self._inbox.ask(action, ASK_S)


class AdminConnection(Connection):  # type: ignore[misc]
    """One operator's connection, as the admin thread serves it: `serve(0)` when a whole message is there."""

    def __init__(self, channel: Framed, inbox: Inbox, control: Control) -> None:
        root = Admin(inbox, control)
        # Made once, so that what a peer refers to by its id is these objects and no others.
        self._methods: dict[str, Callable[..., Plain]] = {
            name: getattr(root, f"exposed_{name}") for name in METHODS
        }
        self._shown = (root, *self._methods.values())
        super().__init__(root, channel, CONFIG)

    def close(self) -> None:
        """Hang up. rpyc's own would ask the peer first, and wait."""
        if not self._closed:
            self._cleanup()

    _closed = True  # until rpyc's own __init__ says otherwise

    @classmethod
    def _request_handlers(cls) -> dict[int, Callable[..., Any]]:
        """Of rpyc's twenty requests these; all others are answered with an error."""
        return {
            consts.HANDLE_PING: cls._handle_ping,
            consts.HANDLE_CLOSE: cls._handle_close,
            consts.HANDLE_GETROOT: cls._handle_getroot,
            consts.HANDLE_INSPECT: cls._describe,
            consts.HANDLE_GETATTR: cls._get,
            consts.HANDLE_CALL: cls._call,
            consts.HANDLE_CALLATTR: cls._call_by_name,
            consts.HANDLE_DEL: cls._forget,
        }

    def _get(self, obj: object, name: object) -> Callable[..., Plain]:
        """A method of the root, by its name. The only attribute access that there is."""
        if obj is self._shown[0] and type(name) is str:
            method: Callable[..., Plain] | None = self._methods.get(name.removeprefix("exposed_"))
            if method is not None:
                return method
        raise AttributeError(f"there is no {name!r:.100}: there are the methods {', '.join(METHODS)}")

    def _call(self, obj: object, args: object, kwargs: object = ()) -> Plain:
        method = next((one for one in self._methods.values() if one is obj), None)
        if method is None or type(args) is not tuple or type(kwargs) is not tuple:
            raise TypeError("only the methods of the root can be called")
        return method(*args, **dict(kwargs))

    def _call_by_name(self, obj: object, name: object, args: object, kwargs: object = ()) -> Plain:
        return self._call(self._get(obj, name), args, kwargs)

    def _forget(self, obj: object, count: object = 1) -> None:
        """The peer no longer refers to `obj`. It stays: it is made once, and dies with the connection."""

    def _describe(self, id_pack: object) -> tuple[tuple[str, str], ...]:
        """What rpyc's client wants to know of an object before it uses it."""
        obj = self._local_objects[id_pack]
        if obj is self._shown[0]:
            return tuple((name, method.__doc__ or "") for name, method in self._methods.items())
        return (("__call__", obj.__doc__ or ""),)

    def _dispatch(self, data: bytes) -> None:
        if data[:1] != brine.I1.pack(consts.MSG_REQUEST):
            raise ValueError("a reply to nothing: the sidecar asks its peer nothing")
        super()._dispatch(data)

    def _unbox(self, package: tuple[int, Any]) -> Any:
        if package[0] not in (consts.LABEL_VALUE, consts.LABEL_TUPLE, consts.LABEL_LOCAL_REF):
            raise TypeError("only plain values are taken: str, int, float, bool, None, tuple")
        return super()._unbox(package)

    def _box(self, obj: Any) -> tuple[int, Any]:
        if not brine.dumpable(obj) and not any(obj is one for one in self._shown):
            raise TypeError("only plain values are given out")
        label, value = super()._box(obj)
        return label, value


def _exactly(kind: type[_T], value: object) -> _T:
    """`value`, if its type is `kind` and nothing derived from it."""
    if type(value) is not kind:
        raise TypeError(f"{value!r:.100}: expected {kind.__name__}")
    return value


def _plain(answer: Answer | list[Answer] | dict[str, int | str]) -> Plain:
    """A dict as its pairs, a list as its items."""
    if isinstance(answer, list):
        return tuple(_plain(one) for one in answer)
    return tuple(answer.items())
