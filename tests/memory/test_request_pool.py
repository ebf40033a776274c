"""The slot table's mirror on the device: up to date behind `sync`, in one write, and never ahead of it."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.errors import UsageError
from kvtier.memory import ReqToTokenPool

ROWS, LENGTH, HOLD = 3, 8, 99


def mirrored(device: str = "cpu") -> ReqToTokenPool:
    table = torch.zeros((ROWS, LENGTH), dtype=torch.int32, device=device)
    return ReqToTokenPool(ROWS, LENGTH, HOLD, table=table)


class MirrorMachine(RuleBasedStateMachine):
    """A mirrored table against lists; the mirror is looked at after every sync, and must not move between."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = mirrored()
        self.rows: dict[int, list[int]] = {}
        self.seen = [[HOLD] * LENGTH for _ in range(ROWS)]

    def expected(self) -> list[list[int]]:
        rows = [self.rows.get(row, []) for row in range(ROWS)]
        return [row + [HOLD] * (LENGTH - len(row)) for row in rows]

    @rule()
    def begin(self) -> None:
        row = self.pool.alloc()
        assert (row is None) == (len(self.rows) == ROWS)
        if row is not None:
            self.rows[row] = []

    @rule(data=st.data(), slots=st.lists(st.integers(0, HOLD - 1), max_size=LENGTH))
    def write(self, data: st.DataObject, slots: list[int]) -> None:
        if self.rows:
            row = data.draw(st.sampled_from(sorted(self.rows)))
            start = data.draw(st.integers(0, len(self.rows[row])))
            slots = slots[: LENGTH - start]
            self.pool.write(row, start, np.array(slots, np.int32))
            self.rows[row][start : start + len(slots)] = slots

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.rows:
            row = data.draw(st.sampled_from(sorted(self.rows)))
            self.pool.free(row)
            del self.rows[row]

    @rule()
    def sync(self) -> None:
        assert self.pool.sync() is self.pool.table
        self.seen = self.expected()

    @invariant()
    def agrees(self) -> None:
        self.pool.check()
        assert self.pool.host.tolist() == self.expected()
        assert self.pool.table.tolist() == self.seen


TestMirrorMachine = MirrorMachine.TestCase


def test_on_the_cpu_master_and_mirror_are_one_memory() -> None:
    pool = ReqToTokenPool(ROWS, LENGTH, HOLD)
    row = pool.alloc()
    assert row is not None
    pool.write(row, 0, np.array([4, 5], np.int32))
    assert pool.table[row].tolist() == [4, 5] + [HOLD] * 6
    assert pool.sync() is pool.table


def test_all_changes_go_out_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = mirrored()
    writes: list[int] = []
    write = torch.Tensor.index_copy_

    def counted(table: torch.Tensor, dim: int, places: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        writes.append(len(places))
        return write(table, dim, places, slots)

    monkeypatch.setattr(torch.Tensor, "index_copy_", counted)
    rows = [pool.alloc() for _ in range(ROWS)]
    for row in rows:
        assert row is not None
        pool.write(row, 0, np.arange(5, dtype=np.int32))
        pool.write(row, 5, np.arange(2, dtype=np.int32))
    pool.sync()
    pool.sync()
    assert writes == [7 * ROWS]
    assert torch.equal(pool.table, torch.from_numpy(pool.host))


def test_the_engines_own_table_is_written_in_place() -> None:
    pool = mirrored()
    table, address = pool.table, pool.table.data_ptr()
    assert (table == HOLD).all()  # nowhere is never a real slot, from the start (W20)
    row = pool.alloc()
    assert row is not None
    pool.write(row, 0, np.array([1], np.int32))
    pool.sync()
    assert table[row, 0] == 1
    assert table.data_ptr() == address


def test_the_hold_slot_moves_only_when_no_row_is_in_use() -> None:
    pool = mirrored()
    row = pool.alloc()
    assert row is not None
    pool.write(row, 0, np.array([1], np.int32))
    with pytest.raises(UsageError, match="1 rows are in use"):
        pool.move_hold_slot(7)
    assert pool.hold_slot == HOLD
    pool.free(row)
    pool.move_hold_slot(7)
    assert (pool.host == 7).all()
    assert (pool.sync() == 7).all()
    pool.check()


@pytest.mark.parametrize(
    "table",
    [
        torch.zeros((ROWS, LENGTH + 1), dtype=torch.int32),
        torch.zeros((ROWS, LENGTH), dtype=torch.int64),
        torch.zeros((LENGTH, ROWS), dtype=torch.int32).T,
    ],
)
def test_a_table_that_cannot_be_the_mirror_is_refused(table: torch.Tensor) -> None:
    with pytest.raises(UsageError, match=r"expected torch\.int32"):
        ReqToTokenPool(ROWS, LENGTH, HOLD, table=table)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_master_may_be_changed_while_the_mirror_is_being_written() -> None:
    pool = ReqToTokenPool(64, 4096, HOLD, device="cuda")
    rows = [row for _ in range(64) if (row := pool.alloc()) is not None]
    for row in rows:
        pool.write(row, 0, np.full(4096, row, np.int32))
    table = pool.sync().clone()
    for row in rows:
        pool.free(row)
    assert all((table[row] == row).all() for row in rows)
    assert (pool.sync() == HOLD).all()
