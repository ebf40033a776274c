"""How a load begins: which pages it may read, and what pins them (R6, R12, R28). For `HostCache`; standard
library only.
"""

from __future__ import annotations

from kvtier.core.ledger import Ledger
from kvtier.core.prefix_tree import Match, Node
from kvtier.core.results import LoadGrant, Reason
from kvtier.core.sessions import Session
from kvtier.core.spaces import Space
from kvtier.core.writes import LOAD, READY
from kvtier.errors import Status
from kvtier.keys import KEY_BYTES


def begin(
    book: Ledger,
    session: Session,
    number: int,
    space: Space,
    keys: bytes,
    first: int,
    at_least: int,
) -> LoadGrant:
    """Grant what can be read of a load whose request was found in order (`HostCache.begin_load`)."""
    total, epoch = len(keys) // KEY_BYTES, space.epoch
    tree = book.tree
    match = tree.match(space.root, keys, READY)
    pages = match.pages
    reason = ""
    if pages < total:
        reason = Reason.PENDING if pending(book, space, match, keys) else Reason.ABSENT
    free = book.cap - session.charge
    if pages > free:
        # Pages that are held already may cost nothing, as far as that can be known.
        held = pages - tree.unheld(match.node, match.offset)
        room = held + book.room(session, held, 0)
        if pages > max(room, 0):
            # Within `held` the second bound of `room` proves nothing: others may be what holds it.
            pages = room if room >= held else max(free, 0)
            reason = Reason.CAP
    frames = tree.values(match.node, match.offset)
    mark = session.group.mark
    if mark < book.free.limit:
        mapped = next((at for at, frame in enumerate(frames[:pages]) if frame >= mark), pages)
        if mapped < pages:
            pages, reason = mapped, Reason.UNMAPPED
    if pages - first < max(at_least, 1):
        status = Status.BUSY if reason == Reason.CAP else Status.MISS
        if pages > first:
            reason = reason if status == Status.BUSY else Reason.TOO_FEW
        book.counts.add(total - first, 0, reason)
        return LoadGrant.none(status, epoch, match.pages, reason)

    node, offset = _trim(match, pages)
    node = tree.split(node, offset)
    tree.pin(node)
    lease = book.leases.add(session, number, LOAD, space)
    book.spaces.use(space)
    lease.node = node
    book.charge(lease, pages)
    book.writes.append(lease.record(pages))
    lease.asked, lease.hit, lease.reason = total - first, pages - first, reason
    if first or pages < len(frames):
        frames = frames[first:pages]
    return LoadGrant(Status.OK, frames, epoch, match.pages, reason)


def pending(book: Ledger, space: Space, match: Match, keys: bytes) -> int:
    """Pages of `keys` that are in the tree beyond the visible ones of `match`."""
    if match.offset < match.node.count or not match.node.children:
        return 0
    return book.tree.match(space.root, keys).pages - match.pages


def _trim(match: Match, pages: int) -> tuple[Node, int]:
    """The node in which the first `pages` pages of `match` end, and how many of its pages are among them."""
    node, start = match.node, match.pages - match.offset
    while start >= pages:
        node = node.parent  # type: ignore[assignment]  # the match has `pages` pages or more
        start -= node.count
    return node, pages - start
