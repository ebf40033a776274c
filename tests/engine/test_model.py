"""The forward pass: logits as transformers computes them on the same weights, in any chunking and order of
slots."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from mini_engine.model import Llama, ModelConfig, Span
from tests.engine import tiny


def transformers_logits(config: ModelConfig, weights: dict, tokens: torch.Tensor) -> torch.Tensor:
    """[tokens, vocab] of `LlamaForCausalLM` with `weights`."""
    transformers = pytest.importorskip("transformers")
    numbers = dataclasses.asdict(config)
    theta = numbers.pop("rope_theta")
    for name in ("name", "revision", "eos_token_id"):
        del numbers[name]
    theirs = transformers.LlamaConfig(
        **numbers,
        rope_theta=theta,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    model = transformers.LlamaForCausalLM(theirs)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    with torch.inference_mode():
        return model.eval()(tokens[None]).logits[0]


def in_chunks(model: Llama, tokens: torch.Tensor, chunks: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Logits at the end of each chunk, with slots in random order."""
    config = model.config
    size = len(tokens) + 7
    buffer = torch.full(
        (config.num_hidden_layers, size, 2 * config.num_key_value_heads, config.head_dim), torch.nan
    )
    slots = torch.randperm(size, generator=torch.Generator().manual_seed(seed))[: len(tokens)]
    out, start = [], 0
    for rows in chunks:
        end = start + rows
        logits = model.forward(
            tokens[start:end],
            torch.arange(start, end),
            slots[start:end],
            [Span(rows, slots[:end])],
            buffer.__getitem__,
        )
        out.append(logits[0])
        start = end
    return out


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunks", [[40], [32, 8], [1] * 40, [16, 1, 23]])
def test_logits_agree_with_transformers(chunks: list[int], tied: bool) -> None:
    weights = tiny.weights()
    if not tied:
        weights["lm_head.weight"] = tiny.weights(seed=7)["model.embed_tokens.weight"]
    tokens = torch.tensor(tiny.prompt(40))
    expected = transformers_logits(tiny.CONFIG, weights, tokens)
    ends = torch.tensor(chunks).cumsum(0) - 1
    torch.testing.assert_close(
        torch.stack(in_chunks(Llama(tiny.CONFIG, weights), tokens, chunks)),
        expected[ends],
        atol=2e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (12, 4)])
def test_logits_agree_for_every_grouping_of_heads(heads: int, kv_heads: int) -> None:
    config = dataclasses.replace(
        tiny.CONFIG,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rope_theta=100000.0,
        rms_norm_eps=1e-6,
    )
    weights = tiny.weights(config)
    tokens = torch.tensor(tiny.prompt(30))
    expected = transformers_logits(config, weights, tokens)
    (logits,) = in_chunks(Llama(config, weights), tokens, [30])
    torch.testing.assert_close(logits, expected[-1], atol=2e-5, rtol=1e-4)


def test_the_slots_order_changes_no_bit() -> None:
    model, tokens = tiny.model(), torch.tensor(tiny.prompt(50))
    one, other = (in_chunks(model, tokens, [32, 17, 1], seed=seed) for seed in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sequences_in_one_call_do_not_see_one_another() -> None:
    model = tiny.model()
    config = model.config
    prompts = [torch.tensor(tiny.prompt(length, seed=length)) for length in (9, 14, 5)]
    buffer = torch.zeros(config.num_hidden_layers, 64, 2 * config.num_key_value_heads, config.head_dim)
    slots = torch.arange(28).split([9, 14, 5])
    together = model.forward(
        torch.cat(prompts),
        torch.cat([torch.arange(len(prompt)) for prompt in prompts]),
        torch.cat(slots),
        [Span(len(part), part) for part in slots],
        buffer.__getitem__,
    )
    for prompt, logits in zip(prompts, together, strict=True):
        (alone,) = in_chunks(model, prompt, [len(prompt)])
        torch.testing.assert_close(logits, alone, atol=2e-5, rtol=1e-4)
