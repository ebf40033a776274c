"""RadixCache: which device pages hold which tokens, as a tree over the tokens themselves.

May import `core/`, numpy and the ground floor; single-threaded. A page's key is its own token ids, so a
match is exact, without a hash. One root per namespace. Always true: every cached page is reachable from its
root (W1); a cached page is in exactly one place; only pages without a child, a reference or a copy under
way are evicted, the tail of a chain before its head.
"""

from __future__ import annotations

from typing import Any

from kvtier.memory.allocator import Int32
from kvtier.memory.page_allocator import PageAllocator


class RadixCache:
    """Prefix index over the pages of `pages`; a page holds `page_size` tokens.

    `epoch` rises with each `flush`: what was computed before one must not be recorded after it.
    """

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        raise NotImplementedError

    def lookup(self, tokens: Any, *, limit: int | None = None, namespace: bytes = b"") -> Int32:
        """The device pages of the longest known prefix, in token order, each with one more reference.

        Match and reference in one call (W4). At most `limit` tokens are matched, by default
        `len(tokens) - 1`, so that something is left to compute (W6). Makes the match the youngest. Give
        back with `release`.
        """
        raise NotImplementedError

    def release(self, pages: Int32) -> None:
        """Drop the references that `lookup` gave."""
        raise NotImplementedError

    def record(self, tokens: Any, pages: Int32, *, namespace: bytes = b"") -> int:
        """`pages` hold the KV of `tokens`, from the first token on, page by page; answers how many are new.

        Idempotent (W2). Where other pages are known for the same tokens these stay (W14), and the given
        ones are not cached. The caller keeps its references to all of them in any case.
        """
        raise NotImplementedError

    def has_page(self, page: int) -> bool:
        """Whether `page` is cached."""
        raise NotImplementedError

    def evict(self, count: int) -> Int32 | None:
        """Free `count` cached pages, least recently used leaf first, tails first; answers which.

        None, and nothing changed, when fewer can go (W3).
        """
        raise NotImplementedError

    def flush(self, namespace: bytes | None = None) -> int:
        """Forget all (or one namespace's) pages; answers how many are free by that.

        Referenced pages live on with their tasks, unknown to later look-ups.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise RuntimeError where an invariant is broken."""
        raise NotImplementedError
