"""Messages survive the trip to bytes and back, and nothing but ProtocolError comes of any other bytes."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ProtocolError, Status
from kvtier.wire import packing
from kvtier.wire.codec import decode_reply, decode_request, encode_reply, encode_request
from kvtier.wire.messages import (
    MAX_KEYS,
    MAX_NUMBER,
    MAX_SID,
    NO_FRAMES,
    NO_GENS,
    Abort,
    BadRequest,
    BeginLoad,
    BeginStore,
    Detach,
    DetachReply,
    End,
    Ended,
    EndReply,
    Finish,
    Flush,
    FlushReply,
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
    Request,
    Stats,
    StatsReply,
    StoreChain,
    StoreGrant,
    StoreReply,
)

NS = b"n" * 16
numbers = st.integers(1, MAX_NUMBER)
counts = st.integers(0, MAX_NUMBER)
ns = st.binary(min_size=16, max_size=16)
keys = st.integers(0, 9).flatmap(lambda n: st.binary(min_size=32 * n, max_size=32 * n))
ranks = st.lists(st.integers(0, 63), max_size=8).map(tuple)
ends = st.lists(st.builds(End, numbers, ranks), min_size=1, max_size=5).map(tuple)
pages = st.integers(0, MAX_KEYS)
bodies = st.one_of(
    st.just(Hello()),
    st.just(Stats()),
    st.builds(Lookup, ns, keys),
    st.builds(
        BeginLoad,
        st.lists(
            st.builds(LoadChain, numbers, ns, keys, pages, st.integers(1, MAX_KEYS)), min_size=1, max_size=5
        ).map(tuple),
    ),
    st.builds(
        BeginStore,
        st.lists(st.builds(StoreChain, numbers, ns, keys, counts), min_size=1, max_size=5).map(tuple),
    ),
    st.builds(Finish, ends),
    st.builds(Abort, ends),
    st.builds(Quiet, st.integers(0, MAX_SID), st.lists(numbers, min_size=1, max_size=5).map(tuple)),
    st.builds(Flush, st.one_of(st.just(b""), ns)),
    st.builds(Detach, st.booleans()),
)
requests = st.builds(Request, counts, counts, st.integers(0, MAX_SID), bodies, counts)


@given(requests)
def test_a_request_survives_the_trip(request_):
    assert decode_request(encode_request(request_)) == request_


@given(counts, st.sampled_from(Status), st.text(max_size=50))
def test_a_reply_without_a_body_survives_the_trip(rid, status, text):
    reply = Reply(rid, 3, status, text)
    assert decode_reply(encode_reply(reply)) == reply


@pytest.mark.parametrize(
    "body",
    [
        HelloReply(True),
        LookupReply(5, 1, 7),
        EndReply(Op.FINISH, (Ended(1, Status.OK, 4, 2, 1, "why"), Ended(2, Status.DONE))),
        EndReply(Op.QUIET, (Ended(9, Status.DONE),)),
        FlushReply(3, 2, 8),
        StatsReply({"frames": 7, "pool_id": "ab"}),
        DetachReply(),
    ],
    ids=lambda body: type(body).__name__,
)
def test_a_reply_survives_the_trip(body):
    reply = Reply(1, 2, Status.OK, "", body)
    assert decode_reply(encode_reply(reply)) == reply


def test_grants_carry_frames_and_generations_as_read_only_arrays():
    frames = np.arange(2048, dtype=np.int32)
    gens = np.arange(2048, dtype=np.uint32) + (1 << 24)
    data = encode_reply(
        Reply(1, 2, Status.OK, "", LoadReply((LoadGrant(7, Status.OK, 3, 2048, frames, gens), _miss(8))))
    )
    body = decode_reply(data).body
    assert isinstance(body, LoadReply)
    first, second = body.grants
    assert (first.number, first.status, first.epoch, first.ready) == (7, Status.OK, 3, 2048)
    np.testing.assert_array_equal(first.frames, frames)
    np.testing.assert_array_equal(first.gens, gens)
    assert first.frames.dtype == np.int32
    assert first.gens.dtype == np.uint32
    assert not first.frames.flags.writeable
    assert (second.status, second.reason, second.text) == (Status.MISS, "absent", "cold")

    grant = StoreGrant(9, Status.OK, 1, 4, 3, 2, frames[:3].copy(), "full", "half of it")
    body = decode_reply(encode_reply(Reply(1, 2, Status.OK, "", StoreReply((grant,))))).body
    assert isinstance(body, StoreReply)
    got = body.grants[0]
    assert (got.start, got.taken, got.pending, got.reason, got.text) == (4, 3, 2, "full", "half of it")
    np.testing.assert_array_equal(got.frames, frames[:3])


def _miss(number: int) -> LoadGrant:
    return LoadGrant(number, Status.MISS, 0, 0, NO_FRAMES, NO_GENS, "absent", "cold")


def _raw(*fields: object, rid: int = 5, version: int = 1, op: int = Op.LOOKUP) -> bytes:
    return msgpack.packb([version, op, 1, 1, rid, 0, *fields])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (_raw(NS), "1 fields, expected 2"),
        (_raw(b"short", b""), "ns: expected 16 bytes"),
        (_raw(NS, b"x" * 33), "multiple of 32"),
        (_raw(NS, "text"), "expected binary"),
        (_raw(NS, b"x" * 32 * (MAX_KEYS + 1)), "the limit is 65536"),
        (_raw(op=99), "op: not one"),
        (_raw(op=True), "op: not one"),
        (_raw(version=2), "speaks 1"),
        (_raw([], op=Op.BEGIN_LOAD), "0 entries, expected 1 to 1024"),
        (_raw([[1, NS, b"", 0]], op=Op.BEGIN_LOAD), "4 fields, expected 5"),
        (_raw([[0, NS, b"", 0, 1]], op=Op.BEGIN_LOAD), "number: expected an integer from 1"),
        (_raw([[2**63, NS, b"", 0]], op=Op.BEGIN_STORE), "number: expected an integer"),
        (_raw([[1, NS, b"", 0, 0]], op=Op.BEGIN_LOAD), "at_least"),
        (_raw([[True, []]], op=Op.FINISH), "number: expected an integer"),
        (_raw([[1, [64]]], op=Op.ABORT), "rank"),
        (_raw([[1, [0] * 65]], op=Op.ABORT), "65 movers"),
        (_raw(2**64 - 1, [], op=Op.QUIET), "entries"),
        (_raw(1, op=Op.DETACH), "true or false"),
        (_raw(op=Op.DETACH), "0 fields, expected 1"),
        (_raw(0, op=Op.HELLO), "1 fields, expected 0"),
        (_raw(b"abc", op=Op.FLUSH), "ns"),
    ],
)
def test_a_wrong_body_is_refused_by_name_and_keeps_its_rid(data, text):
    with pytest.raises(BadRequest, match=text) as caught:
        decode_request(data)
    assert caught.value.rid == 5


def test_more_chains_than_fit_a_message_are_refused():
    chain = [1, NS, b"", 0]
    assert len(decode_request(_raw([chain] * 1024, op=Op.BEGIN_STORE)).body.chains) == 1024
    with pytest.raises(BadRequest):
        decode_request(_raw([chain] * 1025, op=Op.BEGIN_STORE))


def test_keys_are_limited_over_all_chains_together():
    half = b"k" * 32 * (MAX_KEYS // 2)
    assert decode_request(_raw([[1, NS, half, 0], [2, NS, half, 0]], op=Op.BEGIN_STORE)).rid == 5
    with pytest.raises(BadRequest, match="the limit is 65536"):
        decode_request(_raw([[1, NS, half, 0], [2, NS, half + b"k" * 32, 0]], op=Op.BEGIN_STORE))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        b"\x01\x01",  # two values
        msgpack.packb({"op": 1}),
        msgpack.packb([]),
        msgpack.packb([1, 1, 1, 1, -1, 0]),
        msgpack.packb([1, 1, 1, 1, 1.5, 0]),
        msgpack.packb(msgpack.ExtType(1, b"")),
        msgpack.packb(msgpack.Timestamp(1)),
        b"\xdd\xff\xff\xff\xff",  # an array that promises 4 Gi entries
        b"\xc6\xff\xff\xff\xff",  # binary that promises 4 GiB
        b"\x91" * 5000,
        b"\x81\x91\x01\x01",  # a map with an array as key
        b"\xd9\x02\xff\xfe",  # text that is not UTF-8
    ],
)
def test_bytes_that_are_no_request_have_rid_0(data):
    with pytest.raises(BadRequest) as caught:
        decode_request(data)
    assert caught.value.rid == 0
    with pytest.raises(ProtocolError):
        decode_reply(data)


def test_a_message_of_8_mib_is_the_limit_in_both_directions():
    packing.unpack(packing.pack(b"x" * (packing.MAX_MESSAGE_BYTES - 5)))
    with pytest.raises(ProtocolError, match="limit is 8388608"):
        packing.pack(b"x" * (packing.MAX_MESSAGE_BYTES - 4))
    with pytest.raises(ProtocolError, match="limit is 8388608"):
        packing.unpack(b"\xc0" * (packing.MAX_MESSAGE_BYTES + 1))


def test_nesting_is_limited_to_4_levels():
    packing.unpack(packing.pack([[[[1]]]]))
    packing.unpack(packing.pack([{"a": [[1]]}]))
    with pytest.raises(ProtocolError, match="nested"):
        packing.unpack(packing.pack([[[[[1]]]]]))
    with pytest.raises(ProtocolError, match="nested"):
        packing.unpack(packing.pack([{"a": [{"b": []}]}]))


def test_promises_of_huge_arrays_cost_no_memory():
    """Nested array headers that each promise the most entries allowed, in one short message."""
    data = b"\xdd\x00\x00\x04\x00" * 500
    tracemalloc.start()
    try:
        for _ in range(20):
            with pytest.raises(ProtocolError):
                packing.unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_what_cannot_be_packed_is_a_protocol_error():
    for value in (object(), 2**64, {1, 2}, [None, 1j]):
        with pytest.raises(ProtocolError):
            packing.pack(value)


@settings(max_examples=200)
@given(requests, st.randoms(use_true_random=False))
def test_mutated_requests_are_requests_or_protocol_errors(request_, rng):
    data = bytearray(encode_request(request_))
    for _ in range(20):
        mutated = mutate(bytes(data), rng)
        try:
            again = decode_request(mutated)
        except ProtocolError:
            continue
        assert encode_request(again)  # whatever was accepted can be said again
    with contextlib.suppress(ProtocolError):
        decode_reply(bytes(data))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """`data` with a few bytes changed, cut, doubled or moved."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1) if rng.random() < 0.5 else min(rng.randrange(24), len(changed))
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(changed):
                changed[at] = rng.choice((0x00, 0x7F, 0x80, 0x90, 0xC0, 0xC1, 0xC4, 0xDC, 0xDD, 0xDF, 0xFF))
            case 2:
                del changed[at : at + rng.randint(1, 8)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                changed[at:at] = changed[: rng.randint(1, 16)]
    return bytes(changed)
