"""How leases end, and what their frames become (R4, R7, R9). Standard library only; for `HostCache`."""

from __future__ import annotations

from array import array

from kvtier.core.leases import Lease
from kvtier.core.ledger import Ledger
from kvtier.core.prefix_tree import Node
from kvtier.core.results import Ended
from kvtier.core.writes import DOOMED, LOAD, READY, STORE, Doom, LeaseEnd, Quarantine, Ready
from kvtier.errors import Status


def end(book: Ledger, lease: Lease, quiet: int, whole: bool) -> Ended:
    """End `lease` with these movers quiet; `whole`: its copies are done (`HostCache.finish`)."""
    if lease.ended:
        lease.quiet |= quiet
        settle(book, lease)
        return Ended(Status.DONE)
    lease.ended = True
    lease.quiet |= quiet
    visible = 0
    if lease.kind == LOAD and whole:
        book.counts.add(lease.asked, lease.hit, lease.reason)
    elif lease.kind == LOAD:
        book.unused += lease.hit
    if lease.kind == STORE and lease.node is not None:
        own = lease.own()
        if whole and lease.quiet == lease.session.group.everyone:
            visible = _complete(book, lease, own)
        else:
            doom(book, own[-1])
    settle(book, lease)
    return Ended(Status.OK, visible, lease.dropped, lease.superseded)


def _complete(book: Ledger, lease: Lease, own: list[Node]) -> int:
    """A store's pages become READY; how many of them are visible (R4, R7)."""
    tree = book.tree
    own.reverse()
    for node in own:
        node.state = READY
        node.owner = None
    frames = array("i", b"".join([node.values for node in own]))
    book.writes.append(Ready(frames))
    book.writing -= len(frames)
    book.stored += len(frames)
    above = own[0].parent
    while above is not None and above.parent is not None and above.state == READY:
        above = above.parent
    lease.node = None
    tree.unpin(own[-1])
    tree.merge(own[-1])
    return len(frames) if above is not None and above.parent is None else 0


def doom(book: Ledger, top: Node) -> int:
    """Take `top`, being written, and all below out of the tree (R7); how many READY pages went."""
    tree = book.tree
    parent: Node = top.parent  # type: ignore[assignment]  # it is in the tree
    freed = array("i")
    doomed = array("i")
    touched: list[Lease] = []
    for node in reversed(tree.cut(top)):
        values = node.pages()
        values.reverse()
        if node.owner is None:
            freed.extend(values)
            continue
        lease: Lease = node.owner
        lease.out.extend(values)
        lease.dropped += len(values)
        if lease.node is not None:
            lease.node = None
            touched.append(lease)
        book.writing -= len(values)
        book.doomed += len(values)
        if not lease.ended:
            doomed.extend(values)
    if doomed:
        book.writes.append(Doom(doomed))
    for lease in touched:
        book.charge(lease, len(lease.out))
        if not lease.ended:
            book.writes.append(lease.record(0))
    book.dropped += len(freed)
    book.give(freed)
    tree.merge(parent)
    return len(freed)


def settle(book: Ledger, lease: Lease) -> None:
    """Let an ended lease go if every mover is quiet or gone; else quarantine its frames (R9)."""
    if not lease.settled:
        if lease.out and not lease.quarantined:
            lease.quarantined = True
            book.doomed -= len(lease.out)
            book.quarantined += len(lease.out)
            book.writes.append(Quarantine(lease.out[:]))
        book.writes.append(book.record(lease))
        return
    node, lease.node = lease.node, None
    if node is not None:
        if node.state == DOOMED:
            book.give(book.clearing.release(node))
        else:
            book.tree.unpin(node)
            book.tree.merge(node)
    if lease.quarantined:
        book.quarantined -= len(lease.out)
    else:
        book.doomed -= len(lease.out)
    book.dropped += lease.dropped
    book.superseded += lease.superseded
    book.give(lease.out)
    book.charge(lease, 0)
    book.leases.remove(lease)
    book.writes.append(LeaseEnd(lease.index))
    book.spaces.release(lease.space)
    book.bury(lease.session)
