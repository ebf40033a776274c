"""A naive prefix index, and the prompts that state machines draw."""

from __future__ import annotations

from hypothesis import strategies as st

PAGE = 2
SELDOM = st.sampled_from([False] * 12 + [True])

Chain = tuple[bytes, tuple[int, ...]]

# Prompts that share heads: a part of one of three texts, and a few tokens of their own.
TEXTS = ([0] * 6 * PAGE, [1] * 6 * PAGE, [0, 1] * 3 * PAGE)
TOKENS = st.builds(
    lambda text, length, own: (text[:length] + own)[: 6 * PAGE],
    st.sampled_from(TEXTS),
    st.integers(0, 6 * PAGE),
    st.lists(st.integers(0, 1), max_size=3),
)
SPACES = st.sampled_from([b"", b"x"])


class NaiveIndex:
    """The prefix index as a dict from each chain (all tokens from the first on) to its page."""

    def __init__(self) -> None:
        self.pages: dict[Chain, int] = {}

    def longest(self, space: bytes, tokens: list[int], most: int) -> list[int]:
        found: list[int] = []
        while (len(found) + 1) * PAGE <= most:
            page = self.pages.get((space, tuple(tokens[: (len(found) + 1) * PAGE])))
            if page is None:
                break
            found.append(page)
        return found

    def record(self, space: bytes, tokens: list[int], pages: list[int]) -> int:
        new = 0
        for index, page in enumerate(pages):
            chain = (space, tuple(tokens[: (index + 1) * PAGE]))
            if chain not in self.pages:
                self.pages[chain] = page
                new += 1
        return new

    def remove(self, victims: list[int], pinned: set[Chain]) -> None:
        """Take victims out; they must be childless and unpinned once those behind them are gone."""
        chains = {page: chain for chain, page in self.pages.items()}
        for page in sorted(victims, key=lambda page: -len(chains[page][1])):
            chain = chains[page]
            assert chain not in pinned
            del self.pages[chain]
        for space, tokens in self.pages:
            assert len(tokens) == PAGE or (space, tokens[:-PAGE]) in self.pages, "a page is unreachable (W1)"


def heads(space: bytes, tokens: list[int], pages: int) -> set[Chain]:
    return {(space, tuple(tokens[: (index + 1) * PAGE])) for index in range(pages)}
