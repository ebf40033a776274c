"""Time to first token on the demo's model: cold, device hit, host hit; and what a load costs other requests.

    python benchmarks/ttft.py

Prints, as medians of interleaved runs in one process: cold prefill against transformers on the same weights
and cores; `TTFT(host hit) - TTFT(device hit)` against `1.3 * bytes / memcpy rate + 10 ms`, the memcpy being
one of as many bytes into the same KV buffer; and tokens per second of requests that decode while loads run,
one after the other, against the same without.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in the demo: no spinning beside the copies
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT)]

import torch  # noqa: E402
from goals import at_least, at_most  # noqa: E402
from sidecars import serving  # noqa: E402

from mini_engine.engine import Engine, Phase, Request  # noqa: E402
from mini_engine.model import Llama  # noqa: E402
from mini_engine.weights import bundled_gguf, chat_prompt, default_cache, load_tokenizer, prepare  # noqa: E402

SLOTS = 3840
PROMPT_TOKENS = 3000
COLD_ROUNDS = 2
HIT_ROUNDS = 5
BLOCKS, BLOCK_S = 3, 1.5
"""Decoding with and without loads: so many blocks of each, so long."""


class Bench:
    """The engine, its prompt, and ways to ask."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        tokenizer = load_tokenizer(folder)
        text = (ROOT / "examples" / "texts" / "alice_in_wonderland.txt").read_text()
        self.prompt = chat_prompt(tokenizer, text)[:PROMPT_TOKENS]
        self.engine = Engine(Llama.load(folder), slots=SLOTS, run_dir=run_dir)
        self.engine.memory.kv_buffer.zero_()  # touch it: the first run shall not pay for that
        self.asked = 0

    def ask(self, new_tokens: int = 1) -> Request:
        """One answer, and all its copies done."""
        self.asked += 1
        request = self.engine.add(f"bench {self.asked}", self.prompt, new_tokens, ignore_eos=True)
        self.engine.run()
        return request

    def cold(self) -> Request:
        self.engine.flush_device()
        if self.engine.worker.flush() is None:
            raise RuntimeError("the sidecar did not answer to a flush")
        return expect(self.ask(), computed=len(self.prompt))

    def device_hit(self) -> Request:
        return expect(self.ask(), computed=len(self.prompt) - self.tail)

    def host_hit(self) -> Request:
        self.engine.flush_device()
        return expect(self.ask(), computed=len(self.prompt) - self.tail, from_host=self.tail)

    @property
    def tail(self) -> int:
        page = self.engine.page_tokens
        return (len(self.prompt) - 1) // page * page

    def memcpy_rate(self, size: int) -> float:
        """Bytes a second of plain copies of `size` bytes into the KV buffer, one thread."""
        target = self.engine.memory.kv_buffer.view(-1).view(torch.uint8).numpy()[:size]
        source = np.ones(size, np.uint8)
        self.engine.flush_device()  # what was there is gone
        seconds = [timed(lambda: np.copyto(target, source)) for _ in range(7)]
        return size / statistics.median(seconds)


def expect(request: Request, **numbers: int) -> Request:
    """RuntimeError where the KV did not come from where it should have."""
    for name, number in numbers.items():
        if getattr(request, name) != number:
            raise RuntimeError(
                f"{name}={getattr(request, name)}, expected {number}: {request.miss_reason or request}"
            )
    return request


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def transformers_prefill(folder: Path, prompt: list[int]) -> Callable[[], object] | None:
    """A prefill by transformers on the same weights; None where it is not installed."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    from safetensors.torch import load_file

    cfg = Llama.load(folder).config
    config = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_hidden_layers,
        num_attention_heads=cfg.num_attention_heads,
        num_key_value_heads=cfg.num_key_value_heads,
        head_dim=cfg.head_dim,
        rms_norm_eps=cfg.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta},
        max_position_embeddings=cfg.max_position_embeddings,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False, assign=True)
    model.tie_weights()
    model.train(False)
    tokens = torch.tensor([prompt])

    @torch.inference_mode()
    def prefill() -> object:
        return model(tokens, use_cache=True, logits_to_keep=1).logits

    return prefill


def cold_and_hits(bench: Bench, theirs: Callable[[], object] | None) -> None:
    """Everything about the time to first token."""
    n = len(bench.prompt)
    colds, others = [], []
    for _ in range(COLD_ROUNDS):
        if theirs is not None:
            others.append(timed(theirs))
        colds.append(bench.cold().first_token_s)
    cold = statistics.median(colds)
    line = f"cold prefill of {n} tokens: {n / cold:.0f} tokens/s"
    if others:
        ratio = statistics.median(others) / cold
        line += (
            f", transformers {n / statistics.median(others):.0f} tokens/s: ratio {ratio:.2f} "
            f"{at_least(ratio, 0.75)}"
        )
    else:
        line += " (transformers is not installed: nothing to compare with)"
    print(line)

    hosts, devices, loads = [], [], []
    for _ in range(HIT_ROUNDS):
        host = bench.host_hit()
        hosts.append(host.first_token_s)
        loads.append(host.load_s)
        devices.append(bench.device_hit().first_token_s)
    host_s, device_s = statistics.median(hosts), statistics.median(devices)
    size = bench.tail * bench.engine.memory.get_cell_size()
    rate = bench.memcpy_rate(size)
    bound = 1.3 * size / rate + 0.010
    print(
        f"time to first token: cold {cold * 1e3:.0f} ms, device hit {device_s * 1e3:.0f} ms, host hit "
        f"{host_s * 1e3:.0f} ms\n"
        f"  host hit: {cold / host_s:.1f} times sooner than cold {at_least(cold / host_s, 12, 0)}"
    )
    late_ms = (host_s - device_s) * 1e3
    print(
        f"  host hit - device hit: {late_ms:.1f} ms {at_most(late_ms, bound * 1e3, 1)}, the load itself "
        f"{statistics.median(loads) * 1e3:.1f} ms\n"
        f"  that goal: 1.3 * {size / 1e6:.0f} MB / {rate / 1e9:.2f} GB/s of a plain copy + 10 ms"
    )


def others_during_loads(bench: Bench) -> None:
    """Tokens per second of three decoding requests: alone, and with loads one after the other."""
    engine = bench.engine
    talkers = [
        engine.add(f"talker {number}", bench.prompt[number * 64 : number * 64 + 64], 400, ignore_eos=True)
        for number in range(3)
    ]
    while any(talker.phase is not Phase.DECODE for talker in talkers):
        engine.step()
    chain = bench.engine.add("probe", bench.prompt, 1).chain  # only for its keys: cancelled before it runs
    engine.cancel(engine.waiting[0])
    state = engine.tasks.task_alloc("loads", bench.prompt, match_limit=0)
    if state is None:
        raise RuntimeError("no room on the device for the loads")
    slots = engine.tasks.slots("loads", 0, bench.tail)
    hold = engine.tasks.hold_load("loads", 0, bench.tail)
    count, rates = 0, {True: [], False: []}  # type: ignore[var-annotated]
    for block in range(2 * BLOCKS):
        loading = bool(block % 2)
        task = None
        start, before = time.perf_counter(), sum(len(talker.tokens) for talker in talkers)
        while time.perf_counter() - start < BLOCK_S:
            if loading and (task is None or task.final):
                if task is not None and task.reason:
                    raise RuntimeError(f"a load failed: {task.reason}")
                hit = engine.worker.lookup("loads", chain, 0, limit=bench.tail)
                if hit is not None:
                    task = engine.worker.load(hit, slots)
                    count += 1
            engine.step()
        tokens = sum(len(talker.tokens) for talker in talkers) - before
        rates[loading].append(tokens / (time.perf_counter() - start))
        while task is not None and not task.final:
            engine.step()
    engine.worker.cancel("loads")
    engine.tasks.release(hold)
    engine.tasks.task_free("loads")
    for talker in talkers:
        engine.cancel(talker)
    engine.run()
    alone, beside = statistics.median(rates[False]), statistics.median(rates[True])
    print(
        f"three requests that decode: {alone:.1f} tokens/s, {beside:.1f} tokens/s during loads: "
        f"ratio {beside / alone:.2f} {at_least(beside / alone, 0.9)}\n"
        f"  {count} loads of {bench.tail} tokens, one after the other"
    )


def main() -> None:
    folder = prepare(bundled_gguf(), default_cache())
    print(f"SmolLM2-135M-Instruct, float32, {torch.get_num_threads()} threads, torch {torch.__version__}")
    with serving("768MiB") as run_dir:
        bench = Bench(run_dir, folder)
        try:
            cold_and_hits(bench, transformers_prefill(folder, bench.prompt))
            others_during_loads(bench)
        finally:
            bench.engine.close()


if __name__ == "__main__":
    main()
