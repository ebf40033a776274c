"""Pages whose bytes are a function of their key, so that anybody can tell right bytes from wrong ones.

A wrong page, row, plane or half shows; so does a page that was read while its units held something else.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier import KVLayout, PageChain, Plane
from kvtier.keys import KEY_BYTES

PAGE_TOKENS = 16
ROW = 128
LAYOUT = KVLayout(PAGE_TOKENS, (tuple(Plane(f"{plane}.kv", ROW) for plane in range(2)),), "content")
"""4 KiB a page."""
POISON = 0xEE
"""In units that hold nothing: it must never come out of the pool."""

Rows = npt.NDArray[np.uint8]


def pages_of(chain: PageChain, planes: int = 2) -> list[Rows]:
    """For each plane uint8[tokens of the chain's whole pages, ROW]."""
    keys = np.frombuffer(chain.keys, np.uint8).reshape(chain.pages, KEY_BYTES)
    rows = np.tile(np.repeat(keys, PAGE_TOKENS, axis=0), (1, ROW // KEY_BYTES))
    token = (np.arange(len(rows)) % PAGE_TOKENS).astype(np.uint8)[:, None]
    return [rows ^ (token * 16 + plane) for plane in range(planes)]


def chain_of(tokens: npt.ArrayLike, salt: str = "") -> PageChain:
    """A chain of `tokens` in the namespace `salt`."""
    chain = PageChain(LAYOUT.namespace("m", salt=salt.encode()), PAGE_TOKENS)
    chain.extend(np.asarray(tokens, np.int32))
    return chain


class Documents:
    """Many prompts that share prefixes: trunks, each with branches, each with ends; in some namespaces."""

    def __init__(self, trunks: int = 6, branches: int = 4, ends: int = 3, namespaces: int = 3) -> None:
        self._shape = (trunks, branches, ends)
        self._namespaces = namespaces

    def pick(self, rng: np.random.Generator) -> PageChain:
        """One of them, perhaps cut short; 2 to 40 pages and a part of one."""
        trunk, branch, end = (int(rng.integers(size)) for size in self._shape)
        parts = [(trunk, 5 + trunk % 4), (10 + branch, 4 + branch * 3), (20 + end, 3 + end * 6)]
        tokens = np.concatenate(
            [np.arange(pages * PAGE_TOKENS) + (trunk * 100 + part) * 10_000 for part, pages in parts]
        )
        cut = int(rng.integers(2 * PAGE_TOKENS, len(tokens) + 1))
        return chain_of(tokens[:cut], f"tenant {trunk % self._namespaces}")
