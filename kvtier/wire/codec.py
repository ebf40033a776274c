"""Messages to bytes and back: one MessagePack array for each, checked field by field.

A request is `[v, op, server_gen, sid, rid, expires, *fields]`; a reply is `[rid, server_gen, status, text,
op, *fields]`, without op and fields where there is nothing to say. Keys, frames, generations are binary.

Always true: what `decode_*` returns has been checked wholly (types, ranges, lengths, limits), and whatever
bytes come in, nothing but `ProtocolError` comes out. Frames and generations that come out are read-only
views of the message's own bytes.

Longer than 300 lines, because the two directions of a message should be read side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier.errors import ProtocolError, Status
from kvtier.keys import KEY_BYTES, NS_BYTES
from kvtier.wire.messages import (
    MAX_KEYS,
    MAX_NUMBER,
    MAX_RANKS,
    MAX_SID,
    NO_FRAMES,
    NO_GENS,
    VERSION,
    Abort,
    BadRequest,
    BeginLoad,
    BeginStore,
    Body,
    Detach,
    DetachReply,
    End,
    Ended,
    EndReply,
    Finish,
    Flush,
    FlushReply,
    Frames,
    Gens,
    Hello,
    HelloReply,
    LoadChain,
    LoadGrant,
    LoadReply,
    Lookup,
    LookupReply,
    Op,
    Quiet,
    Reply,
    ReplyBody,
    Request,
    Stats,
    StatsReply,
    StoreChain,
    StoreGrant,
    StoreReply,
)
from kvtier.wire.packing import MAX_ITEMS, pack, unpack

# --- checks -----------------------------------------------------------------------------------------


def _int(value: Any, what: str, high: int = MAX_NUMBER, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{what}: expected an integer from {low} to {high}")
    return value


def _bool(value: Any, what: str) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"{what}: expected true or false")
    return value


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise ProtocolError(f"{what}: expected text")
    return value


def _bytes(value: Any, what: str) -> bytes:
    if type(value) is not bytes:
        raise ProtocolError(f"{what}: expected binary")
    return value


def _ns(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != NS_BYTES:
        raise ProtocolError(f"ns: expected {NS_BYTES} bytes")
    return value


def _keys(value: Any) -> bytes:
    if type(value) is not bytes or len(value) % KEY_BYTES:
        raise ProtocolError(f"keys: expected binary, a multiple of {KEY_BYTES} bytes")
    if len(value) > MAX_KEYS * KEY_BYTES:
        raise ProtocolError(f"keys: {len(value) // KEY_BYTES} in one message, the limit is {MAX_KEYS}")
    return value


def _list(value: Any, what: str, length: int | None = None) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"{what}: expected an array")
    if length is not None and len(value) != length:
        raise ProtocolError(f"{what}: {len(value)} fields, expected {length}")
    return value


def _entries(value: Any, what: str) -> list[Any]:
    if not 1 <= len(_list(value, what)) <= MAX_ITEMS:
        raise ProtocolError(f"{what}: {len(value)} entries, expected 1 to {MAX_ITEMS}")
    return value  # type: ignore[no-any-return]


def _few_keys(chains: list[LoadChain] | list[StoreChain]) -> None:
    if len(chains) > 1:  # one alone was checked as it was read
        keys = sum(len(chain.keys) for chain in chains) // KEY_BYTES
        if keys > MAX_KEYS:
            raise ProtocolError(f"keys: {keys} in one message, the limit is {MAX_KEYS}")


# Enums are slow to call and slower to iterate, and a dtype is slow to make from its name.
_STATUSES = {int(status): status for status in Status}
_OPS = {int(op): op for op in Op}
_FRAMES, _GENS = np.dtype("<i4"), np.dtype("<u4")


def _status(value: Any) -> Status:
    status = _STATUSES.get(value) if type(value) is int else None
    if status is None:
        raise ProtocolError("status: not one of this protocol's")
    return status


def _frames(value: Any) -> Frames:
    if len(_bytes(value, "frames")) % 4:
        raise ProtocolError("frames: expected a multiple of 4 bytes")
    return np.frombuffer(value, _FRAMES) if value else NO_FRAMES


def _gens(value: Any) -> Gens:
    if len(_bytes(value, "frame_gens")) % 4:
        raise ProtocolError("frame_gens: expected a multiple of 4 bytes")
    return np.frombuffer(value, _GENS) if value else NO_GENS


# --- requests, to and from bytes --------------------------------------------------------------------


_BODY_FIELDS: dict[int, Callable[[Any], list[Any]]] = {
    Op.HELLO: lambda body: [],
    Op.LOOKUP: lambda body: [body.ns, body.keys],
    Op.BEGIN_LOAD: lambda body: [[(c.number, c.ns, c.keys, c.first, c.at_least) for c in body.chains]],
    Op.BEGIN_STORE: lambda body: [[(c.number, c.ns, c.keys, c.epoch) for c in body.chains]],
    Op.FINISH: lambda body: [[(end.number, end.quiet) for end in body.ends]],
    Op.ABORT: lambda body: [[(end.number, end.quiet) for end in body.ends]],
    Op.QUIET: lambda body: [body.planner_sid, body.numbers],
    Op.FLUSH: lambda body: [body.ns],
    Op.STATS: lambda body: [],
    Op.DETACH: lambda body: [body.quiet],
}


def encode_request(request: Request) -> bytes:
    """The request's bytes; ProtocolError when it is beyond the message's limits."""
    body = request.body
    op = body.op
    envelope = [VERSION, op, request.server_gen, request.sid, request.rid, request.expires]
    return pack(envelope + _BODY_FIELDS[op](body))


def _hello(fields: list[Any]) -> Body:
    _list(fields, "hello", 0)
    return Hello()


def _lookup(fields: list[Any]) -> Body:
    ns, keys = _list(fields, "lookup", 2)
    return Lookup(_ns(ns), _keys(keys))


def _begin_load(fields: list[Any]) -> Body:
    chains = []
    for entry in _entries(_list(fields, "begin_load", 1)[0], "begin_load"):
        number, ns, keys, first, at_least = _list(entry, "a load", 5)
        chains.append(
            LoadChain(
                _int(number, "number", low=1),
                _ns(ns),
                _keys(keys),
                _int(first, "first", MAX_KEYS),
                _int(at_least, "at_least", MAX_KEYS, low=1),
            )
        )
    _few_keys(chains)
    return BeginLoad(tuple(chains))


def _begin_store(fields: list[Any]) -> Body:
    chains = []
    for entry in _entries(_list(fields, "begin_store", 1)[0], "begin_store"):
        number, ns, keys, epoch = _list(entry, "a store", 4)
        chains.append(StoreChain(_int(number, "number", low=1), _ns(ns), _keys(keys), _int(epoch, "epoch")))
    _few_keys(chains)
    return BeginStore(tuple(chains))


def _ends(fields: list[Any]) -> tuple[End, ...]:
    ends = []
    for entry in _entries(_list(fields, "an end", 1)[0], "ends"):
        number, quiet = _list(entry, "an end", 2)
        ranks = tuple(_int(rank, "a quiet mover's rank", MAX_RANKS - 1) for rank in _list(quiet, "quiet"))
        if len(ranks) > MAX_RANKS:
            raise ProtocolError(f"quiet: {len(ranks)} movers, the limit is {MAX_RANKS}")
        ends.append(End(_int(number, "number", low=1), ranks))
    return tuple(ends)


def _finish(fields: list[Any]) -> Body:
    return Finish(_ends(fields))


def _abort(fields: list[Any]) -> Body:
    return Abort(_ends(fields))


def _quiet(fields: list[Any]) -> Body:
    planner_sid, numbers = _list(fields, "quiet", 2)
    return Quiet(
        _int(planner_sid, "planner's sid", MAX_SID),
        tuple(_int(number, "number", low=1) for number in _entries(numbers, "numbers")),
    )


def _flush(fields: list[Any]) -> Body:
    (ns,) = _list(fields, "flush", 1)
    return Flush(_ns(ns) if _bytes(ns, "ns") else b"")


def _stats(fields: list[Any]) -> Body:
    _list(fields, "stats", 0)
    return Stats()


def _detach(fields: list[Any]) -> Body:
    (quiet,) = _list(fields, "detach", 1)
    return Detach(_bool(quiet, "quiet"))


_REQUESTS: dict[int, Callable[[list[Any]], Body]] = {
    Op.HELLO: _hello,
    Op.LOOKUP: _lookup,
    Op.BEGIN_LOAD: _begin_load,
    Op.BEGIN_STORE: _begin_store,
    Op.FINISH: _finish,
    Op.ABORT: _abort,
    Op.QUIET: _quiet,
    Op.FLUSH: _flush,
    Op.STATS: _stats,
    Op.DETACH: _detach,
}


def decode_request(data: bytes | memoryview) -> Request:
    """The request in `data`. `BadRequest`, with its rid where that could be read, for anything else."""
    rid = 0
    try:
        values = _list(unpack(data), "request")
        if len(values) < 6:
            raise ProtocolError(f"request of {len(values)} fields: expected 6 or more")
        version, op, server_gen, sid, number, expires = values[:6]
        rid = _int(number, "rid")
        if type(version) is not int or version != VERSION:
            raise ProtocolError(f"protocol version: this server speaks {VERSION}")
        reader = _REQUESTS.get(op) if type(op) is int else None
        if reader is None:
            raise ProtocolError("op: not one of this protocol's")
        _int(server_gen, "server_gen")
        _int(sid, "sid", MAX_SID)
        _int(expires, "expires")
        return Request(rid, server_gen, sid, reader(values[6:]), expires)
    except ProtocolError as error:
        raise BadRequest(rid, str(error)) from None


# --- replies, to and from bytes ---------------------------------------------------------------------


def _load_grants(body: LoadReply) -> list[Any]:
    return [
        [
            (g.number, g.status, g.epoch, g.ready, g.frames.data, g.gens.data, g.reason, g.text)
            for g in body.grants
        ]
    ]


def _store_grants(body: StoreReply) -> list[Any]:
    return [
        [
            (g.number, g.status, g.epoch, g.start, g.taken, g.pending, g.frames.data, g.reason, g.text)
            for g in body.grants
        ]
    ]


def _end_fields(body: EndReply) -> list[Any]:
    return [[(e.number, e.status, e.visible, e.dropped, e.superseded, e.text) for e in body.ended]]


_REPLY_FIELDS: dict[int, Callable[[Any], list[Any]]] = {
    Op.HELLO: lambda body: [body.complete],
    Op.LOOKUP: lambda body: [body.ready, body.pending, body.epoch],
    Op.BEGIN_LOAD: _load_grants,
    Op.BEGIN_STORE: _store_grants,
    Op.FINISH: _end_fields,
    Op.ABORT: _end_fields,
    Op.QUIET: _end_fields,
    Op.FLUSH: lambda body: [body.freed, body.doomed, body.epoch],
    Op.STATS: lambda body: [body.values],
    Op.DETACH: lambda body: [],
}


def encode_reply(reply: Reply) -> bytes:
    """The reply's bytes. Frames and gens must be contiguous."""
    values: list[Any] = [reply.rid, reply.server_gen, reply.status, reply.text]
    body = reply.body
    if body is not None:
        op = body.op
        values.append(op)
        values += _REPLY_FIELDS[op](body)
    return pack(values)


def _hello_reply(op: Op, fields: list[Any]) -> ReplyBody:
    (complete,) = _list(fields, "hello", 1)
    return HelloReply(_bool(complete, "complete"))


def _lookup_reply(op: Op, fields: list[Any]) -> ReplyBody:
    ready, pending, epoch = _list(fields, "lookup", 3)
    return LookupReply(_int(ready, "ready"), _int(pending, "pending"), _int(epoch, "epoch"))


def _load_reply(op: Op, fields: list[Any]) -> ReplyBody:
    grants = []
    for entry in _entries(_list(fields, "begin_load", 1)[0], "begin_load"):
        number, status, epoch, ready, frames, gens, reason, text = _list(entry, "a load's grant", 8)
        grant = LoadGrant(
            _int(number, "number"),
            _status(status),
            _int(epoch, "epoch"),
            _int(ready, "ready"),
            _frames(frames),
            _gens(gens),
            _text(reason, "reason"),
            _text(text, "text"),
        )
        if len(grant.frames) != len(grant.gens):
            raise ProtocolError(f"{len(grant.frames)} frames with {len(grant.gens)} generations")
        grants.append(grant)
    return LoadReply(tuple(grants))


def _store_reply(op: Op, fields: list[Any]) -> ReplyBody:
    grants = []
    for entry in _entries(_list(fields, "begin_store", 1)[0], "begin_store"):
        number, status, epoch, start, taken, pending, frames, reason, text = _list(
            entry, "a store's grant", 9
        )
        grant = StoreGrant(
            _int(number, "number"),
            _status(status),
            _int(epoch, "epoch"),
            _int(start, "start"),
            _int(taken, "taken"),
            _int(pending, "pending"),
            _frames(frames),
            _text(reason, "reason"),
            _text(text, "text"),
        )
        if len(grant.frames) != grant.taken:
            raise ProtocolError(f"{len(grant.frames)} frames with taken = {grant.taken}")
        grants.append(grant)
    return StoreReply(tuple(grants))


def _end_reply(op: Op, fields: list[Any]) -> ReplyBody:
    ended = []
    for entry in _entries(_list(fields, "ends", 1)[0], "ends"):
        number, status, visible, dropped, superseded, text = _list(entry, "an end", 6)
        ended.append(
            Ended(
                _int(number, "number"),
                _status(status),
                _int(visible, "visible"),
                _int(dropped, "dropped"),
                _int(superseded, "superseded"),
                _text(text, "text"),
            )
        )
    return EndReply(op, tuple(ended))


def _flush_reply(op: Op, fields: list[Any]) -> ReplyBody:
    freed, doomed, epoch = _list(fields, "flush", 3)
    return FlushReply(_int(freed, "freed"), _int(doomed, "doomed"), _int(epoch, "epoch"))


def _stats_reply(op: Op, fields: list[Any]) -> ReplyBody:
    (values,) = _list(fields, "stats", 1)
    if type(values) is not dict or not all(
        type(k) is str and type(v) in (int, str) for k, v in values.items()
    ):
        raise ProtocolError("stats: expected a map from names to numbers and texts")
    return StatsReply(values)


def _detach_reply(op: Op, fields: list[Any]) -> ReplyBody:
    _list(fields, "detach", 0)
    return DetachReply()


_REPLIES: dict[int, Callable[[Op, list[Any]], ReplyBody]] = {
    Op.HELLO: _hello_reply,
    Op.LOOKUP: _lookup_reply,
    Op.BEGIN_LOAD: _load_reply,
    Op.BEGIN_STORE: _store_reply,
    Op.FINISH: _end_reply,
    Op.ABORT: _end_reply,
    Op.QUIET: _end_reply,
    Op.FLUSH: _flush_reply,
    Op.STATS: _stats_reply,
    Op.DETACH: _detach_reply,
}


def decode_reply(data: bytes | memoryview) -> Reply:
    """The reply in `data`; ProtocolError for anything else."""
    values = _list(unpack(data), "reply")
    if len(values) < 4:
        raise ProtocolError(f"reply of {len(values)} fields: expected 4 or more")
    rid, server_gen, status, text = values[:4]
    body = None
    if len(values) > 4:
        op = values[4]
        reader = _REPLIES.get(op) if type(op) is int else None
        if reader is None:
            raise ProtocolError("op: not one of this protocol's")
        body = reader(_OPS[op], values[5:])
    return Reply(_int(rid, "rid"), _int(server_gen, "server_gen"), _status(status), _text(text, "text"), body)
