"""The engine's scheduler, on a tiny model, with a stand-in for the worker: where KV comes from, and
sameness."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtier.config import Options
from mini_engine.engine import Engine, Phase, Request
from tests.engine import tiny

PAGE = 16  # tokens of a host page in these tests
OPTIONS = Options(min_load_tokens=PAGE)
Pages = dict[bytes, list[np.ndarray]]
RANGE = 256  # slots of a request, where each has a fixed range
STRATEGY = {"name": "pages"}


@pytest.fixture(autouse=True, params=["pages", "ranges"])
def strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test here runs on device pages and on fixed ranges (test_device_pages.py: on pages only)."""
    monkeypatch.setitem(STRATEGY, "name", request.param)
    return str(request.param)


def engine(
    pages: Pages | None = None, *, slots: int = 512, options: Options = OPTIONS, **more: Any
) -> Engine:
    store: Pages = {} if pages is None else pages
    return Engine(
        tiny.model(),
        slots=slots,
        options=options,
        page_tokens=PAGE,
        device_page=4,
        chunk=32,
        max_tokens=min(slots, RANGE) if STRATEGY["name"] == "ranges" else None,
        make_worker=lambda buffers, **kw: tiny.HostDouble(buffers, pages=store, **kw),
        **more,
    )


def ask(on: Engine, prompt: list[int], new: int = 12, name: str = "r") -> Request:
    request = on.add(name, prompt, new, ignore_eos=True)
    on.run()
    assert request.phase is Phase.DONE
    on.tasks.check()
    return request


def same(one: Request, other: Request) -> bool:
    return one.generated == other.generated and torch.equal(one.first_logits, other.first_logits)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 129])
def test_cold_device_hit_and_host_hit_give_the_same_bits(length: int, strategy: str) -> None:
    pages: Pages = {}
    prompt = tiny.prompt(length)
    tail = (length - 1) // PAGE * PAGE
    first = engine(pages)
    cold = ask(first, prompt)
    device = ask(first, prompt)
    host = ask(engine(pages), prompt)
    assert (cold.computed, cold.from_device, cold.from_host) == (length, 0, 0)
    reused = (device.from_device, device.from_host)
    assert reused == ((tail, 0) if strategy == "pages" else (0, tail))
    assert device.computed == length - tail
    assert (host.computed, host.from_device, host.from_host) == (length - tail, 0, tail)
    assert same(cold, device)
    assert same(cold, host)


def test_bits_would_differ_if_the_tail_had_another_shape_or_the_kv_other_bytes() -> None:
    """The comparison above can fail: one wrong byte in the host's copy changes the answer's logits."""
    pages: Pages = {}
    prompt = tiny.prompt(100)
    cold = ask(engine(pages), prompt)
    next(iter(pages.values()))[0][3, 2] ^= 0x40
    assert not same(cold, ask(engine(pages), prompt))


def test_a_failed_load_uses_nothing_of_what_it_wrote() -> None:
    pages: Pages = {}
    prompt = tiny.prompt(100)
    cold = ask(engine(pages), prompt)
    broken = engine(pages)
    broken.worker.fail = True
    answer = ask(broken, prompt)
    assert (answer.from_host, answer.computed) == (0, 100)
    assert answer.miss_reason == "load failed: told to"
    assert same(cold, answer)
    assert same(cold, ask(broken, prompt))  # nor may later requests find it on the device


def test_others_decode_while_a_load_is_held_open() -> None:
    pages: Pages = {}
    prompt = tiny.prompt(100)
    cold = ask(engine(pages), prompt)
    busy = engine(pages)
    talker = busy.add("talker", tiny.prompt(20, seed=5), 40, ignore_eos=True)
    alone = ask(engine(), tiny.prompt(20, seed=5), 40)
    while talker.phase is not Phase.DECODE:
        busy.step()
    busy.worker.hold = True
    loading = busy.add("loading", prompt, 12, ignore_eos=True)
    before = len(talker.generated)
    for _ in range(10):
        busy.step()
    assert loading.phase is Phase.LOADING
    assert len(talker.generated) == before + 10
    busy.worker.hold = False
    busy.run()
    assert loading.from_host == 96
    assert loading.generated == cold.generated
    assert torch.equal(loading.first_logits, cold.first_logits)
    assert talker.generated == alone.generated


def test_a_request_cancelled_while_loading_keeps_its_pages_until_the_copy_is_final() -> None:
    pages: Pages = {}
    prompt = tiny.prompt(100)
    ask(engine(pages), prompt)
    small = engine(pages, slots=128)
    small.worker.hold = True
    loading = small.add("loading", prompt, 12)
    small.step()
    assert loading.phase is Phase.LOADING
    small.cancel(loading)
    assert "cancel loading" in small.worker.calls
    other = small.add("other", tiny.prompt(100, seed=9), 4, ignore_eos=True)
    small.step()
    assert other.phase is Phase.WAITING  # 28 slots are left: the load still writes the others
    small.worker.hold = False
    small.run()
    assert other.phase is Phase.DONE
    assert other.generated == ask(engine(), tiny.prompt(100, seed=9), 4).generated
    small.tasks.check()


def test_several_requests_at_once_answer_as_alone() -> None:
    prompts = [tiny.prompt(length, seed=length) for length in (5, 40, 70, 90, 33)]
    alone = [ask(engine(), prompt, 20).generated for prompt in prompts]
    together = engine(slots=1024)
    requests = [together.add(str(i), prompt, 20, ignore_eos=True) for i, prompt in enumerate(prompts)]
    batches = []
    while together.busy:
        together.step()
        batches.append(sum(request.phase is Phase.DECODE for request in requests))
    assert [request.generated for request in requests] == alone
    assert max(batches) >= 3


def test_an_offload_that_was_refused_is_tried_again() -> None:
    pages: Pages = {}
    one = engine(pages)
    one.worker.refuse_offloads = 4
    ask(one, tiny.prompt(100), 12)
    assert len(pages) == 6


def test_cancelling_a_waiting_request_gives_back_what_was_asked_for_it() -> None:
    one = engine()
    request = one.add("r", tiny.prompt(30), 4)
    one.cancel(request)
    assert one.worker.calls == ["ask", "cancel r"]
    assert not one.busy
    one.cancel(request)  # nothing more


def test_a_prompt_is_shared_before_its_prefill_has_ended() -> None:
    pages: Pages = {}
    one = engine(pages)
    one.add("long", tiny.prompt(200), 4)
    one.step()
    one.step()
    assert len(pages) == 4  # two chunks of 32 tokens, in pages of 16


def test_generated_tokens_are_offloaded_only_when_that_is_chosen() -> None:
    counts = {}
    for write in ("off", "prompt", "all"):
        pages: Pages = {}
        one = engine(pages, options=Options(min_load_tokens=PAGE, write=write))
        first = ask(one, tiny.prompt(40), 40)
        counts[write] = len(pages)
        turn = tiny.prompt(40) + first.generated + tiny.prompt(10, seed=3)
        next_turn = ask(engine(pages, options=Options(min_load_tokens=PAGE)), turn)
        assert next_turn.from_host == counts[write] * PAGE
    assert counts == {"off": 0, "prompt": 2, "all": 4}  # 79 of 80 tokens have KV: four whole pages


def test_a_lookup_that_is_not_answered_yet_is_asked_again() -> None:
    pages: Pages = {}
    ask(engine(pages), tiny.prompt(100))
    slow = engine(pages)
    slow.worker.delay_lookups = 3
    assert ask(slow, tiny.prompt(100)).from_host == 96


def test_the_end_of_sequence_ends_an_answer() -> None:
    prompt = tiny.prompt(30)
    free = ask(engine(), prompt, 12)
    stopping = engine()
    stopping.model.config = tiny.replace_eos(free.generated[5])
    request = stopping.add("r", prompt, 12)
    stopping.run()
    assert request.generated == free.generated[: free.generated.index(free.generated[5]) + 1]


@pytest.mark.parametrize("length", [0, 512, 2000])
def test_a_prompt_that_can_never_run_is_refused_at_once(length: int, strategy: str) -> None:
    one = engine()
    with pytest.raises(ValueError, match=f"room for {512 if strategy == 'pages' else RANGE} tokens"):
        one.add("r", [1] * length, 4)
    assert not one.busy


def test_an_id_in_use_is_refused() -> None:
    one = engine()
    one.add("r", [1, 2, 3], 4)
    with pytest.raises(ValueError, match="running already"):
        one.add("r", [1, 2, 3], 4)


def test_an_answer_ends_where_the_device_does() -> None:
    request = ask(engine(slots=64), tiny.prompt(60), 100)
    assert len(request.generated) == 4


def test_ranges_share_nothing_on_the_device_and_everything_through_the_host(strategy: str) -> None:
    pages: Pages = {}
    one = engine(pages)
    first, second = (one.add(str(i), tiny.prompt(100), 12, ignore_eos=True) for i in range(2))
    third = one.add("third", tiny.prompt(100), 12, ignore_eos=True)
    one.run()
    assert first.generated == second.generated == third.generated
    if strategy == "ranges":
        assert (third.from_device, third.from_host) == (0, 96)  # no range was free when the others began
        assert one.tasks.stats()["ranges"] == one.tasks.stats()["ranges_free"] == 512 // RANGE
    one.tasks.check()
