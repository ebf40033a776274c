"""MessagePack with limits: bytes in, plain values out, and nothing but `ProtocolError` for bad bytes.

Imports msgpack and the ground floor. Always true: array and map headers that promise more than their limit
are refused before anything is made for them, and no extension types, timestamps or objects are ever built.
"""

from __future__ import annotations

from typing import Any

import msgpack

from kvtier.errors import ProtocolError

MAX_MESSAGE_BYTES = 8 << 20
"""Bytes of one message, packed."""
MAX_PARTS = 4
"""Parts of one multipart message, the routing id not counted; ours have one."""
MAX_ITEMS = 1024
"""Entries of any array or map: also the most chains, or lease ends, of one message."""
MAX_TEXT_BYTES = 4096
MAX_DEPTH = 4
"""How deep arrays and maps may lie in one another: envelope, list of entries, entry, list."""


def _no_extension(code: int, data: bytes) -> Any:
    raise ProtocolError(f"extension type {code}: not part of this protocol")


def pack(value: Any) -> bytes:
    """`value` (ints, text, bytes-likes, lists, tuples, dicts) as bytes, or ProtocolError."""
    try:
        data: bytes = msgpack.packb(value)
    except (TypeError, ValueError, OverflowError, BufferError) as error:
        raise ProtocolError(f"cannot be packed: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes: the limit is {MAX_MESSAGE_BYTES}")
    return data


def unpack(data: bytes | memoryview) -> Any:
    """The value that `data` holds. ProtocolError for whatever is not one value within the limits."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(data)} bytes: the limit is {MAX_MESSAGE_BYTES}")
    try:
        value = msgpack.unpackb(
            data,
            strict_map_key=True,
            ext_hook=_no_extension,
            max_str_len=MAX_TEXT_BYTES,
            max_bin_len=MAX_MESSAGE_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except ProtocolError:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        # Their texts may quote the data; the kind of error is enough.
        raise ProtocolError(f"not a MessagePack value within the limits ({type(error).__name__})") from None
    check_depth(value)
    return value


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """ProtocolError when arrays and maps lie deeper than MAX_DEPTH."""
    if type(value) is list:
        if not left:
            raise ProtocolError(f"nested deeper than {MAX_DEPTH} levels")
        for entry in value:
            if type(entry) is list or type(entry) is dict:
                check_depth(entry, left - 1)
    elif type(value) is dict:
        if not left:
            raise ProtocolError(f"nested deeper than {MAX_DEPTH} levels")
        for entry in value.values():
            if type(entry) is list or type(entry) is dict:
                check_depth(entry, left - 1)
