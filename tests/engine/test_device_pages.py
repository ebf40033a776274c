"""What the engine does on device pages only: sharing of prefixes, and preemption when pages are few."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvtier.config import Options
from tests.engine import tiny
from tests.engine.test_scheduler import Pages, ask, engine, same


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
