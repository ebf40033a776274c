"""A tiny seeded Llama, and a stand-in for the worker that keeps pages in a dictionary."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from kvtier.config import Options
from kvtier.device.base import KVBuffers
from kvtier.keys import KEY_BYTES, PageChain
from kvtier.tasks import Hit, LoadTask, OffloadTask, Task, TaskState
from mini_engine.model import Llama, ModelConfig

CONFIG = ModelConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=1024,
)


def weights(config: ModelConfig = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under transformers' names, embeddings tied."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    found = {
        "model.embed_tokens.weight": normal(config.vocab_size, hidden),
        "model.norm.weight": 1 + normal(hidden),
    }
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config.num_hidden_layers):
        for name, shape in shapes.items():
            found[f"model.layers.{layer}.{name}.weight"] = normal(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"model.layers.{layer}.{name}.weight"] = 1 + normal(hidden)
    return found


def model() -> Llama:
    return Llama(CONFIG, weights())


def prompt(length: int, seed: int = 1) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


class HostDouble:
    """`Worker`'s face over a dictionary that several engines may share (`pages`).

    `hold`: loads do not finish until `finish_loads()`. `fail`: they then fail. `delay_lookups`: so many are
    not answered at first. `refuse_offloads`: so many find the host full. `queued`: a list, and offloads wait
    in it until `copy_offloads()`, or are cancelled.
    """

    def __init__(
        self,
        buffers: KVBuffers,
        *,
        run_dir: object = None,
        options: Options,
        pages: dict[bytes, list[np.ndarray]],
    ) -> None:
        self.buffers, self.pages, self.options = buffers, pages, options
        self.page_tokens = buffers.layout.page_tokens
        self.planes = [plane.numpy() for plane in buffers.planes]
        self.hold = self.fail = False
        self.delay_lookups = 0
        self.refuse_offloads = 0
        self.queued: list[tuple[OffloadTask, bytes]] | None = None
        self.held: list[tuple[LoadTask, bytes]] = []
        self.queue: list[Task] = []
        self.chains: dict[str, PageChain] = {}
        self.calls: list[str] = []
        self.ids = 0
        self.closed = False

    def ask(self, request: str, chain: PageChain) -> None:
        self.calls.append("ask")

    def lookup(self, request: str, chain: PageChain, computed: int, limit: int | None = None) -> Hit | None:
        if self.delay_lookups:
            self.delay_lookups -= 1
            return None
        known = 0
        keys = chain.keys
        while known < chain.pages and keys[known * KEY_BYTES : (known + 1) * KEY_BYTES] in self.pages:
            known += 1
        end = min(known * self.page_tokens, chain.tokens - 1 if limit is None else limit)
        self.chains[request] = chain
        if end - computed < max(1, self.options.min_load_tokens):
            return Hit(computed, 0, "miss", request)
        return Hit(computed, end - computed, "", request)

    def load(self, hit: Hit, units: np.ndarray) -> LoadTask:
        assert len(units) == hit.tokens
        self.ids += 1
        task = LoadTask(
            self.ids, hit.request, units.copy(), 0, TaskState.COPYING, first=hit.first, tokens=hit.tokens
        )
        self.held.append((task, self.chains[hit.request].keys))
        return task

    def finish_loads(self) -> None:
        for task, keys in self.held:
            if self.fail:
                task.state, task.reason = TaskState.FAILED, "told to"
                for plane in self.planes:  # a failed copy may have written anything
                    plane[task.units] = 0xFF
            else:
                for offset, unit in enumerate(task.units):
                    page, row = divmod(task.first + offset, self.page_tokens)
                    saved = self.pages[keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]]
                    for plane, rows in zip(self.planes, saved, strict=True):
                        plane[unit] = rows[row]
                task.state = TaskState.DONE
            self.queue.append(task)
        self.held = []

    def offload(self, request: str, chain: PageChain, units: np.ndarray, start: int = 0) -> OffloadTask:
        assert start == 0
        keys = chain.keys
        count = min(len(units) // self.page_tokens, chain.pages)
        known = 0
        while known < count and keys[known * KEY_BYTES : (known + 1) * KEY_BYTES] in self.pages:
            known += 1
        self.ids += 1
        task = OffloadTask(self.ids, request, units, count - known, TaskState.COPYING, start_page=known)
        if self.refuse_offloads or count == known:
            task.state, task.pages = TaskState.DONE, 0
            if self.refuse_offloads:
                self.refuse_offloads -= 1
                task.reason = "full"
            self.queue.append(task)
        elif self.queued is not None:
            self.queued.append((task, keys))
        else:
            self._store(task, keys)
        return task

    def copy_offloads(self) -> None:
        """Let queued offloads go, and queue no more."""
        queued, self.queued = self.queued or [], None
        for task, keys in queued:
            self._store(task, keys)

    def _store(self, task: OffloadTask, keys: bytes) -> None:
        for page in range(task.start_page, task.start_page + task.pages):
            rows = task.units[page * self.page_tokens : (page + 1) * self.page_tokens]
            key = keys[page * KEY_BYTES : (page + 1) * KEY_BYTES]
            self.pages[key] = [plane[rows].copy() for plane in self.planes]
        self.queue.append(task)

    def cancel(self, request: str) -> None:
        self.calls.append(f"cancel {request}")
        for item in [item for item in self.queued or [] if item[0].request == request]:
            self.queued.remove(item)
            item[0].state, item[0].reason = TaskState.CANCELLED, "cancelled"
            self.queue.append(item[0])

    def forget(self, request: str) -> None:
        self.calls.append("forget")

    def step(self, stream: Any = None) -> list[Task]:
        if not self.hold:
            self.finish_loads()
        done, self.queue = self.queue, []
        for task in done:
            if task.state is TaskState.COPYING:
                task.state = TaskState.DONE
        return done

    def wait(self, timeout_s: float) -> None:
        pass

    def close(self, timeout_s: float = 5.0) -> None:
        self.closed = True


def replace_eos(token: int) -> ModelConfig:
    return dataclasses.replace(CONFIG, eos_token_id=token)
