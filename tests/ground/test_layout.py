"""Layouts: sizes that are exact, geometry that decides who may share, and errors that name the plane."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.keys import Namespace
from kvtier.layout import KVLayout, Plane, default_page_tokens


def test_sizes_of_a_page() -> None:
    layout = KVLayout(
        page_tokens=64,
        shards=(
            (Plane("0.kv", 1536), Plane("0.scale", 8, unit_tokens=32)),
            (Plane("1.kv", 100),),
        ),
        format="test",
    )
    assert layout.plane_bytes(layout.shards[0][1]) == 16
    assert layout.plane_offsets(0) == (0, 64 * 1536)
    assert layout.shard_bytes == (102400, 8192), "98,320 and 6,400 bytes, each rounded up to 4 KiB"
    assert layout.page_bytes == 110592
    assert layout.geometry == (64, 102400, 8192)
    assert layout.unit_tokens == 1


def test_geometry_is_what_must_agree_and_the_fingerprint_tells_all_apart() -> None:
    def of(row: int = 4096, name: str = "kv", form: str = "a", unit: int = 1) -> KVLayout:
        return KVLayout(16, ((Plane(name, row, unit),),), form)

    assert of().geometry == of(name="other", form="b").geometry
    assert of().geometry == of(row=8192, unit=2).geometry
    prints = {of().fingerprint, of(row=8192).fingerprint, of(name="k").fingerprint, of(form="b").fingerprint}
    prints |= {of(row=8192, unit=2).fingerprint}
    assert len(prints) == 5
    assert of().fingerprint == of().fingerprint
    assert of().fingerprint.hex() == "0a07a1d92936d192fcba0534e198f4613c8dc6ff46347893fd09c2d68632af18", (
        "a fingerprint is in every stored key: it may not change by accident"
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plane("", 8), "name"),
        (lambda: Plane("kv", 0), "row_bytes=0"),
        (lambda: KVLayout(0, ((Plane("kv", 8),),), "f"), "page_tokens=0"),
        (lambda: KVLayout(16, (), "f"), "at least one shard"),
        (lambda: KVLayout(16, ((),), "f"), "at least one plane"),
        (lambda: KVLayout(16, ((Plane("kv", 8), Plane("kv", 8)),), "f"), "names must differ"),
        (lambda: KVLayout(16, ((Plane("kv", 8, 3),),), "f"), "'kv'.*divide page_tokens=16"),
    ],
)
def test_layouts_that_cannot_be_are_refused(make, message) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


@given(token_bytes=st.integers(1, 1 << 24), unit=st.integers(1, 600))
def test_default_page_is_the_smallest_that_is_large_enough(token_bytes: int, unit: int) -> None:
    tokens = default_page_tokens(token_bytes, unit)
    assert tokens % unit == 0
    assert tokens <= max(512, unit)
    enough = [n for n in range(unit, 513, unit) if n >= 64 and n * token_bytes >= 1 << 20]
    if enough:
        assert tokens == enough[0]
    else:
        assert tokens + unit > 512, "nothing is large enough: the largest allowed"


def test_default_page_for_known_models() -> None:
    assert default_page_tokens(46080) == 64, "SmolLM2-135M in float32"
    assert default_page_tokens(131072) == 64, "an 8B model with 8 KV heads in bf16"
    assert default_page_tokens(1000, 16) == 512
    with pytest.raises(LayoutError):
        default_page_tokens(0)


def test_a_layouts_namespace_carries_its_format_and_fingerprint() -> None:
    layout = KVLayout(16, ((Plane("kv", 8),),), "engine/1 bf16")
    made = layout.namespace("model", revision="r2", adapter="lora", salt=b"tenant")
    assert made == Namespace("model", "r2", "engine/1 bf16", layout.fingerprint, "lora", b"tenant")
    assert layout.namespace("model") == Namespace("model", format="engine/1 bf16", layout=layout.fingerprint)
