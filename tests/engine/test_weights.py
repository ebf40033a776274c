"""GGUF to safetensors: what is read is what transformers would compute with; conversion is whole or not
there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")

from mini_engine import weights
from mini_engine.model import Llama
from tests.engine import tiny

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "2", "\u0120", "\u010a"]


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k (its own formula)."""
    return (
        rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
        .swapaxes(1, 2)
        .reshape(rows.shape)
    )


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """The tiny model as llama.cpp's converter would write it, in float32."""
    config, path = tiny.CONFIG, tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(2)
    back = {theirs: ours for ours, theirs in weights._LAYER_NAMES.items()}
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for name, tensor in tiny.weights().items():
        array = tensor.numpy()
        if name.endswith("q_proj.weight"):
            array = permute(array, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            array = permute(array, config.num_key_value_heads)
        if name not in top:
            _, _, layer, rest = name.split(".", 3)
            writer.add_tensor(
                f"blk.{layer}.{back[rest.removesuffix('.weight')]}.weight", np.ascontiguousarray(array)
            )
        else:
            writer.add_tensor(top[name], array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_converted_model_has_the_weights_that_it_was_made_from(tiny_gguf: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = weights.prepare(tiny_gguf, tmp_path / "cache", lambda done, total: steps.append((done, total)))
    model = Llama.load(folder)
    expected = Llama(tiny.CONFIG, tiny.weights())
    assert model.config.head_dim == tiny.CONFIG.head_dim
    assert model.config.eos_token_id == 2
    assert torch.equal(model.embed, expected.embed)
    for ours, theirs in zip(model.layers, expected.layers, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    total = len(tiny.weights())
    assert steps == [(done, total) for done in range(total + 1)]


def test_the_tokenizer_is_kept_beside(tiny_gguf: Path, tmp_path: Path) -> None:
    tokenizer = weights.load_tokenizer(weights.prepare(tiny_gguf, tmp_path / "cache"))
    assert tokenizer.encode("ab12<|im_end|>ba").tokens == ["ab", "1", "2", "<|im_end|>", "b", "a"]
    assert tokenizer.decode([5, 6, 3]) == "ab1a"


def test_the_second_start_converts_nothing(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = weights.prepare(tiny_gguf, tmp_path / "cache")
    before = (folder / "model.safetensors").stat().st_mtime_ns

    def converted(done: int, total: int) -> None:
        raise AssertionError("converted again")

    assert weights.prepare(tiny_gguf, tmp_path / "cache", converted) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("at", [0, 7, 29])
def test_an_interrupted_conversion_leaves_nothing(tiny_gguf: Path, tmp_path: Path, at: int) -> None:
    cache = tmp_path / "cache"

    def interrupt(done: int, total: int) -> None:
        if done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weights.prepare(tiny_gguf, cache, interrupt)
    assert list(cache.iterdir()) == []
    assert json.loads((weights.prepare(tiny_gguf, cache) / "config.json").read_text())["vocab_size"] == 300


def test_what_a_killed_conversion_left_is_replaced(tiny_gguf: Path, tmp_path: Path) -> None:
    folder = weights.prepare(tiny_gguf, tmp_path / "cache")
    (folder / "config.json").unlink()
    (folder / "model.safetensors").write_bytes(b"half")
    partial = tmp_path / "cache" / f".{folder.name}.{2**22 + 1}"  # above every process id
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert weights.prepare(tiny_gguf, tmp_path / "cache") == folder
    Llama.load(folder)
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="'mamba', expected 'llama'"):
        weights.prepare(tmp_path / "other.gguf", tmp_path / "cache")
