"""A naive shared table: applies the core's writes one by one and holds them to R14-R16."""

from __future__ import annotations

from kvtier.core import writes as w


class NaiveTable:
    def __init__(self, frames: int) -> None:
        self.state = [w.FREE] * frames
        self.key: list[bytes] = [b""] * frames
        self.parent = [0] * frames
        self.tag: list[bytes] = [b""] * frames
        self.lease = [-1] * frames
        self.leases: dict[int, w.LeaseRecord] = {}
        self.sessions: dict[int, w.SessionRecord] = {}
        self.spaces: dict[int, w.EpochRecord] = {}
        self.pool_epoch = w.PoolEpoch(1, 1)

    def apply(self, writes: list[w.Write]) -> None:
        for write in writes:
            getattr(self, "on_" + type(write).__name__)(write)

    def _move(self, frames, allowed: set[int], state: int) -> None:
        assert frames.typecode == "i"
        assert len(set(frames)) == len(frames) > 0
        for frame in frames:
            assert self.state[frame] in allowed, (frame, self.state[frame], state)
            self.state[frame] = state

    def on_Free(self, write: w.Free) -> None:
        self._move(write.frames, {w.WRITING, w.READY, w.DOOMED, w.QUARANTINED}, w.FREE)

    def on_Claim(self, write: w.Claim) -> None:
        assert len(write.keys) == 32 * len(write.frames) > 0
        assert len(write.parent_tag) == 8
        assert 0 <= write.stamp < 1 << 32
        self._move(write.frames, {w.FREE}, w.WRITING)
        parent, tag = write.parent_frame, write.parent_tag
        for at, frame in enumerate(write.frames):
            self.key[frame] = write.keys[32 * at : 32 * at + 32]
            self.parent[frame], self.tag[frame], self.lease[frame] = parent, tag, write.lease
            parent, tag = frame, self.key[frame][:8]

    def on_Ready(self, write: w.Ready) -> None:
        seen: set[int] = set()
        for frame in write.frames:  # heads before tails
            parent = self.parent[frame]
            assert parent not in write.frames or parent in seen
            seen.add(frame)
        self._move(write.frames, {w.WRITING}, w.READY)

    def on_Doom(self, write: w.Doom) -> None:
        for frame in write.frames:
            if self.state[frame] == w.READY:
                self.lease[frame] = -1  # what readers keep is no store's any more
        self._move(write.frames, {w.WRITING, w.READY}, w.DOOMED)

    def on_Quarantine(self, write: w.Quarantine) -> None:
        self._move(write.frames, {w.WRITING, w.DOOMED}, w.QUARANTINED)

    def on_Reparent(self, write: w.Reparent) -> None:
        old = self.parent[write.frame]
        assert self.key[old] == self.key[write.parent_frame]
        self.parent[write.frame] = write.parent_frame

    def on_LeaseRecord(self, write: w.LeaseRecord) -> None:
        old = self.leases.get(write.lease)
        assert old is None or (old.sid, old.number) == (write.sid, write.number)
        self.leases[write.lease] = write

    def on_LeaseEnd(self, write: w.LeaseEnd) -> None:
        del self.leases[write.lease]
        held = {w.WRITING, w.DOOMED, w.QUARANTINED}
        for frame, lease in enumerate(self.lease):
            assert lease != write.lease or self.state[frame] not in held, "a frame lost its lease"

    def on_SessionRecord(self, write: w.SessionRecord) -> None:
        assert write.slot not in self.sessions
        assert len(write.group_hash) == 8
        self.sessions[write.slot] = write

    def on_SessionNumber(self, write: w.SessionNumber) -> None:
        assert write.last_number > self.sessions[write.slot].last_number
        self.sessions[write.slot] = self.sessions[write.slot]._replace(last_number=write.last_number)

    def on_SessionEnd(self, write: w.SessionEnd) -> None:
        gone = self.sessions.pop(write.slot)
        assert all(record.sid != gone.sid for record in self.leases.values()), "a lease without session"

    def on_EpochRecord(self, write: w.EpochRecord) -> None:
        assert write.ns_index not in self.spaces
        for frame, parent in enumerate(self.parent):
            assert self.state[frame] == w.FREE or parent != -1 - write.ns_index, (
                "number in use by an old page"
            )
        self.spaces[write.ns_index] = write

    def on_NamespaceEnd(self, write: w.NamespaceEnd) -> None:
        del self.spaces[write.ns_index]

    def on_PoolEpoch(self, write: w.PoolEpoch) -> None:
        assert write.counter >= self.pool_epoch.counter
        assert write.absent >= self.pool_epoch.absent
        self.pool_epoch = write

    def visible(self) -> set[tuple[bytes, bytes]]:
        """(ns, key) of every page that a rebuild would find: READY under a root or such a page (R17)."""
        accepted = {-1 - index: (record.ns, record.ns[:8]) for index, record in self.spaces.items()}
        pages: set[tuple[bytes, bytes]] = set()
        found = True
        while found:
            found = False
            for frame, state in enumerate(self.state):
                above = accepted.get(self.parent[frame])
                if frame in accepted or state != w.READY or above is None:
                    continue
                if self.tag[frame] != above[1]:
                    continue  # left behind by a flush, under a frame that has another page now
                accepted[frame] = (above[0], self.key[frame][:8])
                pages.add((above[0], self.key[frame]))
                found = True
        return pages
