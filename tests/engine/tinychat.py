"""A tiny model in a folder as `mini_engine.weights.prepare` makes it, for the demo's processes: no download,
no conversion, and a KV of 16 KiB a token, so that a host page has 64 tokens as with the real model.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mini_engine.model import ModelConfig
from tests.engine import tiny

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONFIG = ModelConfig(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=2048,
    eos_token_id=2,
)


def make(folder: Path) -> Path:
    """Fill `folder`; a token is a byte."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tiny.weights(CONFIG), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(CONFIG)))
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
