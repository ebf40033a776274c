"""What a page of KV is made of: planes, shards, and the numbers that must agree to share a pool.

A page is `page_tokens` consecutive tokens of all layers and all ranks. Each rank holds one shard of
it, a shard is made of planes, and a plane of rows: one row per unit, opaque bytes in the engine's
own order. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property

from kvtier.errors import LayoutError
from kvtier.keys import Namespace

SHARD_ALIGN = 4096
"""Each shard of a page is rounded up to this many bytes (page size, and O_DIRECT on lower tiers)."""


@dataclass(frozen=True)
class Plane:
    """What one layer (or all, where packed) keeps of a token: `row_bytes` for every `unit_tokens` tokens."""

    name: str
    row_bytes: int
    unit_tokens: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise LayoutError("a plane needs a name, such as '3.kv'")
        if self.row_bytes < 1 or self.unit_tokens < 1:
            raise LayoutError(
                f"plane {self.name!r}: row_bytes={self.row_bytes} and unit_tokens={self.unit_tokens}; "
                "both must be 1 or more"
            )


@dataclass(frozen=True)
class KVLayout:
    """The layout of one page: tokens, shards of planes, and what gives the bytes their meaning.

    `shards` has one entry per *different* part (ranks that hold the same bytes share one). `format`
    names all that gives the bytes meaning: engine, version, backend, dtype, layout, ISA, drafts.
    """

    page_tokens: int
    shards: tuple[tuple[Plane, ...], ...]
    format: str

    def __post_init__(self) -> None:
        if self.page_tokens < 1:
            raise LayoutError(f"page_tokens={self.page_tokens}: expected 1 or more")
        if not self.shards or not all(self.shards):
            raise LayoutError("a layout needs at least one shard, and each shard at least one plane")
        for number, planes in enumerate(self.shards):
            names = [plane.name for plane in planes]
            if len(set(names)) != len(names):
                raise LayoutError(f"shard {number}: plane names must differ, got {names}")
            for plane in planes:
                if self.page_tokens % plane.unit_tokens:
                    raise LayoutError(
                        f"shard {number}, plane {plane.name!r}: unit_tokens={plane.unit_tokens} does not "
                        f"divide page_tokens={self.page_tokens}; choose a multiple as page_tokens"
                    )

    @cached_property
    def shard_bytes(self) -> tuple[int, ...]:
        """Bytes of each shard of a page in the pool, each a multiple of 4096."""
        return tuple(
            -(-sum(self.plane_bytes(plane) for plane in planes) // SHARD_ALIGN) * SHARD_ALIGN
            for planes in self.shards
        )

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of one page in the pool, all shards."""
        return sum(self.shard_bytes)

    def plane_bytes(self, plane: Plane) -> int:
        """Bytes of one plane of one page."""
        return plane.row_bytes * (self.page_tokens // plane.unit_tokens)

    def plane_offsets(self, shard: int) -> tuple[int, ...]:
        """Where each plane of `shard` begins, in bytes from the shard's start."""
        offsets, at = [], 0
        for plane in self.shards[shard]:
            offsets.append(at)
            at += self.plane_bytes(plane)
        return tuple(offsets)

    @property
    def unit_tokens(self) -> int:
        """Tokens of the finest unit: positions of a hit are multiples of it."""
        return min(plane.unit_tokens for planes in self.shards for plane in planes)

    @cached_property
    def geometry(self) -> tuple[int, ...]:
        """What must agree to share a pool: page tokens, then the bytes of each shard."""
        return (self.page_tokens, *self.shard_bytes)

    def namespace(self, model: str, *, revision: str = "", adapter: str = "", salt: bytes = b"") -> Namespace:
        """The namespace of `model` with this layout and format: what a request's `PageChain` is made with."""
        return Namespace(model, revision, self.format, self.fingerprint, adapter, salt)

    @cached_property
    def fingerprint(self) -> bytes:
        """32 bytes over everything here; goes into the namespace, and refuses nobody by itself."""
        digest = hashlib.sha256(b"kvtier layout/1")
        digest.update(struct.pack("<II", self.page_tokens, len(self.shards)))
        for planes in self.shards:
            digest.update(struct.pack("<I", len(planes)))
            for plane in planes:
                name = plane.name.encode()
                digest.update(struct.pack("<III", len(name), plane.row_bytes, plane.unit_tokens) + name)
        text = self.format.encode()
        digest.update(struct.pack("<I", len(text)) + text)
        return digest.digest()


def default_page_tokens(token_bytes: int, unit_tokens: int = 1) -> int:
    """The smallest multiple of `unit_tokens` with 64 tokens and 1 MiB, but at most 512 tokens.

    `token_bytes`: KV bytes of one token over all layers and ranks. Where one unit is longer than 512
    tokens, a page is one unit.
    """
    if token_bytes < 1 or unit_tokens < 1:
        raise LayoutError(f"token_bytes={token_bytes}, unit_tokens={unit_tokens}: both must be 1 or more")
    wanted = min(max(64, -(-(1 << 20) // token_bytes)), 512)
    tokens = -(-wanted // unit_tokens) * unit_tokens
    while tokens > 512 and tokens > unit_tokens:
        tokens -= unit_tokens
    return tokens
