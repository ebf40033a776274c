"""How a store begins: where, with which frames, and over whom (R4 to R8). For `HostCache`; standard
library only.
"""

from __future__ import annotations

from array import array

from kvtier.core.leases import Lease
from kvtier.core.ledger import Ledger
from kvtier.core.prefix_tree import Match, Node
from kvtier.core.results import Reason, StoreGrant
from kvtier.core.sessions import Session
from kvtier.core.spaces import Space
from kvtier.core.writes import STORE, WRITING, Claim, Doom, Reparent
from kvtier.errors import Status, UsageError
from kvtier.keys import KEY_BYTES

TAG_BYTES = 8
"""How much of its parent's key a page's line in the table carries (R14)."""


def begin(
    book: Ledger, session: Session, number: int, space: Space, keys: bytes, now: float, patience: float
) -> StoreGrant:
    """Grant what fits of a store whose request was found in order (`HostCache.begin_store`)."""
    tree = book.tree
    total = len(keys) // KEY_BYTES
    match = tree.match(space.root, keys)
    start, stale, stale_pages, pending = _where(tree.path(match.node), match, now - patience)
    whole = start + stale_pages == match.pages
    want = total - start if whole else stale_pages
    reason = "" if whole else Reason.PENDING
    if not want:
        return StoreGrant.none(Status.OK, space.epoch, "", start, pending)
    book.store_asked += want

    # Count first, touch nothing: what the match pins cannot be evicted for it (R5).
    newly = tree.unheld(match.node, match.offset)
    room = book.room(session, start, newly)
    can = len(book.free) + book.clearing.pages + tree.idle - newly
    taken = min(want, room, can)
    if taken < want:
        reason = Reason.CAP if room <= can else Reason.FULL
    if taken <= 0:
        status = Status.BUSY if reason == Reason.CAP else Status.FULL
        return StoreGrant.none(status, space.epoch, reason, start, pending)

    anchor = tree.split(match.node, match.offset) if match.pages else None
    if anchor is not None:
        tree.pin(anchor)
        if stale and stale[-1] is match.node:
            stale[-1] = anchor
    frames = book.obtain(taken, session.group.mark)
    if len(frames) < taken:
        taken, reason = len(frames), Reason.UNMAPPED
    if not taken:
        if anchor is not None:
            tree.unpin(anchor)
            tree.merge(anchor)
        return StoreGrant.none(Status.FULL, space.epoch, reason, start, pending)

    lease = book.leases.add(session, number, STORE, space)
    book.spaces.use(space)
    lease.since = now
    own = keys[start * KEY_BYTES : (start + taken) * KEY_BYTES]
    parent_frame, tag = -1 - space.index, space.ns[:TAG_BYTES]
    if start:
        parent_frame = _last_frame(stale[0].parent if stale else anchor)
        tag = keys[(start - 1) * KEY_BYTES :][:TAG_BYTES]
    book.writes.append(Claim(frames, own, parent_frame, tag, lease.index, tree.tick & 0xFFFFFFFF))
    used = _take_over(book, lease, stale, frames) if stale else 0
    if used < taken:
        under = space.root if anchor is None else anchor
        values = frames[used:].tobytes()
        lease.node = tree.insert(under, own[used * KEY_BYTES :], values, WRITING, lease, pinned=True)
    if anchor is not None:
        tree.unpin(anchor)
    book.writing += taken
    book.store_taken += taken
    book.charge(lease, start + taken)
    book.writes.append(lease.record(start + taken))
    return StoreGrant(Status.OK, start, frames, taken, pending, space.epoch, reason)


def _take_over(book: Ledger, lease: Lease, stale: list[Node], frames: array[int]) -> int:
    """Put `frames` in the place of those that hung leases hold for `stale`, as far as they reach (R8).

    The nodes stay, so that their children and pins do; the old leases keep their frames, DOOMED.
    """
    tree = book.tree
    taken: list[Node] = []
    used = 0
    for whole in stale:
        if used == len(frames):
            break
        count = min(whole.count, len(frames) - used)
        node = tree.split(whole, count)
        taken.append(node)
        old: Lease = node.owner
        gone = node.pages()
        gone.reverse()
        book.writes.append(Doom(gone))
        old.out.extend(gone)
        old.superseded += count
        book.writing -= count
        book.doomed += count
        tree.refill(node, frames[used : used + count].tobytes())
        node.owner = lease
        used += count
        if old.node is node:
            old.node = None
            tree.unpin(node)
            book.charge(old, len(old.out))
            book.writes.append(old.record(0))
    for node in taken:
        last = _last_frame(node)
        for child in (node.children or {}).values():
            if child.owner is not lease:
                book.writes.append(Reparent(child.pages()[0], last))
    if used == len(frames):
        lease.node = taken[-1]
        tree.pin(taken[-1])
    return used


def _where(path: list[Node], match: Match, deadline: float) -> tuple[int, list[Node], int, int]:
    """Where a store of what `match` found begins.

    Returns the first page to write, the run of nodes from there on whose writers began before `deadline`
    (R8), the pages of that run, and the pages that others are writing in time.
    """
    start, page, pending, run_pages = match.pages, 0, 0, 0
    run: list[Node] = []
    closed = False
    for node in path:
        count = match.offset if node is match.node else node.count
        stale = node.state == WRITING and node.owner.since < deadline
        if stale and not closed:
            if not run:
                start = page
            run.append(node)
            run_pages += count
        else:
            closed = bool(run)
            if node.state == WRITING:
                pending += count
        page += count
    return start, run, run_pages, pending


def _last_frame(node: Node | None) -> int:
    if node is None:
        raise UsageError("a root has no frame")
    return node.last()
