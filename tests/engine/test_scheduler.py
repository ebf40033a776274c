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
def test_cold_device_hit_and_host_hit_give_the_same_bits(length: int) -> None:
    pages: Pages = {}
    prompt = tiny.prompt(length)
    tail = (length - 1) // PAGE * PAGE
    first = engine(pages)
    cold = ask(first, prompt)
    device = ask(first, prompt)
    host = ask(engine(pages), prompt)
    assert (cold.computed, cold.from_device, cold.from_host) == (length, 0, 0)
    assert (device.computed, device.from_device, device.from_host) == (length - tail, tail, 0)
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


def test_a_partial_device_hit_is_completed_from_the_host_from_inside_a_page() -> None:
    pages: Pages = {}
    prompt = tiny.prompt(100)
    other = engine(pages)
    cold = ask(other, prompt)
    short = engine(pages)
    ask(short, prompt[:22], name="beginning")  # 20 tokens in whole device pages of 4, 16 in host pages
    mixed = ask(short, prompt)
    assert (mixed.from_device, mixed.from_host, mixed.computed) == (20, 76, 4)
    # Tokens 16 to 19 were computed in a chunk of another shape: equal up to rounding.
    assert mixed.generated == cold.generated
    assert torch.allclose(cold.first_logits, mixed.first_logits, atol=1e-4)


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


def test_a_shortage_of_slots_preempts_the_youngest_and_changes_no_answer() -> None:
    prompts = [tiny.prompt(60, seed=seed) for seed in range(4)]
    alone = [ask(engine(), prompt, 50).generated for prompt in prompts]
    tight = engine(slots=256)
    requests = [tight.add(str(i), prompt, 50, ignore_eos=True) for i, prompt in enumerate(prompts)]
    tight.run()
    assert [request.generated for request in requests] == alone
    assert requests[0].preempted == 0
    assert sum(request.preempted for request in requests) > 0
    tight.tasks.check()


def test_a_preempted_request_comes_back_before_later_ones() -> None:
    tight = engine(slots=128)
    first, second, third = (tight.add(str(i), tiny.prompt(50, seed=i), 40, ignore_eos=True) for i in range(3))
    while not second.preempted:
        tight.step()
    assert list(tight.waiting) == [second, third]
    tight.run()
    assert all(len(request.generated) == 40 for request in (first, second, third))


def test_what_a_preemption_cancelled_is_offloaded_after_all() -> None:
    pages: Pages = {}
    tight = engine(pages, slots=128)
    tight.worker.queued = []
    _, second = (tight.add(str(i), tiny.prompt(50, seed=i), 40, ignore_eos=True) for i in range(2))
    while not second.preempted:
        tight.step()
    tight.worker.copy_offloads()
    tight.run()
    assert ask(engine(pages), tiny.prompt(50, seed=1)).from_host == 48


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


def test_a_chats_next_turn_finds_the_generated_tokens_on_the_device() -> None:
    one = engine()
    first = ask(one, tiny.prompt(40), 40)
    turn = ask(one, tiny.prompt(40) + first.generated + tiny.prompt(20, seed=3))
    assert turn.from_device == 76  # whole device pages of 4 among the 79 tokens that were inputs


def test_an_emptied_device_cache_is_cold() -> None:
    one = engine(options=Options(write="off"))
    cold = ask(one, tiny.prompt(100))
    assert one.flush_device() > 0
    again = ask(one, tiny.prompt(100))
    assert (again.from_device, again.computed) == (0, 100)
    assert same(cold, again)


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
def test_a_prompt_that_can_never_run_is_refused_at_once(length: int) -> None:
    one = engine()
    with pytest.raises(ValueError, match="room for 512 tokens"):
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
