"""Page keys are what R3a says, to the byte; the same however the tokens come."""

from __future__ import annotations

import array
import hashlib
import itertools
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import UsageError
from kvtier.keys import KEY_BYTES, Namespace, PageChain

FULL = Namespace(
    model="smol", revision="r1", format="llama f32", layout=b"\x01" * 32, adapter="lora-7", salt=b"tenant"
)


def spelled_out(namespace: Namespace, page_tokens: int, tokens: list[int], media=()) -> bytes:
    """R3a written as the protocol has it, one page at a time, with nothing clever."""
    fields = [
        (1, namespace.model.encode()),
        (2, namespace.revision.encode()),
        (3, namespace.format.encode()),
        (4, namespace.layout),
        (5, namespace.adapter.encode()),
        (6, namespace.salt),
    ]
    root = b"kvtier/1"
    for tag, value in fields:
        if value:
            root += bytes([tag]) + struct.pack("<I", len(value)) + value
    key, out = hashlib.sha256(root).digest(), b""
    for start in range(0, len(tokens) // page_tokens * page_tokens, page_tokens):
        body = key + struct.pack(f"<{page_tokens}i", *tokens[start : start + page_tokens])
        for position, digest in media:
            if start <= position < start + page_tokens:
                body += struct.pack("<I", position - start) + digest
        key = hashlib.sha256(body).digest()
        out += key
    return out


def test_golden_vectors_of_the_root() -> None:
    assert Namespace("smol").root.hex() == hashlib.sha256(b"kvtier/1\x01\x04\x00\x00\x00smol").hexdigest()
    assert Namespace("smol").root.hex() == GOLDEN["root"]
    assert FULL.root.hex() == GOLDEN["full root"]
    assert FULL.digest == FULL.root[:16]


def test_golden_vectors_of_pages() -> None:
    chain = PageChain(FULL, 4)
    chain.extend([1, 2, 3, 4, 5, 6, 7, -8, 9])
    assert chain.keys.hex() == GOLDEN["pages"]
    assert chain.tokens == 9
    assert chain.pages == 2
    with_media = PageChain(FULL, 4)
    with_media.extend([1, 2, 3, 4, 5, 6, 7, -8, 9], media=[(5, b"\x07" * 32)])
    assert with_media.keys.hex() == GOLDEN["media"]
    assert with_media.keys[:KEY_BYTES] == chain.keys[:KEY_BYTES], "what stands before an image stays shared"


def test_golden_vectors_of_an_engines_own_hashes() -> None:
    chain = PageChain.of_hashes(FULL, 32, b"\x01" * 32 + b"\x02" * 32)
    assert chain.keys == b"".join(hashlib.sha256(FULL.root + h * 32).digest() for h in (b"\x01", b"\x02"))
    assert chain.keys.hex() == GOLDEN["hashes"]
    assert chain.tokens == 64
    with pytest.raises(UsageError, match="of_hashes"):
        chain.extend([1])
    with pytest.raises(UsageError, match="multiple"):
        PageChain.of_hashes(FULL, 32, b"\x01" * 31)


@given(
    tokens=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=5),
    page_tokens=st.integers(1, 9),
    kind=st.sampled_from(["list", "array", "int32", "int64", "strided", "tuple"]),
    places=st.lists(st.integers(0, 59), max_size=4),
)
def test_keys_equal_the_rule_however_tokens_arrive(tokens, cuts, page_tokens, kind, places) -> None:
    media = [(place, bytes([place]) * 32) for place in sorted(places) if place < len(tokens)]
    chain = PageChain(FULL, page_tokens)
    edges = sorted({0, len(tokens), *(cut for cut in cuts if cut <= len(tokens))})
    for start, end in itertools.pairwise(edges):
        part = tokens[start:end]
        given_as = {
            "list": lambda part=part: part,
            "tuple": lambda part=part: tuple(part),
            "array": lambda part=part: array.array("i", part),
            "int32": lambda part=part: np.array(part, dtype=np.int32),
            "int64": lambda part=part: np.array(part, dtype=np.int64),
            "strided": lambda part=part: np.repeat(np.array(part, dtype=np.int32), 2)[::2],
        }[kind]()
        chain.extend(given_as, media=[item for item in media if start <= item[0] < end])
    assert chain.keys == spelled_out(FULL, page_tokens, tokens, media)
    assert chain.tokens == len(tokens)
    assert chain.pages == len(tokens) // page_tokens


@pytest.mark.parametrize(
    "other",
    [
        Namespace("smol2", "r1", "llama f32", b"\x01" * 32, "lora-7", b"tenant"),
        Namespace("smol", "r2", "llama f32", b"\x01" * 32, "lora-7", b"tenant"),
        Namespace("smol", "r1", "llama bf16", b"\x01" * 32, "lora-7", b"tenant"),
        Namespace("smol", "r1", "llama f32", b"\x02" * 32, "lora-7", b"tenant"),
        Namespace("smol", "r1", "llama f32", b"\x01" * 32, "", b"tenant"),
        Namespace("smol", "r1", "llama f32", b"\x01" * 32, "lora-7", b"other"),
        Namespace("smol", "r1llama f32", "", b"\x01" * 32, "lora-7", b"tenant"),
    ],
)
def test_p6_any_other_field_gives_other_keys(other: Namespace) -> None:
    ours, theirs = PageChain(FULL, 4), PageChain(other, 4)
    ours.extend([1, 2, 3, 4])
    theirs.extend([1, 2, 3, 4])
    assert ours.keys != theirs.keys
    assert ours.namespace != theirs.namespace


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2**31], "int32"),
        ([1.5], "integers"),
        (["a"], "integers"),
        (np.zeros((2, 2), np.int32), "dimensions"),
    ],
)
def test_wrong_tokens_are_refused_and_change_nothing(tokens, message) -> None:
    chain = PageChain(FULL, 2)
    chain.extend([1, 2, 3])
    with pytest.raises(UsageError, match=message):
        chain.extend(tokens)
    chain.extend([4])
    assert chain.keys == spelled_out(FULL, 2, [1, 2, 3, 4])


def test_floats_in_numpy_are_refused() -> None:
    with pytest.raises(UsageError, match="integers"):
        PageChain(FULL, 2).extend(np.array([1.0, 2.0], dtype=np.float32))


def test_media_in_a_page_that_is_hashed_already_is_refused() -> None:
    chain = PageChain(FULL, 4)
    chain.extend([1, 2, 3, 4, 5])
    for media, message in [([(3, b"\0" * 32)], "position 3"), ([(5, b"\0" * 31)], "31 bytes")]:
        with pytest.raises(UsageError, match=message):
            chain.extend([6], media=media)
    with pytest.raises(UsageError, match="in order"):
        chain.extend([6], media=[(7, b"\0" * 32), (6, b"\0" * 32)])
    assert chain.tokens == 5, "a refused call appended nothing"


def test_media_announced_before_their_tokens_count_in_their_page() -> None:
    chain = PageChain(FULL, 2)
    chain.extend([1], media=[(3, b"\5" * 32)])
    chain.extend([2, 3])
    chain.extend([4])
    assert chain.keys == spelled_out(FULL, 2, [1, 2, 3, 4], [(3, b"\5" * 32)])


def test_an_int32_array_is_hashed_where_it_lies() -> None:
    """No copy: the hashed memory is the caller's own."""
    from kvtier.keys import _int32_bytes

    tokens = np.arange(8, dtype=np.int32)
    view = np.frombuffer(_int32_bytes(tokens), dtype=np.int32)
    assert np.shares_memory(view, tokens)
    packed = array.array("i", [1, 2])
    view = _int32_bytes(packed)
    packed[0] = 9
    assert bytes(view[:4]) == struct.pack("<i", 9)


def test_an_unusable_page_size_is_refused() -> None:
    with pytest.raises(UsageError, match="page_tokens=0"):
        PageChain(FULL, 0)


GOLDEN = {
    "root": "3f32cd0172a4f5cdbd2a007704e0c3e51e07b0b92ee773d34e3b3f6c5da2b420",
    "full root": "78e38835a807dc96337fb5808042c43ebf05e42f37731a3c728d89151513ca20",
    "pages": (
        "db48bbe4df20b40bb90b216ddf9212d82a9d54098101f81ff2f837ea5da59d8f"
        "12f26ac02934230719795bae9ab47cff4ce8f35fb09224e1020ee04b1a4f14a5"
    ),
    "media": (
        "db48bbe4df20b40bb90b216ddf9212d82a9d54098101f81ff2f837ea5da59d8f"
        "e6230e7d1f420dd82a17b616127b140eaf107a0c8aab6a5142e83b9e16f25996"
    ),
    "hashes": (
        "517eca75a5be74273385ca7865d17628d88620735bd8bc55546b65f4854733e2"
        "177f3c7aa8c19e4505883f20dbc32e37dd0e8f42f72e5b0e6daa388e3f7b91bf"
    ),
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": 5}, "model=5: expected str, got int"),
        ({"model": "m", "salt": "tenant"}, "salt='tenant': expected bytes"),
        ({"model": "m", "layout": "f" * 32}, "layout=.*expected bytes"),
        ({"model": "m", "adapter": None}, "adapter=None: expected str"),
    ],
)
def test_a_namespace_of_wrong_types_is_refused_at_once(fields, message) -> None:
    with pytest.raises(UsageError, match=message):
        Namespace(**fields)


def test_a_chain_says_whose_layout_it_is_for() -> None:
    assert PageChain(FULL, 4).layout == FULL.layout
    assert PageChain.of_hashes(FULL, 4, b"").layout == FULL.layout
