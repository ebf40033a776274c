"""Every shipped memory manager, and the example of a user's own, through the same hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.device.base import Piece
from kvtier.device.cpu import CpuCopier
from kvtier.errors import UsageError
from kvtier.memory import (
    MemoryManager,
    MLAMemoryManager,
    PagedStrategy,
    QuantizedMemoryManager,
    ReqToTokenPool,
    TaskCacheManager,
)
from own_memory import IndexedMemoryManager

LAYERS = 3
MANAGERS: dict[str, Callable[..., MemoryManager]] = {
    "mha": lambda size, **more: MemoryManager(size, torch.bfloat16, 2, 8, LAYERS, **more),
    "mla": lambda size, **more: MLAMemoryManager(size, torch.float16, 24, 8, LAYERS, **more),
    "int8": lambda size, **more: QuantizedMemoryManager(size, torch.int8, 2, 8, LAYERS, **more),
    "fp8": lambda size, **more: QuantizedMemoryManager(
        size, torch.float8_e4m3fn, 2, 8, LAYERS, group_size=4, scale_dtype=torch.float16, **more
    ),
    "fp8 e5m2": lambda size, **more: QuantizedMemoryManager(size, torch.float8_e5m2, 2, 8, LAYERS, **more),
    "own": lambda size, **more: IndexedMemoryManager(size, torch.float32, 2, 8, LAYERS, index_dim=4, **more),
}
CELL = {"mha": 192, "mla": 192, "int8": 144, "fp8": 144, "fp8 e5m2": 144, "own": 432}


@pytest.fixture(params=MANAGERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fill_with_noise(manager: MemoryManager, seed: int) -> None:
    random = np.random.default_rng(seed)
    for plane in manager.kv_buffers(4).planes:
        plane.copy_(torch.from_numpy(random.integers(0, 256, plane.shape, dtype=np.uint8)))


def test_a_cell_is_what_a_tokens_rows_take(name: str) -> None:
    manager = MANAGERS[name](10)
    buffers = manager.kv_buffers(4)
    assert sum(plane.shape[1] for plane in buffers.planes) == manager.get_cell_size() == CELL[name]
    assert all(plane.shape[0] == 11 for plane in buffers.planes)
    assert not any(plane.any() for plane in buffers.planes)


def test_each_plane_is_a_view_of_what_attention_reads(name: str) -> None:
    manager = MANAGERS[name](10)
    for layer in range(LAYERS):
        before = [plane.clone() for plane in manager.kv_buffers(4).planes]
        for part in manager.get_att_input_params(layer):
            part.view(torch.uint8)[5] = 0x55
        after = manager.kv_buffers(4)
        for plane, was, spec in zip(after.planes, before, after.layout.shards[0], strict=True):
            changed = (plane != was).any(dim=1)
            expected = [5] if spec.name.split(".")[0] == str(layer) else []
            assert torch.nonzero(changed).ravel().tolist() == expected, spec.name
            assert not changed.any() or (plane[5] == 0x55).all()


def test_pages_go_out_and_come_back_to_other_slots_with_every_byte(name: str) -> None:
    manager, other = MANAGERS[name](40), MANAGERS[name](30)
    fill_with_noise(manager, 1)
    fill_with_noise(other, 2)
    source, target = manager.kv_buffers(16), other.kv_buffers(16)
    assert source.layout == target.layout
    page = np.zeros(source.layout.shard_bytes[0], np.uint8)
    out = np.random.default_rng(3).permutation(40)[:16].astype(np.int32)
    back = np.random.default_rng(4).permutation(30)[:16].astype(np.int32)
    untouched = sorted(set(range(31)) - set(back.tolist()))
    kept = [plane[untouched].clone() for plane in target.planes]
    for buffers, piece in ((source, Piece(False, page, 0, out)), (target, Piece(True, page, 0, back))):
        copier = CpuCopier(buffers)
        assert copier.copy(piece, copier.current_stream().record()).synchronize(30)
    for one, two, was in zip(source.planes, target.planes, kept, strict=True):
        assert torch.equal(one[out.astype(np.int64)], two[back.astype(np.int64)])
        assert torch.equal(two[untouched], was)


def test_what_the_bytes_mean_is_in_the_format() -> None:
    formats = {make(10).kv_buffers(4).layout.format for make in MANAGERS.values()}
    assert len(formats) == len(MANAGERS)


def test_the_hold_slot_follows_a_resize_and_the_buffers_are_new_and_empty(name: str) -> None:
    manager = MANAGERS[name](10)
    fill_with_noise(manager, 1)
    for size in (20, 5):
        manager.resize_mem(size)
        assert size == manager.HOLD_TOKEN_MEMINDEX
        planes = manager.kv_buffers(4).planes
        assert all(plane.shape[0] == size + 1 for plane in planes)
        assert not any(plane.any() for plane in planes)


def test_a_size_can_be_taken_from_what_is_free(name: str) -> None:
    manager = MANAGERS[name](10)
    assert manager.profile_size(0.5, available_bytes=200 * CELL[name]) == (200 + 11) // 2 - 1


def test_tasks_run_over_any_of_them(name: str) -> None:
    manager = MANAGERS[name](32)
    pool = ReqToTokenPool(4, 32, manager.HOLD_TOKEN_MEMINDEX, manager.owner)
    tasks = TaskCacheManager(manager, pool, PagedStrategy(manager.allocator, 4))
    tasks.task_alloc("a", list(range(10)))
    tasks.task_cached("a", 10)
    tasks.task_free("a")
    state = tasks.task_alloc("b", list(range(10)))
    assert state is not None
    assert state.cached == 8
    tasks.check()


@pytest.mark.parametrize("name", ["int8", "fp8", "fp8 e5m2"])
def test_numbers_come_back_from_their_scales_within_the_types_precision(name: str) -> None:
    manager = MANAGERS[name](16)
    assert isinstance(manager, QuantizedMemoryManager)
    kv = (
        torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 3, 5)[:, None, None]
    )
    kv[2, 1] = 0
    slots = torch.tensor([3, 15, 0, 7, 8])
    manager.quantize(1, slots, kv)
    back = manager.dequantize(1, slots)
    largest = kv.view(5, 4, manager.groups, -1).abs().amax(-1, keepdim=True)
    error = (back - kv).view(5, 4, manager.groups, -1).abs() / largest.clamp(min=1e-9)
    assert error.max() < {"int8": 0.005, "fp8": 0.04, "fp8 e5m2": 0.08}[name]
    assert not back[2, 1].any()
    assert not manager.dequantize(1, torch.tensor([1, 2, 4, 16])).any()
    assert not manager.dequantize(0, slots).any()


def test_mla_attention_sees_latent_and_rope_key() -> None:
    manager = MLAMemoryManager(6, torch.float32, 24, 8, 2)
    latent, rope = manager.get_att_input_params(1)
    assert (tuple(latent.shape), tuple(rope.shape)) == ((7, 1, 24), (7, 1, 8))
    buffers = manager.kv_buffers(4, replica=1, replicas=4)
    assert (buffers.replica, buffers.replicas, len(buffers.layout.shards)) == (1, 4, 1)


def test_each_rank_names_its_shard_of_one_layout() -> None:
    layouts = set()
    for rank in range(4):
        buffers = MANAGERS["mha"](6).kv_buffers(shard=rank, shards=4)
        assert buffers.shard == rank
        assert len(buffers.layout.shards) == 4
        layouts.add(buffers.layout.fingerprint)
    assert len(layouts) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MLAMemoryManager(4, torch.float32, 0, 8, 1), "kv_lora_rank=0"),
        (lambda: QuantizedMemoryManager(4, torch.float32, 1, 8, 1), "expected one of"),
        (lambda: QuantizedMemoryManager(4, torch.int8, 1, 8, 1, group_size=3), "a divisor of head_dim=8"),
    ],
)
def test_what_cannot_be_made_is_said(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_hooks_that_disagree_are_found_before_a_worker_gets_the_buffers() -> None:
    class Forgot(IndexedMemoryManager):
        def get_cell_size(self) -> int:
            return 7

    class Transposed(IndexedMemoryManager):
        def _planes(self) -> Any:
            return [("k", self.k_buffer[0].transpose(0, 1))]

    with pytest.raises(UsageError, match=r"Forgot: get_cell_size\(\) says 7 bytes, its planes have 432"):
        Forgot(4, torch.float32, 2, 8, LAYERS, index_dim=4).kv_buffers(4)
    with pytest.raises(UsageError, match="expected 5 rows, one after the other"):
        Transposed(4, torch.float32, 2, 8, LAYERS, index_dim=4).kv_buffers(4)
