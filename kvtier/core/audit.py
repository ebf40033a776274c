"""The invariants of `HostCache`, checked from outside for its `check`. Standard library only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvtier.core.checks import require
from kvtier.core.leases import Lease
from kvtier.core.ledger import Ledger
from kvtier.core.prefix_tree import Node
from kvtier.core.writes import DOOMED, LOAD, READY, WRITING


def check_counts(book: Ledger) -> None:
    """The counts add up: every frame is in one place. O(1)."""
    placed = (
        len(book.free)
        + book.tree.pages
        + book.doomed
        + book.quarantined
        + book.clearing.pages
        + book.clearing.kept
    )
    require(placed == book.free.limit, f"{book.free.limit} frames exist, {placed} are somewhere")
    require(0 <= book.writing <= book.tree.held <= book.tree.pages, "WRITING pages are held")


def check_slice(book: Ledger) -> Iterator[None]:
    """Check node after node, while the trees may change in between."""
    for root in list(book.tree.roots):
        stack: list[Node] = list((root.children or {}).values())
        while stack:
            node = stack.pop()
            if node.parent is None or node.root not in book.tree.roots:
                continue  # gone since: evicted, merged or flushed
            if (node.parent.children or {}).get(node.key) is node:
                _check_node(book, node)
                stack.extend((node.children or {}).values())
            yield


def check_all(book: Ledger) -> None:
    """Everything. O(pages)."""
    untouched, waiting, reading = book.clearing.untouched(), book.clearing.waiting(), book.clearing.reading()
    loose_leaves = sum(not node.children for node in untouched)
    book.tree.check(len(untouched) + len(waiting) + len(reading), loose_leaves)
    seen = book.free.frames()
    writing = 0
    for root in book.tree.roots:
        for node in book.tree.walk(root):
            _check_node(book, node)
            seen.extend(node.pages())
            writing += node.count if node.state == WRITING else 0
    require(writing == book.writing, f"{book.writing} WRITING pages counted, {writing} there")
    left = [*untouched, *waiting]
    require(sum(node.count for node in left) == book.clearing.pages, "pages left to sweep")
    for node in left:
        seen.extend(node.pages())
    seen.extend(_check_leases(book))
    require(len(seen) == book.free.limit, f"{book.free.limit} frames exist, {len(seen)} are somewhere")
    require(len(set(seen)) == len(seen), "a frame is in two places")
    require(not seen or (min(seen) >= 0 and max(seen) < book.free.limit), "a frame does not exist")
    _check_sessions(book)
    _check_spaces(book)


def _check_node(book: Ledger, node: Node) -> None:
    book.tree.check_node(node)
    if node.state == WRITING:
        owner = node.owner
        require(isinstance(owner, Lease), "a WRITING node has no lease")
        require(node.holds > 0, "a WRITING node is not held")
        if isinstance(owner, Lease):
            require(node in owner.own(), "a WRITING node is not on its lease's path")
            require(not owner.ended, "a WRITING node's lease has ended")
    else:
        require(node.state == READY and node.owner is None, f"node of state {node.state}, owner {node.owner}")


def _check_leases(book: Ledger) -> array[int]:
    """Frames that leases keep out of the tree; each pin belongs to one lease."""
    frames = array("i")
    pins: dict[Node, int] = {}
    kept: set[Node] = set()
    doomed = quarantined = 0
    for lease in book.leases:
        require(book.sessions.by_sid.get(lease.session.sid) is lease.session, "a lease without session")
        require(lease.session.leases.get(lease.number) is lease, "a session does not know its lease")
        require(lease in lease.space.leases, "a namespace does not know its lease")
        require(not (lease.ended and lease.settled), "an ended lease that nobody can touch any more")
        require(lease.quarantined <= lease.ended, "quarantined frames of a running lease")
        require(lease.kind != LOAD or (not lease.out and lease.node is not None), "a load lease without pin")
        frames.extend(lease.out)
        if lease.quarantined:
            quarantined += len(lease.out)
        else:
            doomed += len(lease.out)
        if lease.node is not None:
            pins[lease.node] = pins.get(lease.node, 0) + 1
            at: Node | None = lease.node
            while lease.node.state == DOOMED and at is not None and at.parent is not None:
                kept.add(at)
                at = at.parent
    require(doomed == book.doomed, f"{book.doomed} DOOMED frames counted, {doomed} there")
    require(quarantined == book.quarantined, f"{book.quarantined} quarantined counted, {quarantined} there")
    for node, count in pins.items():
        require(node.pins == count, f"a node has {node.pins} pins, {count} leases pin it")
    in_trees = sum(node.pins for root in book.tree.roots for node in book.tree.walk(root))
    require(in_trees == sum(n for node, n in pins.items() if node.state != DOOMED), "a pin without lease")
    require(kept == set(book.clearing.reading()), "a page is kept that nobody reads")
    require(sum(node.count for node in kept) == book.clearing.kept, "pages kept for readers")
    for node in kept:
        require(node.state == DOOMED, "a kept node is not DOOMED")
        require(node.pins == pins.get(node, 0), "a kept node has a pin without lease")
        frames.extend(node.pages())
    return frames


def _check_sessions(book: Ledger) -> None:
    slots = [session.slot for session in book.sessions.by_sid.values()]
    require(len(set(slots)) == len(slots), "two sessions share a slot")
    for session in book.sessions.by_sid.values():
        charge = sum(lease.charge for lease in session.leases.values())
        require(charge == session.charge, f"session charged {session.charge}, its leases {charge}")
        require(not session.dead or bool(session.leases), "a dead session lingers without a lease")
        require(book.sessions.groups.get(session.group.name) is session.group, "a session without group")


def _check_spaces(book: Ledger) -> None:
    for ns, space in book.spaces.by_ns.items():
        require(space.ns == ns and space not in book.spaces.ended, "a namespace under another's name")
        require(space.root in book.tree.roots, "a namespace without tree")
    require(len(book.spaces.by_ns) == len(book.tree.roots), "a tree without namespace")
    numbers = [space.index for space in [*book.spaces.by_ns.values(), *book.spaces.ended]]
    require(len(set(numbers)) == len(numbers), "two namespaces share a number")
    for space in book.spaces.ended:
        require(not space.empty, "an ended namespace keeps its number for nothing")
