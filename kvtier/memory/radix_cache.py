"""RadixCache: which device pages hold which tokens, as a tree over the tokens themselves.

May import `core/`, numpy and the ground floor; single-threaded. A page's key is its own token ids, so a match
is exact, without a hash; an engine gives images and the like token ids of their own. One root per namespace.
Always true: every cached page is reachable from its root (W1), and is there once; a task pins the deepest
page that it shares, which holds all before it; only pages behind every pin and without a child are evicted,
the tail of a chain before its head, and each of them is free at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvtier.core.prefix_tree import Node, PrefixTree, Root
from kvtier.errors import UsageError
from kvtier.memory.indices import Int32, int32_1d
from kvtier.memory.page_allocator import PageAllocator

_FEW_ROOTS = 64


@dataclass(eq=False)
class Prefix:
    """One task's hold on the index: its deepest shared page stays, and so does all before it.

    That page is the last of `node`, the `pages`-th of its chain; `node` is None where nothing is shared.
    What an older `epoch` than the cache's began is forgotten there.
    """

    namespace: bytes
    epoch: int
    node: Node | None = None
    pages: int = 0
    released: bool = False


class Lookup(NamedTuple):
    """`pages`: device pages of the longest known prefix, in token order, each with one more reference."""

    prefix: Prefix
    pages: Int32


class RadixCache:
    """Prefix index over the pages of a `PageAllocator`; a page holds `page_size` tokens.

    `epoch` rises with each `flush`. `counts`: pages recorded, found to be duplicates, evicted, and flushes.
    """

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        if page_size < 1:
            raise UsageError(f"page_size={page_size}: expected 1 or more tokens")
        self.page_size = page_size
        self.epoch = 0
        self.counts = dict.fromkeys(("pages_recorded", "pages_duplicate", "pages_evicted", "flushes"), 0)
        self._owner = pages.owner
        self._pages = pages
        self._width = 4 * page_size
        self._forget()

    def _forget(self) -> None:
        self._tree = PrefixTree(self._width)
        self._roots: dict[bytes, Root] = {}
        self._sweep_at = _FEW_ROOTS

    @property
    def evictable_pages(self) -> int:
        """How many pages `evict` can free now."""
        return self._tree.idle

    def lookup(self, tokens: Any, *, limit: int | None = None, namespace: bytes = b"") -> Lookup:
        """Find and refer to the longest known prefix of `tokens`, in one call (W4).

        `tokens`: list, array or numpy, int32. At most `len(tokens) - 1` tokens are matched, so that
        something is left to compute (W6), and at most `limit`. The caller gives the pages back with
        `PageAllocator.free`, then the prefix with `release`.
        """
        self._owner.check("RadixCache.lookup")
        tokens = int32_1d(tokens, "tokens")
        most = len(tokens) - 1 if limit is None else min(len(tokens) - 1, limit)
        keys = tokens[: max(most, 0) // self.page_size * self.page_size].tobytes()
        prefix = Prefix(namespace, self.epoch)
        root = self._roots.get(namespace)
        if root is not None and keys:
            match = self._tree.match(root, keys)
            if match.pages:
                prefix.node = self._tree.split(match.node, match.offset)
                pages = np.array(self._tree.values(prefix.node), np.int32)
                self._pages.inc_ref(pages)
                self._tree.pin(prefix.node)
                prefix.pages = match.pages
                return Lookup(prefix, pages)
        return Lookup(prefix, np.empty(0, np.int32))

    def record(self, prefix: Prefix, tokens: Any, pages: Any) -> int:
        """`pages` hold the KV of `tokens`, page by page from the first token on; answers how many are new.

        Idempotent (W2); one walk for all of them (W24). Where other pages are known for the same tokens
        those stay, and the given ones are not cached (W14). The caller keeps its references. `prefix` moves
        down to the last page. Nothing is recorded for a prefix begun before a flush.
        """
        self._owner.check("RadixCache.record")
        tokens = int32_1d(tokens, "tokens")
        pages = int32_1d(pages, "pages")
        if prefix.released:
            raise UsageError("record: this prefix was released already")
        if len(tokens) != len(pages) * self.page_size:
            raise UsageError(
                f"record: {len(tokens)} tokens for {len(pages)} pages, expected {self.page_size} for each"
            )
        if prefix.epoch != self.epoch or len(pages) <= prefix.pages:
            return 0
        tree = self._tree
        keys = tokens.tobytes()
        root = self._roots.get(prefix.namespace)
        match = None if root is None else tree.match(root, keys)
        known = match.pages if match else 0
        if known < prefix.pages:
            raise UsageError(
                f"record: tokens differ from the task's own within its first {prefix.pages} pages"
            )
        new = pages[known:]
        self._pages.keep(new)  # refuses what may not be cached, before anything is changed
        if root is None:
            root = self._new_root(prefix.namespace)
        node: Node = tree.split(match.node, match.offset) if match and known else root
        if len(new):
            node = tree.insert(node, keys[known * self._width :], new.tobytes(), pinned=True)
        else:
            tree.pin(node)
        self._unpin(prefix)
        prefix.node = tree.merge(node)
        self.counts["pages_recorded"] += len(new)
        self.counts["pages_duplicate"] += max(known - prefix.pages, 0)
        prefix.pages = len(pages)
        return len(new)

    def release(self, prefix: Prefix) -> None:
        """The task needs its shared pages no longer: they become the youngest that may be evicted."""
        self._owner.check("RadixCache.release")
        if prefix.released:
            raise UsageError("release: this prefix was released already")
        self._unpin(prefix)
        prefix.released = True

    def _unpin(self, prefix: Prefix) -> None:
        # The nodes of an older epoch went with their tree.
        if prefix.node is not None and prefix.epoch == self.epoch:
            self._tree.unpin(prefix.node)
            self._tree.merge(prefix.node)
        prefix.node = None

    def has_page(self, page: int) -> bool:
        """Whether `page` is cached."""
        return self._pages.is_cached(page)

    def evict(self, count: int) -> Int32 | None:
        """Free `count` cached pages, least recently used leaf first, tails first; answers which (W13).

        None, and nothing changed, when fewer can go (W3).
        """
        self._owner.check("RadixCache.evict")
        if count < 0:
            raise UsageError(f"evict({count}): expected 0 or more pages")
        if count > self._tree.idle:
            return None
        victims = np.array(self._tree.evict(count), np.int32)
        self._pages.drop(victims)
        self.counts["pages_evicted"] += count
        return victims

    def flush(self) -> int:
        """Forget all pages; answers how many are free by that. Those in use live on with their tasks."""
        self._owner.check("RadixCache.flush")
        kept = self._all_pages()
        self._forget()
        self.epoch += 1
        self.counts["flushes"] += 1
        return self._pages.drop(kept)

    def check(self) -> None:
        """Raise where an invariant is broken. O(pages)."""
        self._owner.check("RadixCache.check")
        self._tree.check()
        kept = self._all_pages()
        if len(np.unique(kept)) != len(kept) or len(kept) != self._pages.cached_pages:
            raise RuntimeError(
                f"{len(kept)} pages in the tree, {len(np.unique(kept))} different ones, "
                f"{self._pages.cached_pages} marked as cached"
            )
        for root in self._roots.values():
            for node in self._tree.walk(root):
                for page in node.pages():
                    if not self._pages.is_cached(page):
                        raise RuntimeError(f"page {page} is in the tree but not marked as cached")
                    if not node.holds and self._pages.is_busy(page):
                        raise RuntimeError(f"page {page} could be evicted, but is in use or being copied")

    def _all_pages(self) -> Int32:
        values = [node.values for root in self._roots.values() for node in self._tree.walk(root)]
        return np.frombuffer(b"".join(values), np.int32)

    def _new_root(self, namespace: bytes) -> Root:
        if len(self._roots) >= self._sweep_at:  # empty ones are collected (W16), at a cost of O(1) each
            for name, root in list(self._roots.items()):
                if not root.total:
                    del self._roots[name]
                    self._tree.roots.discard(root)
            self._sweep_at = max(_FEW_ROOTS, 2 * len(self._roots))
        root = self._roots[namespace] = self._tree.new_root(namespace)
        return root
