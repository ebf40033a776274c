"""Page keys: SHA-256 chained over tokens, so that equal keys mean equal KV.

The bytes are fixed by rule R3a of the protocol and by golden vectors in the tests; changing them
means a new `MAGIC`. Nothing here does I/O or needs more than the standard library.
"""

from __future__ import annotations

import array
import hashlib
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvtier.errors import UsageError

MAGIC = b"kvtier/1"
KEY_BYTES = 32
NS_BYTES = 16

Media = tuple[int, bytes]
"""One image, sound or other item: the position of its first token, and the 32-byte digest of its content."""


@dataclass(frozen=True)
class Namespace:
    """All that makes equal tokens different KV. A field left empty is left out of the key.

    `format` says what the bytes mean (`KVLayout.format`), `layout` how they lie
    (`KVLayout.fingerprint`): `KVLayout.namespace()` fills both in. `salt` keeps tenants apart: with
    different salts nobody can tell from a hit, or from its timing, what another has asked.
    UsageError for a field of another type.
    """

    model: str
    revision: str = ""
    format: str = ""
    layout: bytes = b""
    adapter: str = ""
    salt: bytes = b""

    def __post_init__(self) -> None:
        for name, kind in (
            *((name, str) for name in ("model", "revision", "format", "adapter")),
            *((name, bytes) for name in ("layout", "salt")),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise UsageError(f"{name}={value!r}: expected {kind.__name__}, got {type(value).__name__}")

    @cached_property
    def root(self) -> bytes:
        """k(0): the parent key of every first page, 32 bytes."""
        digest = hashlib.sha256(MAGIC)
        model, revision, form = self.model.encode(), self.revision.encode(), self.format.encode()
        fields = (model, revision, form, self.layout, self.adapter.encode(), self.salt)
        for tag, value in enumerate(fields, start=1):
            if value:
                digest.update(struct.pack("<BI", tag, len(value)) + value)
        return digest.digest()

    @property
    def digest(self) -> bytes:
        """`ns` on the wire: the first 16 bytes of k(0)."""
        return self.root[:NS_BYTES]


class PageChain:
    """The keys of one request's pages; grows with the request and hashes only what is new.

    `keys` holds 32 bytes for each whole page, `tokens` counts all tokens so far, those of the unfinished
    last page too; `layout` is the namespace's, which a planner compares with its own. Not thread-safe: it
    belongs to its request.
    """

    def __init__(self, namespace: Namespace, page_tokens: int) -> None:
        if page_tokens < 1:
            raise UsageError(f"page_tokens={page_tokens}: expected 1 or more")
        self.page_tokens = page_tokens
        self.namespace = namespace.digest
        self.layout = namespace.layout
        self.tokens = 0
        self._last = namespace.root
        self._keys = bytearray()
        self._tail = bytearray()  # tokens of the unfinished page, as little-endian int32
        self._media: list[Media] = []  # items that begin at or after the unfinished page
        self._hashed = False

    @classmethod
    def of_hashes(
        cls, namespace: Namespace, page_tokens: int, hashes: bytes, hash_bytes: int = 32
    ) -> PageChain:
        """A chain from an engine's own chained block hashes; cannot be extended by tokens.

        `hashes`: for each whole page the hash of its *last* block, `hash_bytes` each, joined. An engine's
        hashes are chained already, so each key needs only the namespace and that hash.
        """
        if hash_bytes < 1 or len(hashes) % hash_bytes:
            raise UsageError(f"{len(hashes)} bytes of hashes: expected a multiple of hash_bytes={hash_bytes}")
        chain = cls(namespace, page_tokens)
        chain._hashed = True
        root, sha256 = namespace.root, hashlib.sha256
        view = memoryview(hashes)
        chain._keys += b"".join(
            sha256(root + view[at : at + hash_bytes]).digest() for at in range(0, len(hashes), hash_bytes)
        )
        chain.tokens = page_tokens * (len(hashes) // hash_bytes)
        return chain

    @property
    def keys(self) -> bytes:
        """The keys of all whole pages, 32 bytes each."""
        return bytes(self._keys)

    @property
    def pages(self) -> int:
        """How many whole pages there are."""
        return len(self._keys) // KEY_BYTES

    def extend(self, tokens: Any, media: Iterable[Media] = ()) -> None:
        """Append `tokens`: a contiguous int32 buffer (numpy, `array('i')`; not copied) or any ints.

        Other integer types and lists are converted. `media`: items whose first token is among these or
        still to come, by absolute position, in order. UsageError, and nothing changed, when a token does
        not fit int32 or an item lies in a page that is already hashed.
        """
        if self._hashed:
            raise UsageError(
                "this chain was made by of_hashes: make a new one from the longer list of hashes"
            )
        data = _int32_bytes(tokens)
        items = self._checked_media(media)
        self.tokens += len(data) // 4
        self._media += items
        width = self.page_tokens * 4
        at = 0
        if self._tail:
            at = min(width - len(self._tail), len(data))
            self._tail += data[:at]
            if len(self._tail) < width:
                return
            self._hash_pages(memoryview(bytes(self._tail)))
            self._tail.clear()
        whole = at + (len(data) - at) // width * width
        if whole > at:
            self._hash_pages(data[at:whole])
        self._tail += data[whole:]

    def _checked_media(self, media: Iterable[Media]) -> list[Media]:
        items = [(int(position), bytes(digest)) for position, digest in media]
        floor = self._media[-1][0] if self._media else self.pages * self.page_tokens
        for position, digest in items:
            if len(digest) != 32:
                raise UsageError(f"media at {position}: digest of {len(digest)} bytes, expected 32")
            if position < floor:
                raise UsageError(
                    f"media at position {position}: expected {floor} or later; items come in order, and "
                    "pages before that have their keys already"
                )
            floor = position
        return items

    def _hash_pages(self, data: memoryview) -> None:
        sha256, last, width = hashlib.sha256, self._last, self.page_tokens * 4
        if not self._media:
            parts = []
            for at in range(0, len(data), width):
                page = sha256(last)
                page.update(data[at : at + width])
                last = page.digest()
                parts.append(last)
            self._keys += b"".join(parts)
            self._last = last
            return
        for at in range(0, len(data), width):
            page = sha256(self._last)
            page.update(data[at : at + width])
            start = self.pages * self.page_tokens
            while self._media and self._media[0][0] < start + self.page_tokens:
                position, digest = self._media.pop(0)
                page.update(struct.pack("<I", position - start) + digest)
            self._last = page.digest()
            self._keys += self._last


def _int32_bytes(tokens: Any) -> memoryview:
    """`tokens` as little-endian int32 bytes; the caller's own memory where it is that already."""
    try:
        view = memoryview(tokens)
    except TypeError:
        view = None
    if view is not None and view.ndim != 1:
        raise UsageError(f"tokens have {view.ndim} dimensions: expected one")
    if (
        view is not None
        and view.itemsize == 4
        and view.format.lstrip("@=<") in ("i", "l")
        and view.contiguous
        and sys.byteorder == "little"
    ):
        return view.cast("B") if len(view) else memoryview(b"")
    values: Sequence[int] = view.tolist() if view is not None else tokens
    try:
        packed = array.array("i", values)
    except OverflowError as error:
        raise UsageError(f"tokens must fit int32: {error}") from None
    except TypeError as error:
        raise UsageError(f"tokens must be integers: {error}") from None
    if sys.byteorder != "little":
        packed.byteswap()
    return memoryview(packed).cast("B")
