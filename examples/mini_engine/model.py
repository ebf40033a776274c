"""A Llama-type model on torch, float32: RMSNorm, RoPE, grouped-query attention, SwiGLU.

Attention reads and writes the KV where it lies: in the slots of a paged buffer `[slots, 2 * kv_heads,
head_dim]` per layer, keys before values (`kvtier.memory.MemoryManager`). The model knows no requests: it
gets rows of tokens and, for each sequence among them, the slots of its context.

What each number of a result depends on: the row's own tokens, the bytes of its context, and the *shapes* of
the call (a matrix product may sum in another order for another number of rows). So the same call on the same
bytes gives the same bits, wherever the KV came from.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

KVOfLayer = Callable[[int], Tensor]
"""layer -> its KV buffer, [slots, 2 * kv_heads, head_dim]; keys first."""


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a Llama-type model, named as transformers names them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    eos_token_id: int = -1
    name: str = "tiny"
    revision: str = ""

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """From `config.json` in `folder`."""
        values = json.loads((folder / "config.json").read_text())
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


@dataclass(frozen=True)
class Span:
    """One sequence's part of a call: its last `rows` tokens, after which its context is all of `slots`."""

    rows: int
    slots: Tensor  # int64 [context]: the slot of each position up to and including the last row


class Llama:
    """The weights (transformers' names) and the forward pass."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.embed = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed)  # tied where the file has none
        self.norm = weights["model.norm.weight"]
        self.layers = [
            {
                name[len(prefix) : -len(".weight")]: weight
                for name, weight in weights.items()
                if name.startswith(prefix)
            }
            for prefix in (f"model.layers.{layer}." for layer in range(config.num_hidden_layers))
        ]
        half = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
        self.cos, self.sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))

    @classmethod
    def load(cls, folder: Path) -> Llama:
        """From `model.safetensors` and `config.json` in `folder`; the file is mapped, not read."""
        from safetensors.torch import load_file

        return cls(ModelConfig.read(folder), load_file(folder / "model.safetensors"))

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, write: Tensor, spans: Sequence[Span], kv: KVOfLayer
    ) -> Tensor:
        """Run `tokens`, write their KV, and return the logits of each span's last row, [spans, vocab].

        `tokens`, `positions`, `write`: int64 [rows], the spans' rows one after the other. `write` is the
        slot that each row's KV goes to (the hold slot where it must not be written). `spans`: every slot a
        context names holds valid KV, or is written by this call.
        """
        cfg = self.config
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        sizes = [span.rows for span in spans]
        masks = [_causal_mask(span.rows, len(span.slots)) for span in spans]
        hidden = F.embedding(tokens, self.embed)
        for number, layer in enumerate(self.layers):
            buffer = kv(number)
            normed = F.rms_norm(hidden, (cfg.hidden_size,), layer["input_layernorm"], cfg.rms_norm_eps)
            query, key, value = (
                F.linear(normed, layer[f"self_attn.{name}_proj"]).view(len(tokens), -1, cfg.head_dim)
                for name in "qkv"
            )
            buffer.index_copy_(0, write, torch.cat((_rotate(key, cos, sin), value), dim=1))
            query = _rotate(query, cos, sin)
            mixed = []
            for rows, span, mask in zip(torch.split(query, sizes), spans, masks, strict=True):
                mixed.append(_attend(rows, buffer.index_select(0, span.slots), mask))
            hidden = hidden + F.linear(torch.cat(mixed), layer["self_attn.o_proj"])
            normed = F.rms_norm(
                hidden, (cfg.hidden_size,), layer["post_attention_layernorm"], cfg.rms_norm_eps
            )
            gate = F.silu(F.linear(normed, layer["mlp.gate_proj"]))
            hidden = hidden + F.linear(gate * F.linear(normed, layer["mlp.up_proj"]), layer["mlp.down_proj"])
        ends = torch.tensor(sizes).cumsum(0) - 1
        last = F.rms_norm(hidden[ends], (cfg.hidden_size,), self.norm, cfg.rms_norm_eps)
        return F.linear(last, self.head)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [rows, heads, head_dim], halves rotated (transformers' convention)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _causal_mask(rows: int, context: int) -> Tensor | None:
    """[rows, context], added to the scores: -inf where a row may not see a key. None for one row, which sees
    all."""
    if rows == 1:
        return None
    return torch.full((rows, context), -torch.inf).triu(context - rows + 1)


def _attend(query: Tensor, kv: Tensor, mask: Tensor | None) -> Tensor:
    """[rows, heads, dim] over [context, 2 * kv_heads, dim] -> [rows, heads * dim].

    KV heads take the batch dimension. The query heads that share one take the head dimension, for which
    keys and values are expanded, not copied; for a single row they stand in as rows, so that keys are read
    once.
    """
    rows, heads, dim = query.shape
    kv_heads = kv.shape[1] // 2
    group = heads // kv_heads
    key, value = (part.transpose(0, 1)[:, None] for part in kv.chunk(2, dim=1))
    if rows == 1:
        out = F.scaled_dot_product_attention(query.view(kv_heads, 1, group, dim), key, value)
        return out.reshape(1, heads * dim)
    key, value = key.expand(-1, group, -1, -1), value.expand(-1, group, -1, -1)
    grouped = query.view(rows, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(rows, heads * dim)
